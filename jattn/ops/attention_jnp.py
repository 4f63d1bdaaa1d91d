"""Attention in plain jnp: over a paged cache, over packed keys, and its derivative.

Keys are visited in runs of a fixed number of tokens, so the table's width costs nothing where no sequence reaches. The
contents of other sequences, unused slots and table tails do not change a single bit. Another number of sequences or
another `max_query_len` is another XLA program, which may round differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jattn.bridge.calls import empty_outputs
from jattn.ops import softmax
from jattn.ops.attention_in_order import attend_in_order
from jattn.ops.gathered import gathered, gathered_with_pullback
from jattn.ops.quantise import quantised, scaled
from jattn.ops.softmax import compute_dtype
from jattn.ops.xla import Backward, JaxOp, register
from torch_core.attention.backward_call import DenseBackwardCall, forward_of
from torch_core.attention.call import BIAS_FIELDS, AttentionCall, DenseCall, PagedCall, TableCall
from torch_core.attention.dropout import keep_factor, keep_mask
from torch_core.attention.segments import marked_sinks, segment_offsets

#: Scores are float32, and tiles of float64 biases need more memory than a kernel has.
NARROWED = (*BIAS_FIELDS, "sinks")
# Longer runs read more past the ends of short sequences; shorter ones cost long sequences more than they save.
_TOKENS_PER_RUN = 64
_WEIGHTED_VALUES = "shgqk,skhd->shgqd"


def attend_to_blocks(
    call: TableCall[jax.Array], read: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
) -> dict[str, jax.Array]:
    """Computes attention to a cache, whose keys and values `read(call, blocks)` returns for block ids."""
    num_seqs, max_blocks = call.block_tables.shape
    block_size, num_kv_heads = call.block_size, call.num_kv_heads
    dtype = compute_dtype(call)
    if call.is_empty or max_blocks == 0 or call.max_query_len == 0:
        return empty_outputs(call)
    query_lens = jnp.diff(call.query_start_loc)
    context = call.seq_lens - query_lens
    queries = _queries(call, dtype)
    positions = context[:, None] + jnp.arange(call.max_query_len, dtype=jnp.int32)[None]

    blocks_per_run = max(1, min(_TOKENS_PER_RUN // block_size, max_blocks))
    num_runs = math.ceil(max_blocks / blocks_per_run)
    tables = jnp.pad(call.block_tables, ((0, 0), (0, num_runs * blocks_per_run - max_blocks)))
    run_tokens = blocks_per_run * block_size
    first_visible = softmax.first_visible(call, positions[:, 0])

    def visit(state: softmax.SoftmaxState, run: jax.Array) -> softmax.SoftmaxState:
        start = run * run_tokens
        key_positions = start + jnp.arange(run_tokens, dtype=jnp.int32)
        exists = key_positions[None] < call.seq_lens[:, None]
        blocks = jax.lax.dynamic_slice_in_dim(tables, run * blocks_per_run, blocks_per_run, 1)
        # The table's tail may hold anything: block 0 replaces entries that no sequence reaches.
        blocks = jnp.where(exists[:, ::block_size], blocks, 0)
        mask, bias = softmax.visible(call, positions, key_positions, call.seq_lens, context)
        # Beyond a sequence's end, and in a block that was given back because no query sees it, lies anything at all.
        seen = mask.any(1)[:, :, None, None]
        keys, values = (
            jnp.where(seen, x.reshape(num_seqs, run_tokens, num_kv_heads, -1).astype(dtype), 0)
            for x in read(call, blocks)
        )
        keys, values = scaled(keys, call.k_scale), scaled(values, call.v_scale)  # type: ignore[attr-defined]
        if isinstance(call, PagedCall) and call.k_scale_cache is not None and call.v_scale_cache is not None:
            k_scales, v_scales = (
                jnp.where(seen, cache[blocks].reshape(num_seqs, run_tokens, num_kv_heads)[..., None].astype(dtype), 0)
                for cache in (call.k_scale_cache, call.v_scale_cache)
            )
            keys, values = keys * k_scales, values * v_scales
        scores = jnp.einsum("sqhgd,skhd->shgqk", queries, keys)
        scores = softmax.modified_scores(call, scores, positions, key_positions, mask, bias)
        return softmax.update(state, scores, _WEIGHTED_VALUES, values)

    def visit_if_reached(state: softmax.SoftmaxState, run: jax.Array) -> tuple[softmax.SoftmaxState, None]:
        reached = (run * run_tokens < call.seq_lens) & ((run + 1) * run_tokens > first_visible) & (query_lens > 0)
        return jax.lax.cond(reached.any(), visit, lambda state, run: state, state, run), None

    state = softmax.empty_state(call)
    if num_runs == 1:
        state = visit(state, jnp.int32(0))
    else:
        state, _ = jax.lax.scan(visit_if_reached, state, jnp.arange(num_runs, dtype=jnp.int32))
    return _results(call, state)


def _attention(call: DenseCall[jax.Array]) -> dict[str, jax.Array]:
    if call.batch_invariant:
        return attend_in_order(call, _tokens, plain=_attention)
    dtype = compute_dtype(call)
    max_key_len = call.max_key_len if call.max_key_len is not None else call.key.shape[0]
    if call.is_empty or call.key.shape[0] == 0 or call.max_query_len == 0 or max_key_len == 0:
        return empty_outputs(call)
    key_lens = jnp.diff(call.key_start_loc)
    context = key_lens - jnp.diff(call.query_start_loc)
    positions = context[:, None] + jnp.arange(call.max_query_len, dtype=jnp.int32)[None]
    key_positions = jnp.arange(max_key_len, dtype=jnp.int32)
    pairs = None
    if call.segment_ids is not None:
        call, (positions, key_positions, pairs) = _segmented(call, call.segment_ids, max_key_len)
    keys = _by_sequence(call.key, call.key_start_loc, max_key_len).astype(dtype)
    values = _by_sequence(call.value, call.key_start_loc, max_key_len).astype(dtype)
    mask, bias = softmax.visible(call, positions, key_positions, key_lens, context)
    mask = mask if pairs is None else mask & pairs
    scores = jnp.einsum("sqhgd,skhd->shgqk", _queries(call, dtype), keys)
    scores = softmax.modified_scores(call, scores, positions, key_positions, mask, bias)
    dropout = None
    if call.dropout_seeds is not None:
        dropout = keep_mask(
            call.dropout_seeds, jnp.arange(call.max_query_len), (0, max_key_len), call.dropout_rate, jnp
        )
        dropout = dropout.reshape(scores.shape).astype(dtype) * jnp.asarray(keep_factor(call.dropout_rate), dtype)
    state = softmax.update(softmax.empty_state(call), scores, _WEIGHTED_VALUES, values, dropout)
    return _results(call, state)


def _tokens(call: DenseCall[jax.Array], seq: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the packed keys and values at positions of a sequence."""
    rows, dtype = call.key_start_loc[seq] + positions, compute_dtype(call)
    return call.key[rows].astype(dtype), call.value[rows].astype(dtype)


