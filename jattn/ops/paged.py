"""Attention of new tokens to their sequences' paged keys and values."""

from __future__ import annotations

import functools
from typing import cast

import jax

from jattn.ops import arguments, transforms, xla
from jattn.ops.choose import bridged, choose
from torch_core.specs import AttentionSpec

__all__ = ["paged_attention", "paged_attention_with_lse"]


def paged_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    max_query_len: int,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    attention_chunk: int | None = None,
    alibi_slopes: jax.Array | None = None,
    use_alibi_sqrt: bool = False,
    sinks: jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    k_scale_cache: jax.Array | None = None,
    v_scale_cache: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attends any mix of prefill, chunked prefill and decode rows to a paged KV cache.

    The new tokens' keys and values must be in the cache already (`write_kv_cache`); their queries are packed one
    sequence after the other. The mask is aligned bottom-right: the last query of a sequence stands at
    `seq_len - 1`. Values in metadata arrays are trusted here, as they may be traced; `torch_core.metadata` checks
    them on the host when it builds them.

    Args:
        query: float[num_tokens, num_heads, head_size]. Rows past `query_start_loc[-1]` are padding.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], keys at index 0 of the second axis.
        block_tables: int32[num_seqs, max_blocks]. Entries past a sequence's last block are never followed.
        seq_lens: int32[num_seqs], tokens of each sequence including the new ones; 0 for a padded row.
        query_start_loc: int32[num_seqs + 1], running sum of the query lengths.
        max_query_len: static upper bound on the query lengths.
        scale: factor on the scores; head_size ** -0.5 by default.
        causal: hide keys after the query.
        sliding_window: W tokens, the query's own included, or a pair (left, right) of further tokens to each side.
        logits_soft_cap: cap on the scores, `cap * tanh(score / cap)`.
        attention_chunk: a query sees its own chunk of this many positions only.
        alibi_slopes: float[num_heads].
        use_alibi_sqrt: the square-root form of ALiBi.
        sinks: float[num_heads], a logit without a value in each softmax denominator.
        k_scale, v_scale: real value = stored value * scale, for a quantised cache.
        k_scale_cache, v_scale_cache: float32[num_blocks, block_size, num_kv_heads], such a scale for each token and
            head, as `write_kv_cache_per_token_head` stores them.
        implementation: "triton", "torch", "xla", or None for the fastest that runs here.

    Returns:
        float[num_tokens, num_heads, head_size] in the dtype of query; padded rows and rows that see nothing are 0.

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
    extras = (
        *arguments.attention_extras(query, k_scale, v_scale, alibi_slopes, sinks),
        k_scale_cache,
        v_scale_cache,
    )
    metadata = (block_tables, seq_lens, query_start_loc)
    return _attend(query, kv_cache, metadata, extras, spec, max_query_len, implementation, with_lse=False)[0]


def paged_attention_with_lse(
    query: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    max_query_len: int,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    attention_chunk: int | None = None,
    alibi_slopes: jax.Array | None = None,
    use_alibi_sqrt: bool = False,
    sinks: jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    k_scale_cache: jax.Array | None = None,
    v_scale_cache: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Does what `paged_attention` does and also returns the log-sum-exp of each row's scores.

    Returns:
        The output, and float32[num_tokens, num_heads]: the natural logarithm of the softmax denominator, sinks
        included; -inf for rows that see nothing; float64 for a float64 query. `merge_states` joins two such results.
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
    extras = (
        *arguments.attention_extras(query, k_scale, v_scale, alibi_slopes, sinks),
        k_scale_cache,
        v_scale_cache,
    )
    metadata = (block_tables, seq_lens, query_start_loc)
    out, lse = _attend(query, kv_cache, metadata, extras, spec, max_query_len, implementation, with_lse=True)
    return out, cast(jax.Array, lse)


def _attend(
    query: jax.Array,
    kv_cache: jax.Array,
    metadata: tuple[jax.Array, jax.Array, jax.Array],
    extras: tuple[jax.Array | None, ...],
    spec: AttentionSpec,
    max_query_len: int,
    implementation: str | None,
    *,
    with_lse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    arguments.check_cache(kv_cache, query=query)
    k_scale, v_scale, *_, k_scale_cache, v_scale_cache = extras
    arguments.check_scale_caches(kv_cache, k_scale_cache, v_scale_cache, tensor_scales=(k_scale, v_scale))
    arguments.check_metadata_arrays(*metadata, max_query_len)
    chosen = choose(implementation)
    arguments.check_float64("query", query, chosen)
    operands = arguments.as_jax(query, kv_cache, *metadata, *extras)
    if chosen == "xla":
        return xla.paged_attention(*operands, spec=spec, max_query_len=max_query_len)
    run = functools.partial(bridged(chosen).paged_attention, spec=spec, max_query_len=max_query_len, with_lse=with_lse)
    return transforms.opaque(run, "paged_attention", chosen)(*operands)
