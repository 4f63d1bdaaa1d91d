"""Latent attention (MLA), its indexer, packed rows and writes of latents; `op.py` lists the parts of each op."""

from torch_core.latent import op as op
