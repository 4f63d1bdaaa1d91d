"""Latent attention (MLA), its indexer, packed rows and writes of latents."""
