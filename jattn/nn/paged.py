"""The attention core of a decoder layer, and the scales of its 8-bit cache with the measured range of its values."""

from __future__ import annotations

from typing import Any, TypeVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jattn import ops
from jattn.metadata import AttentionMetadata
from jattn.nn.checks import check_metadata
from jattn.nn.options import (
    AlibiSlopes,
    AttentionChunk,
    Implementation,
    KVChunkSize,
    LayerOptions,
    LogitsSoftCap,
    Scale,
    SlidingWindow,
    check_arrays,
)
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import checked

_Cache = TypeVar("_Cache", jax.Array, tuple[jax.Array, jax.Array])


class PagedAttention(nnx.Module):
    """Writes a layer's new keys and values into its paged cache, then attends to the whole context.

    The module has no parameters and holds no cache: a call takes the cache and returns the updated one. It works in
    nnx's graph and tree modes, under `jax.jit` with a donated cache, in `lax.scan` and in `lax.while_loop`. Learned
    arrays, such as the sinks of the heads, are arguments of a call.

    Args:
        num_heads: number of query heads.
        head_dim: elements of one head.
        num_kv_heads: number of key and value heads; num_heads by default. It must divide num_heads.
        value_head_dim: elements of one value head; head_dim by default. Another value needs a pair of caches.
        scale: factor on the scores; head_dim ** -0.5 by default.
        causal: hide keys after the query.
        sliding_window: number of visible tokens, including the query's own; without `causal`, as many to the right.
            Alternatively a pair (left, right): further tokens on each side. None for all tokens.
        attention_chunk: length of a chunk, in tokens; a query sees its own chunk only. None for no chunks.
        logits_soft_cap: cap on the scores, `cap * tanh(score / cap)`; None for no cap.
        alibi_slopes: one ALiBi slope for each head. They are not trained; an array in a call replaces them.
        use_alibi_sqrt: use the square-root form of ALiBi.
        kv_chunk_size: as in `jattn.paged_attention`.
        quantize_query: round the queries of a batch with long ones to e4m3 if the cache is e4m3 and a kernel that
            multiplies in 8 bits then serves the call (Hopper), as vLLM does; see `jattn.ops.fp8_query`.
        implementation: "triton", "torch", "xla", or None for the fastest that serves the call.
        rngs: ignored; `nnx.bridge.to_linen` passes them to every module.

    Attributes:
        kv_scales: the scales of an 8-bit cache, for calls without scales; `KVScales`.
        kv_range: the range of keys and values, while scales are measured.
        batch_invariant: attend as `jattn.paged_attention(batch_invariant=True)` does; False by default.

    Raises:
        InvalidInput: an option of the wrong type or out of range, num_heads is not a multiple of num_kv_heads, or
            alibi_slopes has not one slope for each head. The message names the option.

    Example:
        >>> import jax.numpy as jnp
        >>> from torch_core.metadata import SequenceRow
        >>> core = PagedAttention(num_heads=4, head_dim=8, num_kv_heads=2, implementation="xla")
        >>> metadata = AttentionMetadata.build([SequenceRow([1], 0, 3)], block_size=4, num_blocks=2)
        >>> query, key = jnp.ones((3, 4, 8)), jnp.ones((3, 2, 8))
        >>> output, cache = core(query, key, key, jnp.zeros((2, 2, 4, 2, 8)), metadata)
        >>> output.shape, cache.shape
        ((3, 4, 8), (2, 2, 4, 2, 8))
    """

    # On the class: nnx would treat an attribute that is None in an instance as static.
    kv_scales: KVScales | None = None
    kv_range: KVRange | None = None
    # qwix sets them on every module of a model that it changes, and asks the nearest module of each product for them.
    # A module that is made later, or outside of that model, has these.
    qwix_path: tuple[str, ...] = ("paged_attention",)
    disable_quant_stats_update: bool = True
    batch_invariant: bool = False

    @checked
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        value_head_dim: int | None = None,
        scale: Scale = None,
        causal: bool = True,
        sliding_window: SlidingWindow = None,
        attention_chunk: AttentionChunk = None,
        logits_soft_cap: LogitsSoftCap = None,
        alibi_slopes: AlibiSlopes = None,
        use_alibi_sqrt: bool = False,
        kv_chunk_size: KVChunkSize = None,
        quantize_query: bool = False,
        implementation: Implementation = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            wanted = "both must be positive and the first a multiple of the second"
            raise InvalidInput("num_heads", f"is {num_heads} and num_kv_heads {num_kv_heads}", wanted)
        for name, size in (("head_dim", head_dim), ("value_head_dim", value_head_dim)):
            if size < 1:
                raise InvalidInput(name, f"is {size}", "it must be at least 1")
        if alibi_slopes is not None and len(alibi_slopes) != num_heads:
            wanted = f"it must have one for each of {num_heads} heads"
            raise InvalidInput("alibi_slopes", f"has {len(alibi_slopes)} numbers", wanted)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.value_head_dim = head_dim, value_head_dim
        self.scale, self.logits_soft_cap = scale, logits_soft_cap
        self.causal, self.sliding_window, self.attention_chunk = causal, sliding_window, attention_chunk
        self.alibi_slopes = None if alibi_slopes is None else tuple(map(float, alibi_slopes))
        self.use_alibi_sqrt = use_alibi_sqrt
        self.kv_chunk_size, self.implementation = kv_chunk_size, implementation
        self.quantize_query = quantize_query

    @property
    def options(self) -> LayerOptions:
        """The options that paged and dense attention have in common, as keywords of both."""
        given: Any = {name: getattr(self, name) for name in LayerOptions.__annotations__}
        if self.alibi_slopes is not None:
            given["alibi_slopes"] = jnp.array(self.alibi_slopes, jnp.float32)
        return given

    @property
    def sees_distances(self) -> bool:
        """Whether mask or bias depends on the distance between query and key, apart from the causal mask."""
        return any(getattr(self, name, None) is not None for name in ops.POSITIONAL)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None,
        value: jax.Array | None,
        kv_cache: _Cache,
        metadata: AttentionMetadata,
        *,
        k_scale: float | jax.Array | None = None,
        v_scale: float | jax.Array | None = None,
        **options: Unpack[ops.PagedOptions],
    ) -> tuple[jax.Array, _Cache]:
        """Writes the new keys and values into the cache, and attends to it.

        Args:
            query: float[num_tokens, num_heads, head_dim], with the rotary embedding applied; fp8 with q_scale.
            key: float[num_tokens, num_kv_heads, head_dim], with the rotary embedding applied. If the module is not
                causal, the number of tokens may differ from the query's (cross attention). None to read a complete
                cache, such as another layer's or an encoder's.
            value: float[num_tokens, num_kv_heads, value_head_dim]; None if key is None.
            kv_cache: this layer's cache array, or its key and value caches. It is consumed; use the returned one.
            metadata: the batch of the step.
            k_scale, v_scale: dequantisation scales of a quantised cache, for writing and reading: value = stored value
                * scale. None for those of `kv_scales`.
            **options: further keywords of `jattn.paged_attention`.

        Returns:
            The output float[num_tokens, num_heads, value_head_dim], and the updated cache.

        Raises:
            InvalidInput: shapes that do not match the module or each other, or metadata for another block size.
        """
        for name, array, heads, size in (
            ("query", query, self.num_heads, self.head_dim),
            ("key", key, self.num_kv_heads, self.head_dim),
            ("value", value, self.num_kv_heads, self.value_head_dim),
        ):
            if array is not None or name == "query":
                check_arrays(**{name: array})
            if array is not None and (array.ndim != 3 or array.shape[1:] != (heads, size)):
                raise InvalidInput(name, f"has shape {array.shape}", f"this module needs (num_tokens, {heads}, {size})")
        if (key is None) != (value is None):
            raise InvalidInput("one of key and value is None; give both, or none to read the cache alone.")
        if key is not None and self.causal and query.shape[0] != key.shape[0]:
            problem = f"has {query.shape[0]} tokens and key {key.shape[0]}"
            raise InvalidInput("query", problem, "one key and value for each query token")
        check_metadata(metadata)
        for cache in jax.tree.leaves(kv_cache) or [kv_cache]:
            check_arrays(kv_cache=cache)
        shape = jax.tree.leaves(kv_cache)[0].shape
        # The write refuses a cache with fewer axes.
        if len(shape) > 3:
            metadata.check_blocks("kv_cache", shape[-3])
        scales = self.scales_of(kv_cache, k_scale, v_scale)
        if key is not None and value is not None:
            kv_cache = self.write(key, value, kv_cache, metadata.slot_mapping, **scales)
        further = self._further(metadata, scales, options)
        if self.quantize_query:
            query, further = ops.fp8_query(query, kv_cache, **further)
        return ops.paged_attention(query, kv_cache, **further), kv_cache

    def _further(self, metadata: AttentionMetadata, scales: ops.CacheScales, options: Any) -> dict[str, Any]:
        """Returns the keywords of `paged_attention`; options of a call take precedence over the module's own."""
        return {
            **metadata.sequences,
            "groups": metadata.groups,
            "causal": self.causal,
            "kv_chunk_size": self.kv_chunk_size,
            **scales,
            **self.options,
            **options,
        }

    def write(
        self,
        key: jax.Array,
        value: jax.Array,
        kv_cache: _Cache,
        slot_mapping: jax.Array,
        **scales: Unpack[ops.CacheScales],
    ) -> _Cache:
        """Writes keys and values into the cache without attending, as for the output of an encoder.

        Args:
            key, value, kv_cache: as in a call.
            slot_mapping: int32[num_tokens], the slot of each token; -1 writes nothing.
            **scales: k_scale and v_scale, as in a call.

        Returns:
            The updated cache.
        """
        if self.kv_range is not None:
            self.kv_range.see(key, value, slot_mapping)
        scales = self.scales_of(kv_cache, **scales)
        return ops.write_kv_cache(key, value, kv_cache, slot_mapping, **scales, implementation=self.implementation)

    @property
    def rotates_in_one_launch(self) -> bool:
        """Whether `rotate_and_write` saves launches. It is not used while scales are measured, which needs the keys."""
        return self.kv_range is None and ops.launches_kernels(self.implementation)

    def rotate_and_write(
        self,
        qkv: jax.Array,
        cos_sin: jax.Array,
        kv_cache: jax.Array,
        metadata: AttentionMetadata,
        *,
        row_scale: jax.Array | None = None,
        column_scale: jax.Array | None = None,
        **options: Unpack[ops.PagedOptions],
    ) -> tuple[jax.Array, jax.Array]:
        """Rotates queries and keys and writes keys and values, in one launch; see `jattn.ops.rotate_and_write`.

        `qkv` is float[num_tokens, num_heads + 2 * num_kv_heads, head_dim], and more heads behind these are not read.
        It returns the rotated queries, for a call without key and value and with these options, and the updated cache.
        Queries are e4m3 where `quantize_query` would round them; the call then needs an `out_dtype`.
        """
        scales, shape = self.scales_of(kv_cache), (len(cos_sin), self.num_heads, self.head_dim)
        further = self._further(metadata, scales, options)
        is_rounded = self.quantize_query and ops.takes_fp8_query(
            jax.ShapeDtypeStruct(shape, qkv.dtype), kv_cache, **further
        )
        return ops.rotate_and_write(
            qkv,
            kv_cache,
            metadata.slot_mapping,
            cos_sin,
            **scales,
            row_scale=row_scale,
            column_scale=column_scale,
            num_query_heads=self.num_heads,
            out_dtype="float8_e4m3fn" if is_rounded else None,
            implementation=self.implementation,
        )

    def scales_of(self, kv_cache: Any, k_scale: Any = None, v_scale: Any = None) -> ops.CacheScales:
        """Returns the scales of a call, or those of the layer if the call has none and the cache has 8 bits."""
        has_8_bits = jax.tree.leaves(kv_cache)[0].dtype.itemsize == 1
        if k_scale is None and v_scale is None and self.kv_scales is not None and has_8_bits:
            k_scale, v_scale = self.kv_scales.k_scale[...], self.kv_scales.v_scale[...]
        return {"k_scale": k_scale, "v_scale": v_scale}


