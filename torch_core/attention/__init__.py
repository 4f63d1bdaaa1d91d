"""Attention: its calls, their meaning, and a folder for each kernel; `op.py` names what belongs to each op."""

from torch_core.attention import op as op
