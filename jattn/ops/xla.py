"""The calls in plain jnp: differentiable, on any platform, and the JAX-side oracle of the other implementations.

Keys are visited in runs of a fixed number of tokens, so the table's width costs nothing where no sequence reaches. What
batch mates, dead slots and table tails hold does not show in a single bit; another number of sequences or another
`max_query_len` is another XLA program, which may round differently.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jattn.bridge.calls import empty_outputs
from jattn.ops import latents, softmax
from jattn.ops.indexer import chosen_slots, indexer_logits
from jattn.ops.rotary import rotate
from jattn.ops.routed import fused_experts, route_experts
from jattn.ops.softmax import compute_dtype
from torch_core.attention.backward_call import DenseBackwardCall, forward_of
from torch_core.attention.call import AttentionCall, DenseCall, PagedCall, TableCall
from torch_core.attention.dropout import keep_factor, keep_mask
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import Unsupported
from torch_core.base.specs import LARGEST_CODE, SMALLEST_SCALE
from torch_core.cache_writes.call import WriteCall
from torch_core.cache_writes.rotary_call import RotaryWriteCall
from torch_core.experts.call import ExpertsCall
from torch_core.experts.routing_call import RouteCall
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.latent.sparse_call import ChoiceCall, IndexerCall
from torch_core.launch.call import Call

__all__ = ["run"]

# Longer runs read more behind the ends of short sequences; shorter ones cost long sequences more than they save.
_TOKENS_PER_RUN = 64
_WEIGHTED_VALUES = "shgqk,skhd->shgqd"


def run(call: Call[jax.Array]) -> dict[str, jax.Array]:
    """Computes a checked call; returns its outputs and the new values of what it writes, by name."""
    if isinstance(call, TableCall):
        return _paged_attention(call)
    if isinstance(call, DenseBackwardCall):
        return _attention_backward(call)
    if isinstance(call, DenseCall):
        return _attention(call)
    if isinstance(call, WriteCall):
        return _write_kv_cache(call)
    if isinstance(call, LatentWriteCall):
        return _write_latent_cache(call)
    if isinstance(call, RotaryWriteCall):
        return _rotate_and_write(call)
    if isinstance(call, MergeCall):
        return _merge_states(call)
    if isinstance(call, IndexerCall):
        return _one_program(indexer_logits)(call)
    if isinstance(call, ChoiceCall):
        return _one_program(chosen_slots)(call)
    if isinstance(call, ExpertsCall):
        return _one_program(fused_experts)(call)
    if isinstance(call, RouteCall):
        return _one_program(route_experts)(call)
    raise Unsupported(f"{call.name} has no implementation in jnp.")


# Outside jit an op is one program and not one for each primitive; inside, `inline` leaves no trace of it.
_one_program = functools.partial(jax.jit, inline=True)


@_one_program
def _paged_attention(call: TableCall[jax.Array]) -> dict[str, jax.Array]:
    num_seqs, max_blocks = call.block_tables.shape
    block_size, num_kv_heads = call.block_size, call.num_kv_heads
    dtype = compute_dtype(call)
    if call.is_empty or max_blocks == 0 or call.max_query_len == 0:
        return empty_outputs(call)
    query_lens = jnp.diff(call.query_start_loc)
    context = call.seq_lens - query_lens
    queries = _queries(call, dtype)
    positions = context[:, None] + jnp.arange(call.max_query_len)

    blocks_per_run = max(1, min(_TOKENS_PER_RUN // block_size, max_blocks))
    num_runs = math.ceil(max_blocks / blocks_per_run)
    tables = jnp.pad(call.block_tables, ((0, 0), (0, num_runs * blocks_per_run - max_blocks)))
    run_tokens = blocks_per_run * block_size
    first_visible = softmax.first_visible(call, positions[:, 0])

    def visit(state: softmax.SoftmaxState, run: jax.Array) -> softmax.SoftmaxState:
        start = run * run_tokens
        key_positions = start + jnp.arange(run_tokens)
        exists = key_positions < call.seq_lens[:, None]
        blocks = jax.lax.dynamic_slice_in_dim(tables, run * blocks_per_run, blocks_per_run, 1)
        # The table's tail may hold anything: block 0 stands in for what no sequence reaches.
        blocks = jnp.where(exists[:, ::block_size], blocks, 0)
        mask, bias = softmax.visible(call, positions, key_positions, call.seq_lens, context)
        # Beyond a sequence's end, and in a block that was given back because no query sees it, lies anything at all.
        seen = mask.any(1)[:, :, None, None]
        keys, values = (
            jnp.where(seen, x.reshape(num_seqs, run_tokens, num_kv_heads, -1).astype(dtype), 0)
            for x in _blocks(call, blocks)
        )
        keys, values = _scaled(keys, call.k_scale), _scaled(values, call.v_scale)  # type: ignore[attr-defined]
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
        state, _ = jax.lax.scan(visit_if_reached, state, jnp.arange(num_runs))
    return _results(call, state)


@_one_program
def _attention(call: DenseCall[jax.Array]) -> dict[str, jax.Array]:
    dtype = compute_dtype(call)
    max_key_len = call.max_key_len if call.max_key_len is not None else call.key.shape[0]
    if call.is_empty or call.key.shape[0] == 0 or call.max_query_len == 0 or max_key_len == 0:
        return empty_outputs(call)
    key_lens = jnp.diff(call.key_start_loc)
    context = key_lens - jnp.diff(call.query_start_loc)
    positions = context[:, None] + jnp.arange(call.max_query_len)
    key_positions = jnp.arange(max_key_len)
    keys = _by_sequence(call.key, call.key_start_loc, max_key_len).astype(dtype)
    values = _by_sequence(call.value, call.key_start_loc, max_key_len).astype(dtype)
    mask, bias = softmax.visible(call, positions, key_positions, key_lens, context)
    scores = jnp.einsum("sqhgd,skhd->shgqk", _queries(call, dtype), keys)
    scores = softmax.modified_scores(call, scores, positions, key_positions, mask, bias)
    dropout = None
    if call.dropout_seeds is not None:
        dropout = keep_mask(
            call.dropout_seeds, jnp.arange(call.max_query_len), (0, max_key_len), call.dropout_rate, jnp
        )
        dropout = dropout.reshape(scores.shape) * jnp.asarray(keep_factor(call.dropout_rate), dtype)
    state = softmax.update(softmax.empty_state(call), scores, _WEIGHTED_VALUES, values, dropout)
    return _results(call, state)


@_one_program
def _attention_backward(call: DenseBackwardCall[jax.Array]) -> dict[str, jax.Array]:
    inputs = {name: getattr(call, name.removeprefix("d_")) for name in call.outputs()}
    forward = replace(forward_of(call), with_lse=True, out_dtype=compute_dtype(call).name)
    found, pull = jax.vjp(
        lambda x: _attention(forward.with_arrays({name.removeprefix("d_"): array for name, array in x.items()})), inputs
    )
    # Rows past the last sequence may hold anything; rows that see nothing have an lse of -inf in any case.
    real = (jnp.arange(call.num_tokens) < call.query_start_loc[-1])[:, None] & (found["lse"] > -jnp.inf)
    # The lse that is given counts: it may be over more keys than are here, of which others have the gradient.
    share = jnp.where(real, jnp.exp(found["lse"] - jnp.where(real, call.lse, 0)), 0)
    results = call.arrays()
    d_out, out = (jnp.where(real[..., None], results[name], 0).astype(share.dtype) for name in ("d_out", "out"))
    d_lse = (d_out * (found["out"] - out)).sum(-1)
    if call.d_lse is not None:
        d_lse += jnp.where(real, call.d_lse, 0)
    gradients = {"out": share[..., None] * d_out, "lse": share * d_lse}
    return pull(gradients)[0]


@_one_program
def _write_kv_cache(call: WriteCall[jax.Array]) -> dict[str, jax.Array]:
    num_slots = call.slot_mapping.shape[0]
    blocks, offsets = _places(call.slot_mapping, call.num_blocks, call.block_size)
    found, codes = {}, []
    new = (("k_scale_cache", call.key, call.k_scale), ("v_scale_cache", call.value, call.v_scale))
    for name, real, scale in new:
        real = real[:num_slots]
        scale_cache = getattr(call, name)
        if scale_cache is not None:
            largest = jnp.abs(real.astype(jnp.float32)).max(-1)
            scale = jnp.maximum(largest / LARGEST_CODE[call.cache_dtype], SMALLEST_SCALE)
            found[name] = scale_cache.at[blocks, offsets].set(scale, mode="drop")
            scale = scale[..., None]
        codes.append(_quantised(real, scale, call.cache_dtype))
    if call.kv_cache is not None:
        both = jnp.stack(codes, axis=1)
        found["kv_cache"] = call.kv_cache.at[blocks[:, None], jnp.arange(2), offsets[:, None]].set(both, mode="drop")
        return found
    for name, cache, code in zip(("key_cache", "value_cache"), (call.key_cache, call.value_cache), codes, strict=True):
        found[name] = cache.at[blocks, offsets].set(code, mode="drop")  # type: ignore[union-attr]
    return found


@_one_program
def _write_latent_cache(call: LatentWriteCall[jax.Array]) -> dict[str, jax.Array]:
    cache, num_slots = call.latent_cache, call.slot_mapping.shape[0]
    kv_c, k_pe = call.kv_c[:num_slots], latents.rotated(call)
    if call.is_packed:
        rows = latents.packed(kv_c, k_pe)
    else:
        rows = jnp.concatenate([_quantised(part, call.k_scale, cache.dtype.name) for part in (kv_c, k_pe)], axis=1)
    blocks, offsets = _places(call.slot_mapping, *cache.shape[:2])
    return {"latent_cache": cache.at[blocks, offsets].set(rows, mode="drop")}


@_one_program
def _rotate_and_write(call: RotaryWriteCall[jax.Array]) -> dict[str, jax.Array]:
    heads, value = jnp.split(call.qkv, (call.num_heads + call.num_kv_heads,), axis=1)
    heads = rotate(heads, call.cos_sin[:, None], is_neox_style=call.is_neox_style)
    query, key = jnp.split(heads, (call.num_heads,), axis=1)
    new = {"key": key, "value": value, "slot_mapping": call.slot_mapping, "kv_cache": call.kv_cache}
    return {"out": query, **_write_kv_cache(WriteCall(**new, k_scale=call.k_scale, v_scale=call.v_scale))}


@_one_program
def _merge_states(call: MergeCall[jax.Array]) -> dict[str, jax.Array]:
    lse_a, lse_b = (jnp.where(jnp.isposinf(lse), -jnp.inf, lse) for lse in (call.lse_a, call.lse_b))
    if call.num_tokens_a is not None:
        lse_a = jnp.where(jnp.arange(lse_a.shape[0])[:, None] < call.num_tokens_a, lse_a, -jnp.inf)
    maximum = jnp.maximum(lse_a, lse_b)
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    weight_a, weight_b = jnp.exp(lse_a - shift), jnp.exp(lse_b - shift)
    total = weight_a + weight_b
    safe = jnp.where(total > 0, total, 1)
    # An empty side's output may be anything, NaN included.
    parts = [
        jnp.where(weight[..., None] > 0, out.astype(lse_a.dtype), 0) * (weight / safe)[..., None]
        for out, weight in ((call.out_a, weight_a), (call.out_b, weight_b))
    ]
    out = _quantised(parts[0] + parts[1], call.out_scale, call.result_dtype)
    return {"out": out, "lse": jnp.where(total > 0, shift + jnp.log(safe), -jnp.inf)}


def _blocks(call: Any, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and the values of blocks, indexed through whole arrays: a view of a part would copy it."""
    if isinstance(call, LatentCall):
        rows = call.latent_cache[blocks]
        if call.is_packed:
            dtype = call.query.dtype if call.query.dtype.itemsize > 1 else jnp.bfloat16
            rows = latents.unpacked(rows, call.kv_lora_rank).astype(dtype)
        return rows, rows[..., : call.kv_lora_rank]
    if call.kv_cache is not None:
        return call.kv_cache[blocks, 0], call.kv_cache[blocks, 1]
    return tuple(cache[blocks] for cache in call.caches)  # type: ignore[return-value]


