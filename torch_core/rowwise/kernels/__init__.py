"""The Triton kernels of operations on rows: a folder for each."""
