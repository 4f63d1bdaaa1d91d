"""Layers that keep a state between tokens, one slot for each sequence; `op.py` lists the parts of each op."""

from torch_core.state import op as op
