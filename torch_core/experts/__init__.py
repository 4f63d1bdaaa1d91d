"""A feed-forward layer of experts and its router; `op.py` names what belongs to each op."""

from torch_core.experts import op as op
