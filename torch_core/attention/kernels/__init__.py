"""Triton and Gluon kernels of attention, a folder each."""
