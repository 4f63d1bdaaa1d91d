"""Device functions that kernels share, in Triton and in Gluon."""