class KVScale(nnx.Variable):
    """A number for the keys or the values of one layer. It is no parameter: optimisers do not update it."""


class KVScales(nnx.Module):
    """The scales of one layer's 8-bit cache; `kv_scales` of a layer.

    Args:
        k_scale: dequantisation scale of keys, or of latents: key = stored key * k_scale; above 0.
        v_scale: dequantisation scale of values; above 0.
    """

    def __init__(self, k_scale: float, v_scale: float) -> None:
        self.k_scale, self.v_scale = (KVScale(jnp.array([scale], jnp.float32)) for scale in (k_scale, v_scale))


class KVRange(nnx.Module):
    """Records the largest absolute key and value that a layer writes; `kv_range` of a layer."""

    def __init__(self) -> None:
        self.k_max, self.v_max = (KVScale(jnp.zeros(1, jnp.float32)) for _ in range(2))

    def see(self, key: jax.Array, value: jax.Array, slot_mapping: jax.Array) -> None:
        """Updates the range with keys and values [num_tokens, ...]; those without a slot are ignored."""
        written = (slot_mapping >= 0)[:, None, None]
        for largest, array in ((self.k_max, key), (self.v_max, value)):
            seen = jnp.where(written, jnp.abs(array[: len(slot_mapping)].astype(jnp.float32)), 0)
            largest[...] = jnp.maximum(largest[...], seen.max())
