"""Writes to the paged cache: keys and values, rotated ones, copies; `op.py` names what belongs to each op."""

from torch_core.cache_writes import op as op