def _segmented(
    call: DenseCall[jax.Array], ids: jax.Array, max_key_len: int
) -> tuple[DenseCall[jax.Array], softmax.Segments]:
    """Returns a call with zeros as padding, and positions and pairs by segments."""
    key_ids = ids if call.key_segment_ids is None else call.key_segment_ids
    # Padding may hold anything, and 0 times NaN is NaN, in a derivative too.
    real = {"query": ids > 0, "key": key_ids > 0, "value": key_ids > 0}
    arrays = {name: jnp.where(tokens[:, None, None], getattr(call, name), 0) for name, tokens in real.items()}
    arrays["sinks"] = marked_sinks(call, segment_offsets(call, jnp).fit, jnp)
    starts = ((ids, call.query_start_loc, call.max_query_len), (key_ids, call.key_start_loc, max_key_len))
    return call.with_arrays(arrays), softmax.segments(*(_by_sequence(*side) for side in starts))


def _attention_backward(call: DenseBackwardCall[jax.Array]) -> dict[str, jax.Array]:
    inputs = {name: getattr(call, name.removeprefix("d_")) for name in call.outputs()}
    forward = replace(forward_of(call), with_lse=True, out_dtype=compute_dtype(call).name)
    found, pull = jax.vjp(
        lambda x: _attention(forward.with_arrays({name.removeprefix("d_"): array for name, array in x.items()})), inputs
    )
    # Rows past the last sequence may hold anything; rows that see nothing have an lse of -inf in any case.
    real = jnp.arange(call.num_tokens, dtype=jnp.int32) < call.query_start_loc[-1]
    real = real[:, None] & (found["lse"] > -jnp.inf)
    # The lse that is given counts: it may be over more keys than are here, of which others have the gradient.
    share = jnp.where(real, jnp.exp(found["lse"] - jnp.where(real, call.lse, 0)), 0)
    results = call.arrays()
    d_out, out = (jnp.where(real[..., None], results[name], 0).astype(share.dtype) for name in ("d_out", "out"))
    d_lse = (d_out * (found["out"] - out)).sum(-1)
    if call.d_lse is not None:
        d_lse += jnp.where(real, call.d_lse, 0)
    gradients = {"out": share[..., None] * d_out, "lse": share * d_lse}
    return pull(gradients)[0]


