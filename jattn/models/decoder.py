"""Decoder: the Llama-family language model over a paged cache, and the same weights over dense sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.metadata import AttentionMetadata
from jattn.models.config import ModelConfig
from jattn.models.layers import INITIALIZER, GatedMLP, RMSNorm, linear
from jattn.models.paged_model import PagedSpec
from jattn.models.rotary import apply_rotary, inverse_frequencies, rotary_angles
from jattn.nn import PagedAttention
from torch_core.errors import InvalidInput

__all__ = ["Attention", "Decoder", "DecoderLayer"]


class Attention(nnx.Module):
    """Self-attention with rotary embeddings; query, key and value share one matrix product.

    Args:
        config: the model's.
        rngs: source of the initial values.
        implementation: of the paged ops; see `jattn.ops.paged_attention`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, implementation: str | None = None) -> None:
        self.config = config
        fused, options = config.query_size + 2 * config.key_value_size, {"param_dtype": jnp.dtype(config.dtype)}
        self.qkv_proj = linear(config.hidden_size, fused, use_bias=config.attention_bias, rngs=rngs, **options)
        self.o_proj = linear(
            config.query_size, config.hidden_size, use_bias=config.attention_output_bias, rngs=rngs, **options
        )
        self.paged_attention = PagedAttention(
            config.num_attention_heads,
            config.head_dim,
            num_kv_heads=config.num_key_value_heads,
            sliding_window=config.sliding_window,
            implementation=implementation,
        )

    def __call__(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array], kv_cache: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array, jax.Array]:
        """Attends packed tokens `[tokens, hidden]` to their cached prefixes; returns the output and the new cache."""
        query, key, value = self._project(x, angles)
        output, kv_cache = self.paged_attention(query, key, value, kv_cache, metadata)
        return self.o_proj(output.reshape(*x.shape[:-1], -1)), kv_cache

    def forward_dense(self, x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Attends within each row of `[batch, tokens, hidden]`; no cache."""
        query, key, value = self._project(x, angles)
        window, scale = self.config.sliding_window, self.config.head_dim**-0.5
        seen = None if window is None else (window - 1, 0)
        output = jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=True, local_window_size=seen)
        return self.o_proj(output.reshape(*x.shape[:-1], -1))

    def _project(self, x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        num_heads, num_kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        heads = self.qkv_proj(x).reshape(*x.shape[:-1], num_heads + 2 * num_kv_heads, self.config.head_dim)
        rotated = apply_rotary(heads[..., : num_heads + num_kv_heads, :], *angles)
        return rotated[..., :num_heads, :], rotated[..., num_heads:, :], heads[..., num_heads + num_kv_heads :, :]


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, implementation: str | None = None) -> None:
        norm = {"epsilon": config.rms_norm_eps, "dtype": config.dtype}
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = Attention(config, rngs=rngs, implementation=implementation)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.mlp = GatedMLP(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array], kv_cache: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array, jax.Array]:
        """Maps packed tokens `[tokens, hidden]` and this layer's cache to the next ones."""
        attended, kv_cache = self.self_attn(self.input_layernorm(x), angles, kv_cache, metadata)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kv_cache

    def forward_dense(self, x: jax.Array, angles: tuple[jax.Array, jax.Array], dropout: nnx.Dropout) -> jax.Array:
        """Maps `[batch, tokens, hidden]` to the same shape; no cache."""
        x = x + dropout(self.self_attn.forward_dense(self.input_layernorm(x), angles))
        return x + dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nnx.Module):
    """A decoder-only language model: `hidden, caches = model(token_ids, positions, caches, metadata)`.

    The caches go in and come out explicitly, one array per layer, so that a jitted step can donate them; the module
    itself never changes after it was built. It works in nnx's graph and tree mode.

    Args:
        config: shapes and options.
        rngs: source of the initial values.
        implementation: of the paged ops: None (the best for the device), "triton", "torch" or "xla".
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, implementation: str | None = None) -> None:
        self.config = config
        sizes, options = (config.vocab_size, config.hidden_size), {"param_dtype": jnp.dtype(config.dtype), "rngs": rngs}
        self.embed_tokens = nnx.Embed(*sizes, embedding_init=INITIALIZER, **options)
        self.layers = nnx.List(
            [DecoderLayer(config, rngs=rngs, implementation=implementation) for _ in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=config.dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else linear(*reversed(sizes), use_bias=False, preferred_element_type=jnp.float32, **options)
        )

    @property
    def paged_spec(self) -> PagedSpec:
        """What the engine needs to know of it."""
        config = self.config
        return PagedSpec(
            vocab_size=config.vocab_size,
            max_model_len=config.max_position_embeddings,
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=jnp.dtype(config.dtype).name,
            sliding_window=config.sliding_window,
            eos_token_ids=config.eos_token_ids,
        )

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, kv_caches: tuple[jax.Array, ...], metadata: AttentionMetadata
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Runs the new tokens of a batch of sequences, packed into one axis, and writes their keys and values.

        Args:
            token_ids: int32[tokens], below vocab_size; the caller checks that on the host. Padding may be any token.
            positions: int32[tokens]; the position of each token in its own sequence, from 0.
            kv_caches: one `(num_blocks, 2, block_size, num_kv_heads, head_dim)` array per layer.
            metadata: block tables, lengths and slots of the step.

        Returns:
            The normalised hidden states `[tokens, hidden]`, to be given to `logits` (pick the rows first), and the
            caches with the new keys and values.
        """
        x = self.embed_tokens(token_ids)
        angles = rotary_angles(positions, inverse_frequencies(self.config))
        new_caches = []
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, kv_cache = layer(x, angles, kv_cache, metadata)
            new_caches.append(kv_cache)
        return self.norm(x), tuple(new_caches)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns float32[..., vocab_size], the unnormalised log-probabilities of the next token, for chosen rows."""
        if self.lm_head is not None:
            return self.lm_head(hidden)
        # Not Embed.attend, which rounds the logits to the dtype of the model.
        embedding = self.embed_tokens.embedding[...]
        return jnp.einsum("...e,ve->...v", hidden, embedding, preferred_element_type=jnp.float32)

    def forward_dense(
        self, token_ids: jax.Array, *, dropout_rate: float = 0.0, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Returns float32[batch, tokens, vocab_size] for whole sequences, without a cache: training and comparison.

        Args:
            token_ids: int32[batch, tokens]; every row starts at position 0.
            dropout_rate: of the embedding and of each residual branch; 0 for off.
            dropout_key: a `jax.random.key`; needed when the rate is not 0.

        Raises:
            InvalidInput: dropout_rate outside [0, 1), or not 0 without a key.
        """
        if not 0.0 <= dropout_rate < 1.0:
            raise InvalidInput(f"dropout_rate is {dropout_rate}; it must be at least 0 and less than 1.")
        if dropout_rate and dropout_key is None:
            raise InvalidInput(f"dropout_rate is {dropout_rate} but dropout_key is None; pass a jax.random.key.")
        dropout = nnx.Dropout(dropout_rate, rngs=None if dropout_key is None else nnx.Rngs(dropout=dropout_key))
        x = dropout(self.embed_tokens(token_ids))
        positions = jnp.arange(token_ids.shape[1], dtype=jnp.int32)
        angles = rotary_angles(positions, inverse_frequencies(self.config))
        for layer in self.layers:
            x = layer.forward_dense(x, angles, dropout)
        return self.logits(self.norm(x))
