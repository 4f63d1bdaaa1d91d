"""Low-rank adapters of linear layers (LoRA); `op.py` lists the parts of each op."""

from torch_core.adapters import op as op
