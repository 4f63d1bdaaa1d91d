"""Flax modules around the ops; the linen twin is `jattn.nn.linen`."""

from jattn.nn.dense import attention_fn
from jattn.nn.held import PagedCache
from jattn.nn.multi_head import MultiHeadAttention
from jattn.nn.paged import PagedAttention
from jattn.nn.scan import layer_metadata, scan_layers

__all__ = ["MultiHeadAttention", "PagedAttention", "PagedCache", "attention_fn", "layer_metadata", "scan_layers"]
