"""Triton and Gluon kernels of latent attention, a folder each."""
