"""The ops in plain jnp: differentiable, on any platform, and the JAX-side oracle of the other implementations.

Keys are visited in runs of a fixed number of tokens, so the table's width costs nothing where no sequence reaches. What
batch mates, dead slots and table tails hold does not show in a single bit; another number of sequences or another
`max_query_len` is another XLA program, which may round differently.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jattn.ops import softmax
from torch_core.specs import AttentionSpec

__all__ = ["attention", "merge_states", "paged_attention", "write_kv_cache", "write_kv_cache_per_token_head"]

_TOKENS_PER_RUN = 128
# A row of zeros has no largest element; vLLM's floor.
_SMALLEST_SCALE = 1e-6
_WEIGHTED_VALUES = "shgqk,skhd->shgqd"

# Outside jit an op is one program and not one for each primitive; inside, `inline` leaves no trace of it.
_one_program = functools.partial(jax.jit, inline=True)


@functools.partial(_one_program, static_argnames=("spec", "max_query_len"))
def paged_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    alibi_slopes: jax.Array | None,
    sinks: jax.Array | None,
    k_scale_cache: jax.Array | None = None,
    v_scale_cache: jax.Array | None = None,
    *,
    spec: AttentionSpec,
    max_query_len: int,
) -> tuple[jax.Array, jax.Array]:
    """Attends every query to its sequence's cached keys; arguments as in `jattn.ops.paged_attention`.

    Returns:
        out, in the dtype of query, and the natural-log LSE, float32[num_tokens, num_heads] (float64 for float64).
    """
    num_heads, head_size = query.shape[1:]
    block_size, num_kv_heads = kv_cache.shape[2:4]
    num_seqs, max_blocks = block_tables.shape
    dtype = _compute_dtype(query.dtype)
    if query.shape[0] == 0:
        return query, jnp.zeros(query.shape[:2], dtype)
    query_lens = jnp.diff(query_start_loc)
    padded = _by_sequence(query, query_start_loc, max_query_len).astype(dtype)
    padded = padded.reshape(num_seqs, max_query_len, num_kv_heads, num_heads // num_kv_heads, head_size)
    positions = (seq_lens - query_lens)[:, None] + jnp.arange(max_query_len)

    blocks_per_run = max(1, min(_TOKENS_PER_RUN // block_size, max_blocks))
    num_runs = math.ceil(max_blocks / blocks_per_run)
    tables = jnp.pad(block_tables, ((0, 0), (0, num_runs * blocks_per_run - max_blocks)))
    run_tokens = blocks_per_run * block_size
    tokens_shape = (num_seqs, run_tokens, num_kv_heads, head_size)
    first_visible = _first_visible(positions[:, 0], spec)
    slopes = None if alibi_slopes is None else alibi_slopes.astype(dtype).reshape(num_kv_heads, -1, 1, 1)

    def visit(state: softmax.SoftmaxState, run: jax.Array) -> softmax.SoftmaxState:
        start = run * run_tokens
        key_positions = start + jnp.arange(run_tokens)
        exists = key_positions < seq_lens[:, None]
        blocks = jax.lax.dynamic_slice_in_dim(tables, run * blocks_per_run, blocks_per_run, 1)
        # The table's tail may hold anything: block 0 stands in for what no sequence reaches.
        blocks = jnp.where(exists[:, ::block_size], blocks, 0)
        mask = softmax.visible(positions[:, :, None], key_positions, seq_lens[:, None, None], spec)
        # Beyond a sequence's end, and in a block that was given back because no query sees it, lies anything at all.
        seen = mask.any(1)[:, :, None, None]
        keys, values = (
            jnp.where(seen, kv_cache[blocks, index].reshape(tokens_shape).astype(dtype), 0) for index in range(2)
        )
        keys = keys if k_scale is None else keys * k_scale.astype(dtype)
        values = values if v_scale is None else values * v_scale.astype(dtype)
        if k_scale_cache is not None and v_scale_cache is not None:
            k_scales, v_scales = (
                jnp.where(seen, cache[blocks].reshape(tokens_shape[:3])[..., None].astype(dtype), 0)
                for cache in (k_scale_cache, v_scale_cache)
            )
            keys, values = keys * k_scales, values * v_scales
        scores = jnp.einsum("sqhgd,skhd->shgqk", padded, keys)
        scores = softmax.modified_scores(scores, positions[:, None, None, :, None], key_positions, slopes, spec)
        scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
        return softmax.update(state, scores, _WEIGHTED_VALUES, values)

    def visit_if_reached(state: softmax.SoftmaxState, run: jax.Array) -> tuple[softmax.SoftmaxState, None]:
        reached = (run * run_tokens < seq_lens) & ((run + 1) * run_tokens > first_visible) & (query_lens > 0)
        return jax.lax.cond(reached.any(), visit, lambda state, run: state, state, run), None

    shape = (num_seqs, num_kv_heads, num_heads // num_kv_heads, max_query_len)
    state = softmax.empty_state(shape, head_size, dtype, _sinks_by_group(sinks, num_kv_heads))
    if num_runs == 1:
        state = visit(state, jnp.int32(0))
    else:
        state, _ = jax.lax.scan(visit_if_reached, state, jnp.arange(num_runs))
    out, lse = softmax.finish(state)
    out = out.transpose(0, 3, 1, 2, 4).reshape(num_seqs, max_query_len, num_heads, head_size)
    lse = lse.transpose(0, 3, 1, 2).reshape(num_seqs, max_query_len, num_heads)
    return _to_ragged(out, lse, query.shape[0], query_start_loc, query.dtype)


@functools.partial(_one_program, static_argnames=("spec", "max_query_len", "max_key_len"))
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_start_loc: jax.Array,
    key_start_loc: jax.Array,
    alibi_slopes: jax.Array | None,
    sinks: jax.Array | None,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    max_key_len: int,
) -> tuple[jax.Array, jax.Array]:
    """Attends every query to its sequence's keys, both packed; arguments as in `jattn.ops.attention`."""
    num_heads = query.shape[1]
    num_kv_heads, value_head_size = key.shape[1], value.shape[2]
    num_seqs = query_start_loc.shape[0] - 1
    dtype = _compute_dtype(query.dtype)
    if query.shape[0] == 0 or key.shape[0] == 0:
        shape = (*query.shape[:2], value_head_size)
        return jnp.zeros(shape, query.dtype), jnp.full(shape[:2], -jnp.inf, dtype)
    query_lens, key_lens = jnp.diff(query_start_loc), jnp.diff(key_start_loc)
    padded = _by_sequence(query, query_start_loc, max_query_len).astype(dtype)
    padded = padded.reshape(num_seqs, max_query_len, num_kv_heads, num_heads // num_kv_heads, query.shape[2])
    positions = (key_lens - query_lens)[:, None] + jnp.arange(max_query_len)
    key_positions = jnp.arange(max_key_len)
    keys = _by_sequence(key, key_start_loc, max_key_len).astype(dtype)
    values = _by_sequence(value, key_start_loc, max_key_len).astype(dtype)
    mask = softmax.visible(positions[:, :, None], key_positions, key_lens[:, None, None], spec)
    slopes = None if alibi_slopes is None else alibi_slopes.astype(dtype).reshape(num_kv_heads, -1, 1, 1)
    scores = jnp.einsum("sqhgd,skhd->shgqk", padded, keys)
    scores = softmax.modified_scores(scores, positions[:, None, None, :, None], key_positions, slopes, spec)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    shape = (num_seqs, num_kv_heads, num_heads // num_kv_heads, max_query_len)
    state = softmax.empty_state(shape, value_head_size, dtype, _sinks_by_group(sinks, num_kv_heads))
    out, lse = softmax.finish(softmax.update(state, scores, _WEIGHTED_VALUES, values))
    out = out.transpose(0, 3, 1, 2, 4).reshape(num_seqs, max_query_len, num_heads, value_head_size)
    lse = lse.transpose(0, 3, 1, 2).reshape(num_seqs, max_query_len, num_heads)
    return _to_ragged(out, lse, query.shape[0], query_start_loc, query.dtype)


@_one_program
def write_kv_cache(
    key: jax.Array,
    value: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> jax.Array:
    """Scatters new keys and values into their slots; in place where the cache is donated."""
    blocks, offsets = _places(slot_mapping, kv_cache)
    codes = [_quantised(x, scale, kv_cache.dtype) for x, scale in ((key, k_scale), (value, v_scale))]
    return _stored(kv_cache, blocks, offsets, codes)


@_one_program
def write_kv_cache_per_token_head(
    key: jax.Array,
    value: jax.Array,
    kv_cache: jax.Array,
    k_scale_cache: jax.Array,
    v_scale_cache: jax.Array,
    slot_mapping: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scatters new keys and values, each row of a head with the scale that its largest element asks for."""
    blocks, offsets = _places(slot_mapping, kv_cache)
    largest = _largest(kv_cache.dtype)
    wide = [x.astype(jnp.float32) for x in (key, value)]
    scales = [jnp.maximum(jnp.abs(x).max(-1) / largest, _SMALLEST_SCALE) for x in wide]
    codes = [_quantised(x, scale[..., None], kv_cache.dtype) for x, scale in zip(wide, scales, strict=True)]
    kv_cache = _stored(kv_cache, blocks, offsets, codes)
    k_scale_cache, v_scale_cache = (
        cache.at[blocks, offsets].set(scale, mode="drop")
        for cache, scale in zip((k_scale_cache, v_scale_cache), scales, strict=True)
    )
    return kv_cache, k_scale_cache, v_scale_cache


@_one_program
def merge_states(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Joins two attention results over disjoint keys by their LSE; two empty sides give zeros and -inf."""
    lse_a, lse_b = (jnp.where(jnp.isposinf(lse), -jnp.inf, lse) for lse in (lse_a, lse_b))
    maximum = jnp.maximum(lse_a, lse_b)
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    weight_a, weight_b = jnp.exp(lse_a - shift), jnp.exp(lse_b - shift)
    total = weight_a + weight_b
    safe = jnp.where(total > 0, total, 1)
    # An empty side's output may be anything, NaN included.
    parts = [
        jnp.where(weight[..., None] > 0, out.astype(lse_a.dtype), 0) * (weight / safe)[..., None]
        for out, weight in ((out_a, weight_a), (out_b, weight_b))
    ]
    return (parts[0] + parts[1]).astype(out_a.dtype), jnp.where(total > 0, shift + jnp.log(safe), -jnp.inf)


def _compute_dtype(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _sinks_by_group(sinks: jax.Array | None, num_kv_heads: int) -> jax.Array | None:
    return None if sinks is None else sinks.reshape(num_kv_heads, -1, 1)


def _by_sequence(packed: jax.Array, start_loc: jax.Array, max_len: int) -> jax.Array:
    """Returns packed rows as `[num_seqs, max_len, ...]`, zeros past a sequence's end: a neighbour's NaN lies there."""
    rows = start_loc[:-1, None] + jnp.arange(max_len)
    own = rows < start_loc[1:, None]
    return jnp.where(own[:, :, None, None], packed.at[rows].get(mode="fill", fill_value=0), 0)


def _first_visible(first_positions: jax.Array, spec: AttentionSpec) -> jax.Array:
    first = jnp.zeros_like(first_positions)
    if spec.window_left is not None:
        first = jnp.maximum(first, first_positions - spec.window_left)
    if spec.attention_chunk is not None:
        first = jnp.maximum(first, first_positions // spec.attention_chunk * spec.attention_chunk)
    return first


def _to_ragged(
    out: jax.Array, lse: jax.Array, num_tokens: int, query_start_loc: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    tokens = jnp.arange(num_tokens)
    sequence = jnp.searchsorted(query_start_loc, tokens, side="right") - 1
    real = tokens < query_start_loc[-1]
    sequence = jnp.where(real, sequence, 0)
    row = jnp.where(real, tokens - query_start_loc[sequence], 0)
    gathered = jnp.where(real[:, None, None], out[sequence, row], 0).astype(dtype)
    return gathered, jnp.where(real[:, None], lse[sequence, row], -jnp.inf)


def _places(slot_mapping: jax.Array, kv_cache: jax.Array) -> tuple[jax.Array, jax.Array]:
    num_blocks, _, block_size = kv_cache.shape[:3]
    # A negative index would wrap around; one past the end is dropped.
    return jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size), slot_mapping % block_size


def _stored(kv_cache: jax.Array, blocks: jax.Array, offsets: jax.Array, keys_and_values: list[jax.Array]) -> jax.Array:
    return kv_cache.at[blocks[:, None], jnp.arange(2), offsets[:, None]].set(
        jnp.stack(keys_and_values, axis=1), mode="drop"
    )


def _largest(dtype: jnp.dtype) -> float:
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def _quantised(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Returns `x / scale` as elements of the cache; one-byte types saturate, int8 rounds to the nearest even."""
    one_byte = jnp.dtype(dtype).itemsize == 1
    if x.dtype == dtype and one_byte:
        return x
    if scale is not None or one_byte:
        x = x.astype(jnp.float32)
    if scale is not None:
        x = x / scale
    if one_byte:
        x = jnp.clip(x, -_largest(dtype), _largest(dtype))
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype)
