"""Writes to the paged cache: keys and values, rotated ones, copies; `op.py` lists the parts of each op."""

from torch_core.cache_writes import op as op
