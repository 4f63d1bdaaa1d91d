"""CrossAttention: one layer's attention to an encoder's output, over cache blocks or over arrays."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.layers import linear
from jattn.metadata import AttentionMetadata
from jattn.nn import PagedAttention, attention_fn
from torch_core.base.errors import InvalidInput


class CrossAttention(nnx.Module):
    """Attends to all of an encoder's output; its keys and values share one matrix product and are computed once.

    Args:
        config: the model's.
        rngs: source of the initial values.
        implementation: implementation of the paged ops; see `jattn.ops.paged_attention`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, implementation: str | None = None) -> None:
        self.config = config
        options = {"param_dtype": jnp.dtype(config.dtype), "rngs": rngs}
        width, use_bias = config.hidden_size, config.attention_bias
        self.q_proj = linear(width, config.query_size, use_bias=use_bias, **options)
        self.kv_proj = linear(width, 2 * config.key_value_size, use_bias=use_bias, **options)
        self.o_proj = linear(config.query_size, width, use_bias=config.attention_output_bias, **options)
        self.paged_attention = PagedAttention(
            config.num_attention_heads,
            config.head_dim,
            num_kv_heads=config.num_key_value_heads,
            causal=False,
            scale=config.attention_scale,
            implementation=implementation,
        )

    def write(self, encoded: jax.Array, kv_cache: jax.Array, slot_mapping: jax.Array) -> jax.Array:
        """Writes the keys and values of packed encoder states `[tokens, hidden]`; returns the new cache."""
        key, value = self._keys_and_values(encoded)
        return self.paged_attention.write(key, value, kv_cache, slot_mapping)

    def forward_paged(self, x: jax.Array, kv_cache: jax.Array, metadata: AttentionMetadata) -> jax.Array:
        """Attends packed tokens `[tokens, hidden]` to the keys and values that `write` stored in the blocks of
        `metadata.cross`.

        Raises:
            InvalidInput: the metadata are those of a step without cross attention.
        """
        cross = metadata.cross
        if cross is None:
            raise InvalidInput("metadata.cross is None; a model with an encoder needs the blocks of each row's input.")
        tables = replace(metadata, block_tables=cross.block_tables, seq_lens=cross.seq_lens, cross=None)
        output, _ = self.paged_attention(self._queries(x), None, None, kv_cache, tables)
        return self.o_proj(output.reshape(*x.shape[:-1], -1))

    def forward_dense(self, x: jax.Array, encoded: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Attends `[batch, tokens, hidden]` to each row's `[batch, encoder_tokens, hidden]`, up to its length."""
        key, value = self._keys_and_values(encoded)
        options = {**self.paged_attention.options, "implementation": None}
        if lengths is not None:
            options |= {"lengths": jnp.full(len(x), x.shape[1], jnp.int32), "key_lengths": lengths}
        return self.o_proj(attention_fn(self._queries(x), key, value, **options).reshape(*x.shape[:-1], -1))

    def _queries(self, x: jax.Array) -> jax.Array:
        return self.q_proj(x).reshape(*x.shape[:-1], self.config.num_attention_heads, self.config.head_dim)

    def _keys_and_values(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = (*encoded.shape[:-1], 2 * self.config.num_key_value_heads, self.config.head_dim)
        key, value = jnp.split(self.kv_proj(encoded).reshape(shape), 2, axis=-2)
        return key, value
