"""The write of latents and rotary keys: kernel and plan."""
