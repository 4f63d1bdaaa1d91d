"""The Triton kernels of layers with a state: a folder for each."""
