"""MultiHeadLatentAttention: DeepSeek's attention layer, in the plain form and in the absorbed form over latents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn import ops
from jattn.metadata import AttentionMetadata
from jattn.nn.checks import check_packed
from jattn.nn.dense import rotated
from jattn.nn.expansion import LatentExpansion
from jattn.nn.norms import normalised
from jattn.nn.options import CacheScale, DType, Epsilon, Implementation, KVChunkSize, Rope, Scale, Size
from jattn.nn.paged import KVRange, KVScales
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import checked


class MultiHeadLatentAttention(nnx.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); parameters are named as in Hugging Face's models.

    - `y = attn(x)` attends within a padded batch `[batch..., length, features]`, with padding at the end of rows. It
      expands latents to the keys and values of each head. It is differentiable.
    - `y, cache = attn(x, cache=cache, metadata=metadata)` takes packed tokens `[tokens, features]` and a paged cache of
      latents (`LatentCacheSpec`), and returns the updated cache. The expansion is absorbed into the query and the
      output, so that a cached token is one row for all heads. `from_start=True` states that no sequence has earlier
      tokens: the new tokens then attend to each other in the plain form, which is faster for prompts.

    Args:
        num_heads: number of query heads.
        in_features: width of the input.
        kv_lora_rank: width of the latent.
        qk_nope_head_dim, qk_rope_head_dim: parts of a query or key head without and with rotary embedding.
        v_head_dim: width of a value head.
        q_lora_rank: width of the compressed query; None for a single query projection.
        out_features: width of the output; in_features by default.
        rope: `DeepSeekRoPE`, or any function of x[heads, tokens, dim] and positions[tokens]; None for none.
        scale: factor on the scores; by default `(qk_nope_head_dim + qk_rope_head_dim) ** -0.5`, multiplied by the
            `score_factor` of the rope if it has one.
        head_gate: multiply each head's results by the sigmoid of a gate, which is projected from the input.
        use_bias: add biases to the projections from and to the features (Hugging Face: attention_bias).
        epsilon: term that the RMS norms add to the mean square.
        dtype, param_dtype, kernel_init, dot_general: as in flax's modules.
        k_scale: dequantisation scale of an 8-bit cache, if `kv_scales` is None.
        kv_chunk_size, implementation: as in `jattn.mla_attention`.
        deterministic_gradients: compute gradients with the same bits in every run; wide heads are faster without.
        rngs: source of the initial values.

    Attributes:
        kv_scales: the scales of an 8-bit cache; latents use the scale of keys. `jattn.nn.paged.KVScales`.
        kv_range: the range of latents, while scales are measured.
        absorbed_adapters: low-rank adapters of `kv_b_proj` for the absorbed form, which a model with adapters sets.

    Raises:
        InvalidInput: an option of the wrong type or out of range, or a rope of another size. The message names it.

    Example:
        >>> sizes = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
        >>> attn = MultiHeadLatentAttention(num_heads=2, in_features=12, **sizes, rngs=nnx.Rngs(0))
        >>> attn(jnp.ones((3, 5, 12))).shape
        (3, 5, 12)
    """

    kv_scales: KVScales | None = None
    kv_range: KVRange | None = None
    absorbed_adapters: Any = None
    batch_invariant: bool = False

    @checked
    def __init__(
        self,
        num_heads: Size,
        in_features: Size,
        *,
        kv_lora_rank: Size,
        qk_nope_head_dim: Size,
        qk_rope_head_dim: Size,
        v_head_dim: Size,
        q_lora_rank: Size | None = None,
        out_features: Size | None = None,
        rope: Rope = None,
        scale: Scale = None,
        use_bias: bool = False,
        head_gate: bool = False,
        epsilon: Epsilon = 1e-6,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        kernel_init: Callable[..., Any] = nnx.initializers.lecun_normal(),  # noqa: B008
        dot_general: Callable[..., Any] = jax.lax.dot_general,
        k_scale: CacheScale = None,
        kv_chunk_size: KVChunkSize = None,
        deterministic_gradients: bool = True,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        if (rope_dim := getattr(rope, "dim", qk_rope_head_dim)) != qk_rope_head_dim:
            problem = f"is for {rope_dim} elements and qk_rope_head_dim is {qk_rope_head_dim}"
            raise InvalidInput("rope", problem, "they are the same elements")
        self.num_heads, self.in_features, self.rope = num_heads, in_features, rope
        self.kv_lora_rank, self.v_head_dim = kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        default = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 * getattr(rope, "score_factor", 1.0)
        self.scale: float = default if scale is None else scale
        self.dtype, self.k_scale = dtype, k_scale
        self.kv_chunk_size, self.implementation = kv_chunk_size, implementation
        self.deterministic_gradients = deterministic_gradients

        def linear(inner: int, outer: int, *, bias: bool = False) -> nnx.Linear:
            options: Any = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init, "rngs": rngs}
            return nnx.Linear(inner, outer, use_bias=bias, dot_general=dot_general, **options)

        def norm(features: int) -> nnx.RMSNorm:
            return nnx.RMSNorm(features, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        heads = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        if q_lora_rank is None:
            self.q_proj = linear(in_features, heads)
        else:
            self.q_a_proj = linear(in_features, q_lora_rank, bias=use_bias)
            self.q_a_layernorm = norm(q_lora_rank)
            self.q_b_proj = linear(q_lora_rank, heads)
        self.kv_a_proj_with_mqa = linear(in_features, kv_lora_rank + qk_rope_head_dim, bias=use_bias)
        self.kv_a_layernorm = norm(kv_lora_rank)
        self.kv_b_proj = linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim))
        self.gate_proj = linear(in_features, num_heads) if head_gate else None
        self.o_proj = linear(num_heads * v_head_dim, out_features or in_features, bias=use_bias)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        cache: jax.Array | None = None,
        metadata: AttentionMetadata | None = None,
        from_start: bool = False,
        input_positions: jax.Array | None = None,
    ) -> Any:
        """Attends within each row, or to the cache.

        Args:
            inputs: float[batch..., length, features]; with a cache, packed tokens float[tokens, features].
            cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]. It is consumed; use the returned one.
            metadata: the batch of the step, with a cache.
            from_start: whether no sequence has earlier tokens.
            input_positions: int[batch..., length] or [tokens], for rope; by default from 0 in each row, or those of
                the metadata.

        Returns:
            float[batch..., length, out_features] or float[tokens, out_features]; with a cache, a pair of this and the
            updated cache.

        Raises:
            InvalidInput: cache without metadata or metadata without cache, shapes that do not match, or metadata for
                another block size.
        """
        input_positions = self._checked(inputs, cache, metadata, input_positions)
        query, latent, k_pe = self._projected(inputs, input_positions)
        if metadata is None or cache is None:
            length = inputs.shape[-2]
            starts = jnp.arange(0, query.shape[0] + 1, max(length, 1), dtype=jnp.int32)
            if self.batch_invariant:
                # A prompt over a cache whose blocks are its tokens.
                rows = jnp.concatenate([latent, k_pe], axis=-1)[:, None]
                out = self._absorbed(query, rows, _one_pass(starts, length))
            else:
                out = self._plain(query, latent, k_pe, starts, length)
            return self.o_proj(self._joined(out, inputs))
        cache = self._write(latent, k_pe, cache, metadata.slot_mapping)
        if from_start and not self.batch_invariant:
            out = self._plain(query, latent, k_pe, metadata.query_start_loc, metadata.max_query_len)
        else:
            out = self._absorbed(query, cache, metadata.sequences)
        return self.o_proj(self._joined(out, inputs)), cache

    def _write(self, latent: jax.Array, k_pe: jax.Array, cache: jax.Array, slot_mapping: jax.Array) -> jax.Array:
        if self.kv_range is not None:
            row = jnp.concatenate([latent, k_pe], axis=-1)[:, None]
            self.kv_range.see(row, row, slot_mapping)
        return ops.write_latent_cache(
            latent, k_pe, cache, slot_mapping, k_scale=self._scale_of(cache), implementation=self.implementation
        )

    def _scale_of(self, cache: jax.Array) -> float | jax.Array | None:
        """Returns the dequantisation scale of a cache; packed rows contain their scales."""
        if self.kv_scales is None or cache.dtype.itemsize > 1 or cache.dtype == jnp.uint8:
            return self.k_scale
        return self.kv_scales.k_scale[...]

    def _checked(
        self, inputs: jax.Array, cache: Any, metadata: AttentionMetadata | None, positions: jax.Array | None
    ) -> jax.Array | None:
        """Checks the arguments of a call and returns the positions; those of the metadata by default."""
        check_packed(inputs, self.in_features, "cache", cache, metadata)
        if metadata is not None:
            for latents in jax.tree.leaves(cache):
                # The write refuses a cache with other axes.
                if latents.ndim == 3:
                    metadata.check_blocks("cache", latents.shape[1])
        return metadata.positions(inputs.shape[0]) if metadata is not None and positions is None else positions

    def _projected(self, inputs: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns packed queries [tokens, heads, nope + rope], latents [tokens, rank], rotary keys [tokens, rope]."""
        if hasattr(self, "q_proj"):
            query = self.q_proj(inputs)
        else:
            query = self.q_b_proj(self._normed(self.q_a_layernorm, self.q_a_proj(inputs)))
        query = query.reshape(*inputs.shape[:-1], self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim)
        latent, k_pe = jnp.split(self.kv_a_proj_with_mqa(inputs), [self.kv_lora_rank], axis=-1)
        latent, k_pe = self._normed(self.kv_a_layernorm, latent), k_pe[..., None, :]
        if self.rope is not None:
            nope, rope = jnp.split(query, [self.qk_nope_head_dim], axis=-1)
            turn = functools.partial(rotated, self.rope, positions=positions, batch_invariant=self.batch_invariant)
            query, k_pe = jnp.concatenate([nope, turn(rope)], axis=-1), turn(k_pe)
        return (
            query.reshape(-1, *query.shape[-2:]),
            latent.reshape(-1, self.kv_lora_rank),
            k_pe.reshape(-1, self.qk_rope_head_dim),
        )

    def _normed(self, norm: nnx.RMSNorm, x: jax.Array) -> jax.Array:
        if not self.batch_invariant:
            return normalised(norm, x)
        rows, scale = x.reshape(-1, x.shape[-1]), jnp.asarray(norm.scale)[None].astype(x.dtype)
        return ops.row_norm(rows, scale, epsilon=norm.epsilon, norm_type="rms_norm_wide").reshape(x.shape)

    def _joined(self, heads: jax.Array, inputs: jax.Array) -> jax.Array:
        """Returns [tokens, num_heads, v_head_dim] with the inputs' axes before those of the heads, joined."""
        features = self.num_heads * self.v_head_dim
        if self.gate_proj is not None:
            gates = jax.nn.sigmoid(self.gate_proj(inputs).astype(jnp.float32)).astype(heads.dtype)
            heads = heads * gates.reshape(heads.shape[0], self.num_heads, 1)
        # Two steps: with Explicit axes, JAX joins and splits axes in one reshape only for a given out_sharding.
        return heads.reshape(heads.shape[0], features).reshape(*inputs.shape[:-1], features)

    def _plain(
        self, query: jax.Array, latent: jax.Array, k_pe: jax.Array, starts: jax.Array, max_query_len: int
    ) -> jax.Array:
        expanded = self.kv_b_proj(latent).reshape(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        k_nope, value = jnp.split(expanded, [self.qk_nope_head_dim], axis=-1)
        k_pe = jnp.broadcast_to(k_pe[:, None], (*k_nope.shape[:2], self.qk_rope_head_dim))
        key = jnp.concatenate([k_nope, k_pe], axis=-1)
        options = {"deterministic": self.deterministic_gradients, "implementation": self.implementation}
        return ops.attention(query, key, value, starts, max_query_len=max_query_len, scale=self.scale, **options)

    def _expanding(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the kernels of keys and values, [rank, heads, size], for latents of a dtype."""
        linear = getattr(self.kv_b_proj, "base", self.kv_b_proj)
        if isinstance(linear, LatentExpansion):
            return linear.kernels()
        # A layer of a caller, such as a LoRA, may add to its kernel's product.
        is_plain = type(linear) is nnx.Linear
        kernel = linear.kernel[...] if is_plain else linear(jnp.eye(self.kv_lora_rank, dtype=dtype))
        kernel = kernel.reshape(self.kv_lora_rank, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        to_key, to_value = jnp.split(kernel, [self.qk_nope_head_dim], axis=-1)
        return to_key, to_value

    def _absorbed(
        self, query: jax.Array, cache: jax.Array, sequences: dict[str, Any], chosen: jax.Array | None = None
    ) -> jax.Array:
        """Attends in the absorbed form, to all tokens or to positions `chosen`; returns [tokens, heads, v_head_dim]."""
        to_key, to_value = (kernel.astype(query.dtype) for kernel in self._expanding(query.dtype))
        nope, rope = jnp.split(query, [self.qk_nope_head_dim], axis=-1)
        choice: dict[str, Any] = {"topk_indices": chosen}
        if chosen is None:
            choice = {"batch_invariant": self.batch_invariant}
        attend = ops.mla_attention if chosen is None else ops.sparse_mla_attention
        absorb: Callable[..., jax.Array] = ops.in_tiles if self.batch_invariant else lambda f, *operands: f(*operands)
        adapters, in_latents = self.absorbed_adapters, absorb(_to_latents, nope, to_key)
        in_latents = in_latents if adapters is None else adapters.with_queries(in_latents, nope)
        out = attend(
            query=jnp.concatenate([in_latents, rope], axis=-1),
            latent_cache=cache,
            **choice,
            **sequences,
            kv_lora_rank=self.kv_lora_rank,
            scale=self.scale,
            k_scale=self._scale_of(cache),
            kv_chunk_size=self.kv_chunk_size,
            implementation=self.implementation,
        )
        values = absorb(_from_latents, out, to_value)
        return values if adapters is None else adapters.with_values(values, out)


def _one_pass(starts: jax.Array, length: int) -> dict[str, Any]:
    """Returns `AttentionMetadata.sequences` of sequences of one length, whose cache has a block for each token."""
    tables = jnp.arange((len(starts) - 1) * length, dtype=jnp.int32).reshape(len(starts) - 1, length)
    sequences = {"block_tables": tables, "seq_lens": jnp.diff(starts), "query_start_loc": starts}
    return {**sequences, "max_query_len": length}


def _to_latents(nope: jax.Array, to_key: jax.Array) -> jax.Array:
    return jnp.einsum("thd,rhd->thr", nope, to_key)


def _from_latents(out: jax.Array, to_value: jax.Array) -> jax.Array:
    return jnp.einsum("thr,rhv->thv", out, to_value)
