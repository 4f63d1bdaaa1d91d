"""SparseLatentAttention: the layer of DeepSeek-V3.2, whose indexer chooses the tokens that a query attends to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jattn import ops
from jattn.metadata import AttentionMetadata
from jattn.nn.dense import rotated
from jattn.nn.latent import MultiHeadLatentAttention
from jattn.nn.options import CacheScale, DType, Implementation, KVChunkSize, Rope, Scale, Size
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import Limits, checked
from torch_core.base.specs import LatentCacheSpec


class LatentIndexer(nnx.Module):
    """The indexer of DeepSeek-V3.2; parameters are named as in Hugging Face's models.

    The published code also rotates queries and keys by a Hadamard matrix, which does not change the scores, and rounds
    them to fp8.

    Args:
        in_features: width of the layer's input.
        q_lora_rank: width of the compressed query.
        num_heads: number of heads (Hugging Face: index_n_heads).
        head_dim: elements of a head (index_head_dim).
        topk: number of keys to choose for each query (index_topk).
        rope: rotary embedding of the first `rope_dim` elements of queries and keys, a function of
            x[heads, tokens, rope_dim] and positions[tokens]; `DeepSeekRoPE(interleaved=False)`. None for none.
        rope_dim: number of rotated elements; below head_dim.
        dtype, param_dtype, kernel_init: as in flax's modules.
        implementation: as in `jattn.indexer_topk`.
        rngs: source of the initial values.

    Raises:
        InvalidInput: an option of the wrong type or out of range. The message names it.
    """

    @checked
    def __init__(
        self,
        in_features: Size,
        q_lora_rank: Size,
        *,
        num_heads: Size,
        head_dim: Annotated[int, Limits(2)],
        topk: Annotated[int, Limits(1)],
        rope_dim: int,
        rope: Rope = None,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        kernel_init: Callable[..., Any] = nnx.initializers.lecun_normal(),  # noqa: B008
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_int("rope_dim", rope_dim, 1, head_dim - 1)
        self.num_heads, self.head_dim, self.topk = num_heads, head_dim, topk
        self.rope, self.rope_dim = rope, rope_dim
        self.implementation = implementation

        def linear(inner: int, outer: int, dtype: Any = dtype, param_dtype: Any = param_dtype) -> nnx.Linear:
            return nnx.Linear(
                inner, outer, use_bias=False, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
            )

        self.wq_b = linear(q_lora_rank, num_heads * head_dim)
        self.wk = linear(in_features, head_dim)
        self.k_norm = nnx.LayerNorm(head_dim, epsilon=1e-6, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        # This projection is float32 in models of every dtype.
        self.weights_proj = linear(in_features, num_heads, jnp.float32, jnp.float32)

    def cache_spec(self, block_size: int, dtype: str) -> LatentCacheSpec:
        """Returns the layout of the key cache: the rotated elements first, then the others."""
        rest = self.head_dim - self.rope_dim
        return LatentCacheSpec(kv_lora_rank=self.rope_dim, rope_dim=rest, block_size=block_size, dtype=dtype)

    def keys(self, inputs: jax.Array, positions: jax.Array | None) -> jax.Array:
        """Returns the keys [tokens, head_dim] of inputs[batch..., length, in_features]."""
        return self._rotated(self.k_norm(self.wk(inputs))[..., None, :], positions).reshape(-1, self.head_dim)

    def choose(
        self,
        inputs: jax.Array,
        compressed_query: jax.Array,
        positions: jax.Array | None,
        key_cache: jax.Array,
        metadata: AttentionMetadata,
    ) -> jax.Array:
        """Returns the positions of the keys that each token attends to, int32[tokens, topk]."""
        query = self.wq_b(compressed_query).reshape(*inputs.shape[:-1], self.num_heads, self.head_dim)
        weights = self.weights_proj(inputs) * self.num_heads**-0.5
        query = self._rotated(query, positions).reshape(-1, self.num_heads, self.head_dim)
        query = query.astype(key_cache.dtype) if key_cache.dtype.itemsize > 1 else query
        operands = (query, weights.reshape(-1, self.num_heads), key_cache)
        return ops.indexer_topk(
            *jax.lax.stop_gradient(operands),
            **metadata.sequences,
            topk=min(self.topk, metadata.block_tables.shape[1] * key_cache.shape[1]),
            scale=self.head_dim**-0.5,
            implementation=self.implementation,
        )

    def _rotated(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        if self.rope is None:
            return x
        turned, rest = jnp.split(x, [self.rope_dim], axis=-1)
        return jnp.concatenate([rotated(self.rope, turned, positions), rest], axis=-1)


class LatentOptions(TypedDict, total=False):
    """The keywords of `MultiHeadLatentAttention`."""

    kv_lora_rank: Required[Size]
    qk_nope_head_dim: Required[Size]
    qk_rope_head_dim: Required[Size]
    v_head_dim: Required[Size]
    q_lora_rank: Required[Size | None]
    out_features: Size | None
    rope: Rope
    scale: Scale
    use_bias: bool
    head_gate: bool
    epsilon: float
    dtype: DType | None
    param_dtype: DType
    kernel_init: Callable[..., Any]
    dot_general: Callable[..., Any]
    k_scale: CacheScale
    kv_chunk_size: KVChunkSize
    deterministic_gradients: bool
    implementation: Implementation
    rngs: Required[nnx.Rngs]


class SparseLatentAttention(MultiHeadLatentAttention):
    """Multi-head latent attention to the tokens that an indexer chooses (DeepSeek-V3.2), in the absorbed form.

    - `y = attn(x)` attends within a padded batch `[batch..., length, features]`, with padding at the end of rows.
    - `y, caches = attn(x, cache=(latents, index_keys), metadata=metadata)` takes packed tokens and two paged caches
      with the same block tables: one of `LatentCacheSpec`, one of `indexer.cache_spec`.

    The choice has no gradient: train the indexer with its own loss.

    Args:
        num_heads, in_features: as in `MultiHeadLatentAttention`.
        indexer: the module that chooses the tokens; None for a layer that is given the choice of an earlier one
            (IndexCache, arXiv:2603.12201), and whose cache has latents alone.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, out_features, rope, scale, use_bias, head_gate,
            epsilon, dtype, param_dtype, kernel_init, k_scale, kv_chunk_size, deterministic_gradients, implementation,
            rngs: as in `MultiHeadLatentAttention`.
        q_lora_rank: width of the compressed query; required.

    Raises:
        InvalidInput: as in `MultiHeadLatentAttention`, or q_lora_rank is None.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> indexer = LatentIndexer(12, 10, num_heads=2, head_dim=8, topk=3, rope_dim=4, rngs=rngs)
        >>> sizes = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=10)
        >>> SparseLatentAttention(2, 12, indexer=indexer, **sizes, rngs=rngs)(jnp.ones((3, 5, 12))).shape
        (3, 5, 12)
    """

    @checked
    def __init__(
        self, num_heads: Size, in_features: Size, *, indexer: LatentIndexer | None, **options: Unpack[LatentOptions]
    ) -> None:
        if options.get("q_lora_rank") is None:
            raise InvalidInput("q_lora_rank", value=None, wanted="the indexer's queries come from the compressed query")
        super().__init__(num_heads, in_features, **options)
        self.indexer = indexer

    def __call__(  # type: ignore[override]
        self,
        inputs: jax.Array,
        *,
        cache: tuple[jax.Array, jax.Array] | jax.Array | None = None,
        metadata: AttentionMetadata | None = None,
        input_positions: jax.Array | None = None,
        chosen: jax.Array | None = None,
    ) -> Any:
        """Attends within each row, or to the caches; see `MultiHeadLatentAttention.__call__`.

        `chosen` is the choice that `with_choice` of an earlier layer returned, for a layer without an indexer.
        """
        out, caches, _ = self.with_choice(inputs, cache, metadata, input_positions, chosen)
        return out if cache is None else (out, caches)

    def with_choice(
        self,
        inputs: jax.Array,
        cache: Any = None,
        metadata: AttentionMetadata | None = None,
        input_positions: jax.Array | None = None,
        chosen: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, Any]:
        """Returns the output of a call, the caches, and the tokens' positions that were chosen, int32[tokens, topk].

        Args:
            inputs, cache, metadata, input_positions, chosen: as in a call.

        Raises:
            InvalidInput: as a call does, or a choice for a layer with an indexer, or none for a layer without.
        """
        if (chosen is None) == (self.indexer is None):
            problem = (
                "is None and the layer has no indexer" if chosen is None else "is given and the layer has an indexer"
            )
            raise InvalidInput("chosen", problem, "an indexer or an earlier layer chooses the tokens")
        input_positions = self._checked(inputs, cache, metadata, input_positions)
        query, latent, k_pe = self._projected(inputs, input_positions)
        old_keys = None
        if metadata is None or cache is None:
            # The batch serves as its own cache, with one token in each block.
            batch = _own_metadata(latent.shape[0], max(inputs.shape[-2], 1))
            latents = jnp.concatenate([latent, k_pe], axis=-1)[:, None]
        else:
            batch = metadata
            old, old_keys = (cache, None) if self.indexer is None else cache
            latents = self._write(latent, k_pe, old, batch.slot_mapping)
        caches: Any = latents
        if self.indexer is not None:
            index_keys = self.indexer.keys(inputs, input_positions)
            first, rest = jnp.split(index_keys, [self.indexer.rope_dim], axis=-1)
            index_keys = index_keys[:, None]
            if old_keys is not None:
                index_keys = ops.write_latent_cache(
                    first, rest, old_keys, batch.slot_mapping, implementation=self.implementation
                )
            compressed, caches = self.q_a_layernorm(self.q_a_proj(inputs)), (latents, index_keys)
            chosen = self.indexer.choose(inputs, compressed, input_positions, index_keys, batch)
        out = self._absorbed(query, latents, batch.sequences, chosen)
        return self.o_proj(self._joined(out, inputs)), caches, chosen


def _own_metadata(num_tokens: int, length: int) -> AttentionMetadata:
    """Returns the metadata of rows of `length` tokens in consecutive blocks of one token."""
    rows = num_tokens // length
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    return AttentionMetadata(
        block_tables=tokens.reshape(rows, length),
        seq_lens=jnp.full(rows, length, jnp.int32),
        query_start_loc=jnp.arange(rows + 1, dtype=jnp.int32) * length,
        slot_mapping=tokens,
        max_query_len=length,
    )
