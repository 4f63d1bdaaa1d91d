"""Runs Gluon kernels without a GPU: their own source, on numpy arrays, by warps that a seeded scheduler interleaves."""
