"""A feed-forward layer of experts and its router; `op.py` lists the parts of each op."""

from torch_core.experts import op as op
