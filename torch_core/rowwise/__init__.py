"""Products, norms and log-sum-exp of rows whose bits depend on the row alone; `op.py` lists the parts of each op."""

from torch_core.rowwise import op as op
