"""The layers of a model that write a paged cache."""

from __future__ import annotations

from collections.abc import Iterator

from flax import nnx

from jattn.nn.latent import MultiHeadLatentAttention
from jattn.nn.paged import PagedAttention


def paged_layers(model: nnx.Module) -> Iterator[tuple[str, PagedAttention | MultiHeadLatentAttention]]:
    """Yields each layer of a model that writes a cache, with its path, such as "layers.0.self_attn.paged_attention"."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, PagedAttention | MultiHeadLatentAttention):
            yield ".".join(map(str, path)), module
