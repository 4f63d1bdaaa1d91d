"""Attention on CPU tensors."""
