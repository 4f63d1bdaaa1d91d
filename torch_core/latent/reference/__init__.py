"""The specification of latent attention in plain torch."""
