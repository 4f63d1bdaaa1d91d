"""Triton and Gluon kernels of expert layers and routers."""
