"""The kernels of short queries over keys in chunks: split, combine, plan."""
