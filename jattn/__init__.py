"""Paged attention for JAX and Flax from one torch and Triton core."""
