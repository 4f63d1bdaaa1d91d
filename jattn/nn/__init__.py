"""Flax modules around the ops."""

from jattn.nn.paged import PagedAttention

__all__ = ["PagedAttention"]
