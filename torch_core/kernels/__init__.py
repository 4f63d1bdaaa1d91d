"""Triton and Gluon kernels, and nothing else: this package imports triton only."""
