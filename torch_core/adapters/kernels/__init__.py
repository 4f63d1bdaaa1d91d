"""The kernels of low-rank adapters."""