def _paged_attention(call: PagedCall[jax.Array]) -> dict[str, jax.Array]:
    if call.batch_invariant:
        return attend_in_order(call, _slots, plain=_paged_attention)
    return attend_to_blocks(call, _blocks)


def _slots(call: PagedCall[jax.Array], seq: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and the values at positions of a sequence, scales applied."""
    at = call.block_tables[seq, positions // call.block_size], positions % call.block_size
    dtype = compute_dtype(call)
    if call.kv_cache is not None:
        keys, values = call.kv_cache[at[0], 0, at[1]], call.kv_cache[at[0], 1, at[1]]
    else:
        keys, values = (cache[at] for cache in call.caches)
    keys, values = scaled(keys.astype(dtype), call.k_scale), scaled(values.astype(dtype), call.v_scale)
    if call.k_scale_cache is not None and call.v_scale_cache is not None:
        keys, values = keys * call.k_scale_cache[at][..., None], values * call.v_scale_cache[at][..., None]
    return keys, values


def _blocks(call: PagedCall[jax.Array], blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and the values of blocks, indexed through whole arrays: a view of a part would copy it."""
    if call.kv_cache is not None:
        return call.kv_cache[blocks, 0], call.kv_cache[blocks, 1]
    return tuple(cache[blocks] for cache in call.caches)  # type: ignore[return-value]


def _queries(call: AttentionCall[jax.Array], dtype: jnp.dtype) -> jax.Array:
    """Returns the dequantised queries as [num_seqs, max_query_len, num_kv_heads, group, head_size]."""
    padded = _by_sequence(call.query, call.query_start_loc, call.max_query_len).astype(dtype)
    padded = padded.reshape(call.num_seqs, call.max_query_len, call.num_kv_heads, call.group, call.head_size)
    return scaled(padded, getattr(call, "q_scale", None))


def _results(call: AttentionCall[jax.Array], state: softmax.SoftmaxState) -> dict[str, jax.Array]:
    out, lse = softmax.finish(state)
    padded = (call.num_seqs, call.max_query_len, call.num_heads)
    out = out.transpose(0, 3, 1, 2, 4).reshape(*padded, call.value_head_size)
    lse = lse.transpose(0, 3, 1, 2).reshape(padded)
    tokens = jnp.arange(call.num_tokens, dtype=jnp.int32)
    sequence = jnp.searchsorted(call.query_start_loc, tokens, side="right") - 1
    real = tokens < call.query_start_loc[-1]
    sequence = jnp.where(real, sequence, 0)
    row = jnp.where(real, tokens - call.query_start_loc[sequence], 0)
    found = {"out": jnp.where(real[:, None, None], out[sequence, row], 0)}
    found["out"] = quantised(found["out"], call.out_scale, call.result_dtype)
    if call.with_lse:
        found["lse"] = jnp.where(real[:, None], lse[sequence, row], -jnp.inf)
    return found


def _by_sequence(packed: jax.Array, start_loc: jax.Array, max_len: int) -> jax.Array:
    """Returns packed rows as `[num_seqs, max_len, ...]`, zeros past a sequence's end: a neighbour's NaN lies there."""
    rows = start_loc[:-1, None] + jnp.arange(max_len, dtype=jnp.int32)[None]
    own = rows < start_loc[1:, None]
    own = own.reshape(*own.shape, *(1,) * (packed.ndim - 1))
    return jnp.where(own, packed.at[rows].get(mode="fill", fill_value=0), 0)


def _by_operand(gradients: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name.removeprefix("d_"): x for name, x in gradients.items()}


# A dense call has the derivative of a dense call.
_ITSELF = Backward(lambda call: call, lambda call: (call, _by_operand))
register(
    JaxOp(call=PagedCall, jnp=_paged_attention, backward=Backward(gathered, gathered_with_pullback), narrowed=NARROWED)
)
register(JaxOp(call=DenseCall, jnp=_attention, backward=_ITSELF, folds=True, narrowed=NARROWED))
register(JaxOp(call=DenseBackwardCall, jnp=_attention_backward, folds=True))
