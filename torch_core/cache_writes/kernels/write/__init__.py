"""The write of new keys and values: kernels and plan."""
