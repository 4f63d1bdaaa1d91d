"""A further input of each layer: of the model, from tokens and their embeddings, and of a layer, which adds it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.layers import INITIALIZER, linear, norm
from jattn.llm.models.parts import PerLayerInputConfig
from jattn.llm.models.tensor_parallel import TensorParallel
from jattn.ops.activations import activated
from torch_core.base.errors import InvalidInput, Unsupported


class PerLayerInputs(nnx.Module):
    """Computes the further input of each layer, from the token's row of a table and from its embedding.

    The method is that of Gemma 3n (per-layer embeddings).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, parallel: TensorParallel | None = None) -> None:
        self.sizes = sizes = _sizes(config)
        self.parallel = TensorParallel(size=1) if parallel is None else parallel
        rows = self.parallel.vocab(sizes.vocab_size)
        width, dtype = sizes.num_layers * sizes.hidden_size, jnp.dtype(config.dtype)
        self.embed_tokens = nnx.Embed(rows, width, embedding_init=INITIALIZER, param_dtype=dtype, rngs=rngs)
        self.projection = linear(config.hidden_size, width, use_bias=False, param_dtype=dtype, rngs=rngs)
        self.norm = norm(config, sizes.hidden_size)

    def __call__(self, token_ids: jax.Array, x: jax.Array) -> list[jax.Array]:
        """Returns [..., hidden_size] of each layer, of tokens int32[...] and their embeddings [..., hidden]."""
        if jnp.issubdtype(token_ids.dtype, jnp.floating):
            wanted = "each layer of this model has an input from the token's id: give ids"
            raise Unsupported("token_ids", "are embeddings", wanted)
        split, table = (*token_ids.shape, self.sizes.num_layers, self.sizes.hidden_size), self.embed_tokens
        # Without peers: this sum does not depend on that of the embedding.
        rows = self.parallel.looked_up(table, token_ids, table.num_embeddings)
        own = (rows * self.sizes.hidden_size**0.5).reshape(split)
        projected = self.norm((self.projection(x) * x.shape[-1] ** -0.5).reshape(split))
        joined = (projected + own) * 2.0**-0.5
        return [joined[..., layer, :] for layer in range(self.sizes.num_layers)]


class PerLayerInput(nnx.Module):
    """Gates a layer's further input by its output, and projects and normalises it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        size, options = _sizes(config).hidden_size, {"param_dtype": jnp.dtype(config.dtype), "rngs": rngs}
        self.hidden_act = config.hidden_act
        self.gate = linear(config.hidden_size, size, use_bias=False, **options)
        self.projection = linear(size, config.hidden_size, use_bias=False, **options)
        self.norm = norm(config)

    def __call__(self, x: jax.Array, own: jax.Array) -> jax.Array:
        """Maps the residual stream [..., hidden] and the layer's input [..., size] to what is added to the stream."""
        return self.norm(self.projection(activated(self.hidden_act, self.gate(x)) * own))


def _sizes(config: ModelConfig) -> PerLayerInputConfig:
    if config.per_layer_input is None:
        raise InvalidInput("config.per_layer_input", value=None, wanted="give a PerLayerInputConfig")
    return config.per_layer_input
