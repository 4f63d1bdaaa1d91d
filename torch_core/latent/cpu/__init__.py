"""Latent attention on CPU tensors."""
