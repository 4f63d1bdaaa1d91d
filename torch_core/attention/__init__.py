"""Attention: its calls, their references, and a folder for each kernel; `op.py` lists the parts of each op."""

from torch_core.attention import op as op
