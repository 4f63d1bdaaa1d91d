"""A step on the device: placement, the compiled program, the sampler, one upload and one download."""
