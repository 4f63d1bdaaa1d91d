"""Triton kernels of cache writes, a folder each."""
