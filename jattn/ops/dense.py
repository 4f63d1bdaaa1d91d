"""Attention of packed sequences to packed keys and values, without a cache: training, encoders, cross attention."""

from __future__ import annotations

import functools
from typing import cast

import jax

from jattn.ops import arguments, transforms, xla
from jattn.ops.choose import bridged, choose
from torch_core.specs import AttentionSpec

__all__ = ["attention", "attention_with_lse"]


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_start_loc: jax.Array,
    key_start_loc: jax.Array | None = None,
    *,
    max_query_len: int,
    max_key_len: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    attention_chunk: int | None = None,
    alibi_slopes: jax.Array | None = None,
    use_alibi_sqrt: bool = False,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attends packed queries to packed keys, sequence by sequence; the mask is aligned bottom-right.

    Args:
        query: float[num_tokens, num_heads, head_size].
        key: float[num_keys, num_kv_heads, head_size].
        value: float[num_keys, num_kv_heads, value_head_size].
        query_start_loc: int32[num_seqs + 1], running sum of the query lengths.
        key_start_loc: int32[num_seqs + 1], running sum of the key lengths; that of the queries by default.
        max_query_len, max_key_len: static upper bounds; max_key_len is max_query_len by default.
        scale, causal, sliding_window, logits_soft_cap, attention_chunk, alibi_slopes, use_alibi_sqrt, sinks,
            implementation: as in `paged_attention`.

    Returns:
        float[num_tokens, num_heads, value_head_size]; padded rows and rows that see nothing are 0.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here or does not serve the combination.
    """
    spec = arguments.attention_spec(
        query,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        attention_chunk=attention_chunk,
        use_alibi_sqrt=use_alibi_sqrt,
    )
    extras = arguments.attention_extras(query, None, None, alibi_slopes, sinks)[2:]
    locations = (query_start_loc, query_start_loc if key_start_loc is None else key_start_loc)
    bounds = (max_query_len, max_query_len if max_key_len is None else max_key_len)
    return _attend((query, key, value), locations, extras, spec, bounds, implementation, with_lse=False)[0]


def attention_with_lse(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_start_loc: jax.Array,
    key_start_loc: jax.Array | None = None,
    *,
    max_query_len: int,
    max_key_len: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    attention_chunk: int | None = None,
    alibi_slopes: jax.Array | None = None,
    use_alibi_sqrt: bool = False,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Does what `attention` does and also returns the natural-log LSE, float32[num_tokens, num_heads]."""
    spec = arguments.attention_spec(
        query,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        attention_chunk=attention_chunk,
        use_alibi_sqrt=use_alibi_sqrt,
    )
    extras = arguments.attention_extras(query, None, None, alibi_slopes, sinks)[2:]
    locations = (query_start_loc, query_start_loc if key_start_loc is None else key_start_loc)
    bounds = (max_query_len, max_query_len if max_key_len is None else max_key_len)
    out, lse = _attend((query, key, value), locations, extras, spec, bounds, implementation, with_lse=True)
    return out, cast(jax.Array, lse)


def _attend(
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    locations: tuple[jax.Array, jax.Array],
    extras: tuple[jax.Array | None, ...],
    spec: AttentionSpec,
    bounds: tuple[int, int],
    implementation: str | None,
    *,
    with_lse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    arguments.check_dense(*tokens, *locations, *bounds)
    static = {"spec": spec, "max_query_len": bounds[0], "max_key_len": bounds[1]}
    chosen = choose(implementation)
    arguments.check_float64("query", tokens[0], chosen)
    operands = arguments.as_jax(*tokens, *locations, *extras)
    if chosen == "xla":
        return xla.attention(*operands, **static)
    run = functools.partial(bridged(chosen).attention, **static, with_lse=with_lse)
    return transforms.opaque(run, "attention", chosen)(*operands)
