"""Latent attention (MLA), its indexer, packed rows and writes of latents; `op.py` names what belongs to each op."""

from torch_core.latent import op as op
