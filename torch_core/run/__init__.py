"""Calls on torch tensors: launch plans on CUDA, plain torch on a CPU."""
