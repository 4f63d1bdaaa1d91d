"""Multi-head latent attention over chunks of cached latents: kernel, plan, tiles."""
