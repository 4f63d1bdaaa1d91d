"""Latent attention of few heads over 8-bit latents on Hopper: kernel, warpgroups, plan."""
