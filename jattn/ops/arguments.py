"""Trace-time checks of the ops' arguments: rank, shape and dtype, each with one clear message.

The checks look at what the caller passed; `as_jax` makes JAX arrays of it afterwards, so that int64 numpy tables are
refused rather than narrowed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from torch_core.errors import InvalidInput, Unsupported
from torch_core.specs import KV_CACHE_DTYPES, QUERY_DTYPES, AttentionSpec

__all__ = [
    "as_jax",
    "attention_extras",
    "attention_spec",
    "check_array",
    "check_cache",
    "check_dense",
    "check_float64",
    "check_head_vector",
    "check_metadata_arrays",
    "check_query",
    "check_scale_caches",
    "check_tokens",
    "scale_array",
]

# Cache dtypes whose elements are the real values, so that queries and new tokens come in the same dtype.
_UNSCALED = (*QUERY_DTYPES, "float64")


def attention_spec(
    query: jax.Array,
    *,
    scale: float | None,
    causal: bool,
    sliding_window: int | tuple[int | None, int | None] | None,
    logits_soft_cap: float | None,
    attention_chunk: int | None,
    use_alibi_sqrt: bool,
) -> AttentionSpec:
    """Checks `query` and builds the static description of a call from the ops' keyword arguments."""
    check_query(query)
    left, right = _window(sliding_window)
    return AttentionSpec(
        scale=query.shape[2] ** -0.5 if scale is None else _static_float("scale", scale),
        causal=bool(causal),
        window_left=left,
        window_right=right,
        logits_soft_cap=None if logits_soft_cap is None else _static_float("logits_soft_cap", logits_soft_cap),
        attention_chunk=attention_chunk,
        use_alibi_sqrt=bool(use_alibi_sqrt),
    )


