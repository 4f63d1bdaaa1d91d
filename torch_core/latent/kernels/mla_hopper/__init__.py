"""Multi-head latent attention on Hopper: kernel, work, warps, plan."""
