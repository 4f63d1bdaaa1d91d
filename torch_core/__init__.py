"""Paged attention in torch and Triton: kernels, metadata builders, backends and the block allocator. Never imports jax.

Import the parts by name (`torch_core.cache`, `torch_core.ops`, ...): this package itself imports nothing, so that
the standard-library parts stay usable without torch.
"""