def attention_extras(
    query: jax.Array,
    k_scale: float | jax.Array | None,
    v_scale: float | jax.Array | None,
    alibi_slopes: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Checks the optional arrays of a call; scales come back as float32[1], head vectors as float32[num_heads]."""
    return (
        scale_array("k_scale", k_scale),
        scale_array("v_scale", v_scale),
        check_head_vector("alibi_slopes", alibi_slopes, query.shape[1]),
        check_head_vector("sinks", sinks, query.shape[1]),
    )


def as_jax(*arrays: jax.Array | None) -> tuple[Any, ...]:
    """Returns the arrays as JAX arrays, numpy's included; None stays None."""
    return tuple(None if array is None else jnp.asarray(array) for array in arrays)


def check_float64(name: str, array: jax.Array, implementation: str) -> None:
    """Refuses float64 where XLA does not compute itself."""
    if array.dtype.name == "float64" and implementation != "xla":
        raise Unsupported(
            f"{name} has dtype float64; implementation={implementation!r} serves {', '.join(QUERY_DTYPES)}. Use "
            f"{name}.astype(jnp.float32), or implementation='xla'."
        )


def check_array(name: str, array: jax.Array, axes: tuple[str, ...]) -> None:
    """Requires a JAX array with the named axes."""
    if not isinstance(array, (jax.Array, np.ndarray)):
        raise InvalidInput(f"{name} is a {type(array).__name__}; it must be a JAX array of shape ({', '.join(axes)}).")
    if array.ndim != len(axes):
        raise InvalidInput(
            f"{name} has {array.ndim} dimensions (shape {array.shape}); it must have {len(axes)}: ({', '.join(axes)})."
        )


def check_query(query: jax.Array) -> None:
    """Requires `query` to be float[num_tokens, num_heads, head_size] of a dtype with kernels."""
    check_array("query", query, ("num_tokens", "num_heads", "head_size"))
    _check_positive("query", query, ("num_heads", "head_size"))
    if query.dtype.name not in (*QUERY_DTYPES, "float64"):
        raise Unsupported(f"query has dtype {query.dtype.name}; use one of {', '.join(QUERY_DTYPES)}.")


def check_cache(kv_cache: jax.Array, *, query: jax.Array | None = None) -> None:
    """Requires `kv_cache` to be (num_blocks, 2, block_size, num_kv_heads, head_size) and to fit the query."""
    check_array("kv_cache", kv_cache, ("num_blocks", "2", "block_size", "num_kv_heads", "head_size"))
    if kv_cache.shape[1] != 2:
        raise InvalidInput(
            f"kv_cache has shape {kv_cache.shape}; its second axis is {kv_cache.shape[1]} and must be 2 (keys, values)."
        )
    _check_positive("kv_cache", kv_cache, ("num_blocks", "2", "block_size", "num_kv_heads", "head_size"))
    if kv_cache.dtype.name not in (*KV_CACHE_DTYPES, "float64"):
        raise Unsupported(f"kv_cache has dtype {kv_cache.dtype.name}; use one of {', '.join(KV_CACHE_DTYPES)}.")
    if query is None:
        return
    num_heads, head_size = query.shape[1:]
    if num_heads % kv_cache.shape[3]:
        raise InvalidInput(
            f"query has {num_heads} heads and kv_cache {kv_cache.shape[3]}; the first must be a multiple of the second."
        )
    if head_size != kv_cache.shape[4]:
        raise InvalidInput(f"query has head_size {head_size} and kv_cache {kv_cache.shape[4]}; they must be equal.")
    if kv_cache.dtype != query.dtype and kv_cache.dtype.name in _UNSCALED:
        raise InvalidInput(
            f"query has dtype {query.dtype.name} and kv_cache {kv_cache.dtype.name}; cast one of them "
            "(query.astype(kv_cache.dtype))."
        )


def check_metadata_arrays(
    block_tables: jax.Array, seq_lens: jax.Array, query_start_loc: jax.Array, max_query_len: int
) -> None:
    """Requires int32 arrays of one number of sequences, and a static positive `max_query_len`."""
    check_array("block_tables", block_tables, ("num_seqs", "max_blocks"))
    check_array("seq_lens", seq_lens, ("num_seqs",))
    check_array("query_start_loc", query_start_loc, ("num_seqs + 1",))
    for name, array in (("block_tables", block_tables), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        _check_int32(name, array)
    num_seqs = block_tables.shape[0]
    if seq_lens.shape[0] != num_seqs:
        raise InvalidInput(
            f"seq_lens has {seq_lens.shape[0]} entries and block_tables {num_seqs} rows; one per sequence."
        )
    if query_start_loc.shape[0] != num_seqs + 1:
        raise InvalidInput(
            f"query_start_loc has {query_start_loc.shape[0]} entries; {num_seqs} sequences need {num_seqs + 1} "
            "(a running sum that starts with 0)."
        )
    if num_seqs == 0 or block_tables.shape[1] == 0:
        raise InvalidInput(
            f"block_tables has shape {block_tables.shape}; both sizes must be at least 1 (pad the batch)."
        )
    _check_bound("max_query_len", max_query_len)


def check_tokens(key: jax.Array, value: jax.Array, slot_mapping: jax.Array, kv_cache: jax.Array) -> None:
    """Requires key and value of the new tokens to fit the cache, and one int32 slot for each token."""
    for name, array in (("key", key), ("value", value)):
        check_array(name, array, ("num_tokens", "num_kv_heads", "head_size"))
        if array.shape[1:] != kv_cache.shape[3:]:
            raise InvalidInput(
                f"{name} has (num_kv_heads, head_size) {array.shape[1:]} and kv_cache {kv_cache.shape[3:]}; they must "
                "be equal."
            )
    if key.shape != value.shape:
        raise InvalidInput(f"key has shape {key.shape} and value {value.shape}; they must be equal.")
    if key.dtype != value.dtype:
        raise InvalidInput(f"key has dtype {key.dtype.name} and value {value.dtype.name}; they must be equal.")
    check_array("slot_mapping", slot_mapping, ("num_tokens",))
    _check_int32("slot_mapping", slot_mapping)
    if slot_mapping.shape[0] != key.shape[0]:
        raise InvalidInput(
            f"slot_mapping has {slot_mapping.shape[0]} entries and key {key.shape[0]} tokens; pad slot_mapping with -1."
        )
    if key.dtype != kv_cache.dtype and (kv_cache.dtype.name in _UNSCALED or key.dtype.name not in _UNSCALED):
        raise InvalidInput(
            f"key has dtype {key.dtype.name} and kv_cache {kv_cache.dtype.name}; cast one of them "
            "(key.astype(kv_cache.dtype))."
        )


def check_dense(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_start_loc: jax.Array,
    key_start_loc: jax.Array,
    max_query_len: int,
    max_key_len: int,
) -> None:
    """Requires packed key and value that fit the query, and two running sums of one number of sequences."""
    check_array("key", key, ("num_keys", "num_kv_heads", "head_size"))
    check_array("value", value, ("num_keys", "num_kv_heads", "value_head_size"))
    for name, array in (("key", key), ("value", value)):
        if array.dtype != query.dtype:
            raise InvalidInput(f"{name} has dtype {array.dtype.name} and query {query.dtype.name}; they must be equal.")
    if key.shape[:2] != value.shape[:2]:
        raise InvalidInput(f"key has shape {key.shape} and value {value.shape}; all but head_size must be equal.")
    if key.shape[2] != query.shape[2]:
        raise InvalidInput(f"query has head_size {query.shape[2]} and key {key.shape[2]}; they must be equal.")
    _check_positive("key", key, ("num_kv_heads", "head_size"))
    _check_positive("value", value, ("num_kv_heads", "value_head_size"))
    if query.shape[1] % key.shape[1]:
        raise InvalidInput(
            f"query has {query.shape[1]} heads and key {key.shape[1]}; the first must be a multiple of the second."
        )
    for name, array in (("query_start_loc", query_start_loc), ("key_start_loc", key_start_loc)):
        check_array(name, array, ("num_seqs + 1",))
        _check_int32(name, array)
    if query_start_loc.shape != key_start_loc.shape or query_start_loc.shape[0] < 2:
        raise InvalidInput(
            f"query_start_loc has {query_start_loc.shape[0]} entries and key_start_loc {key_start_loc.shape[0]}; both "
            "need num_seqs + 1, at least 2."
        )
    _check_bound("max_query_len", max_query_len)
    _check_bound("max_key_len", max_key_len)


def check_scale_caches(
    kv_cache: jax.Array,
    k_scale_cache: jax.Array | None,
    v_scale_cache: jax.Array | None,
    *,
    tensor_scales: tuple[object, object] = (None, None),
) -> None:
    """Requires scales per token and head to come in pairs, without scales per tensor, and to fit a quantised cache."""
    if k_scale_cache is None and v_scale_cache is None:
        return
    if k_scale_cache is None or v_scale_cache is None:
        missing = "k_scale_cache" if k_scale_cache is None else "v_scale_cache"
        raise InvalidInput(f"{missing} is missing; k_scale_cache and v_scale_cache come together.")
    if any(scale is not None for scale in tensor_scales):
        raise InvalidInput("k_scale or v_scale is given beside k_scale_cache and v_scale_cache; pass one kind.")
    if kv_cache.dtype.itemsize != 1:
        raise InvalidInput(
            f"kv_cache has dtype {kv_cache.dtype.name}; scales per token and head belong to an int8 or fp8 cache."
        )
    num_blocks, _, block_size, num_kv_heads, _ = kv_cache.shape
    for name, array in (("k_scale_cache", k_scale_cache), ("v_scale_cache", v_scale_cache)):
        check_array(name, array, ("num_blocks", "block_size", "num_kv_heads"))
        if array.shape != (num_blocks, block_size, num_kv_heads) or array.dtype != jnp.float32:
            raise InvalidInput(
                f"{name} is {array.dtype.name}{list(array.shape)}; it must be "
                f"float32{[num_blocks, block_size, num_kv_heads]}, one scale for each token and head of kv_cache."
            )


def check_head_vector(name: str, vector: jax.Array | None, num_heads: int) -> jax.Array | None:
    """Requires an optional per-head vector (sinks, alibi_slopes) to be float[num_heads]; returns it as float32."""
    if vector is None:
        return None
    vector = jnp.asarray(vector)
    if vector.shape != (num_heads,):
        raise InvalidInput(f"{name} has shape {vector.shape}; it must be ({num_heads},), one for each query head.")
    if not jnp.issubdtype(vector.dtype, jnp.floating):
        raise InvalidInput(f"{name} has dtype {vector.dtype.name}; it must be a floating point type.")
    return vector.astype(jnp.promote_types(vector.dtype, jnp.float32))


def scale_array(name: str, scale: float | jax.Array | None) -> jax.Array | None:
    """Returns a per-tensor scale as float32[1]; a number is checked to be positive and finite."""
    if scale is None:
        return None
    if isinstance(scale, (int, float, np.generic)) and not (np.isfinite(scale) and scale > 0):
        raise InvalidInput(f"{name} is {scale}; it must be positive and finite.")
    scale = jnp.asarray(scale, jnp.float32)
    if scale.size != 1:
        raise InvalidInput(f"{name} has shape {scale.shape}; one scale for the whole tensor is supported.")
    return scale.reshape(1)


def _check_bound(name: str, size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise InvalidInput(f"{name} is a {type(size).__name__}; it must be a static int.")
    if size < 1:
        raise InvalidInput(f"{name} is {size}; it must be at least 1.")


def _check_positive(name: str, array: jax.Array, axes: tuple[str, ...]) -> None:
    """Requires the last axes of `array` to have elements."""
    for axis, size in zip(reversed(axes), reversed(array.shape), strict=False):
        if size == 0:
            raise InvalidInput(f"{name} has shape {array.shape}; {axis} must be at least 1.")


def _check_int32(name: str, array: jax.Array) -> None:
    if array.dtype != jnp.int32:
        raise InvalidInput(f"{name} has dtype {array.dtype.name}; int32 is required. Use {name}.astype(jnp.int32).")


def _static_float(name: str, value: float) -> float:
    if isinstance(value, Tracer):
        raise InvalidInput(f"{name} is a tracer; it must be a static float (mark it static, or multiply query by it).")
    if not isinstance(value, (int, float, np.generic)):
        raise InvalidInput(f"{name} is {value!r}; it must be a float.")
    return float(value)


def _window(sliding_window: int | tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    if sliding_window is None:
        return None, None
    if isinstance(sliding_window, tuple):
        if len(sliding_window) != 2:
            raise InvalidInput(f"sliding_window is {sliding_window}; a tuple must be (left, right).")
        return sliding_window
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int) or sliding_window < 1:
        raise InvalidInput(
            f"sliding_window is {sliding_window!r}; it must be an int of at least 1 (the query's own token counts), a "
            "tuple (left, right), or None."
        )
    return sliding_window - 1, None