def _places(slot_mapping: jax.Array, num_blocks: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns block and offset of each slot. A negative index would wrap around; one past the end is dropped."""
    return jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size), slot_mapping % block_size


def _queries(call: AttentionCall[jax.Array], dtype: jnp.dtype) -> jax.Array:
    """Returns the queries as [num_seqs, max_query_len, num_kv_heads, group, head_size], what they are worth."""
    padded = _by_sequence(call.query, call.query_start_loc, call.max_query_len).astype(dtype)
    padded = padded.reshape(call.num_seqs, call.max_query_len, call.num_kv_heads, call.group, call.head_size)
    return _scaled(padded, getattr(call, "q_scale", None))


def _scaled(array: jax.Array, scale: jax.Array | float | None) -> jax.Array:
    return array if scale is None else array * jnp.asarray(scale, array.dtype)


def _results(call: AttentionCall[jax.Array], state: softmax.SoftmaxState) -> dict[str, jax.Array]:
    out, lse = softmax.finish(state)
    padded = (call.num_seqs, call.max_query_len, call.num_heads)
    out = out.transpose(0, 3, 1, 2, 4).reshape(*padded, call.value_head_size)
    lse = lse.transpose(0, 3, 1, 2).reshape(padded)
    tokens = jnp.arange(call.num_tokens)
    sequence = jnp.searchsorted(call.query_start_loc, tokens, side="right") - 1
    real = tokens < call.query_start_loc[-1]
    sequence = jnp.where(real, sequence, 0)
    row = jnp.where(real, tokens - call.query_start_loc[sequence], 0)
    found = {"out": jnp.where(real[:, None, None], out[sequence, row], 0)}
    found["out"] = _quantised(found["out"], call.out_scale, call.result_dtype)
    if call.with_lse:
        found["lse"] = jnp.where(real[:, None], lse[sequence, row], -jnp.inf)
    return found


def _by_sequence(packed: jax.Array, start_loc: jax.Array, max_len: int) -> jax.Array:
    """Returns packed rows as `[num_seqs, max_len, ...]`, zeros past a sequence's end: a neighbour's NaN lies there."""
    rows = start_loc[:-1, None] + jnp.arange(max_len)
    own = rows < start_loc[1:, None]
    return jnp.where(own[:, :, None, None], packed.at[rows].get(mode="fill", fill_value=0), 0)


def _quantised(x: jax.Array, scale: jax.Array | float | None, dtype: str) -> jax.Array:
    """Returns `x / scale` as elements of `dtype`; one-byte types saturate, int8 rounds to the nearest even."""
    one_byte = dtype in LARGEST_CODE
    if x.dtype.name == dtype and one_byte:
        return x
    if scale is not None or one_byte:
        x = x.astype(jnp.float32)
    if scale is not None:
        x = x / scale
    if one_byte:
        x = jnp.clip(x, -LARGEST_CODE[dtype], LARGEST_CODE[dtype])
    return (jnp.round(x) if dtype == "int8" else x).astype(dtype)
