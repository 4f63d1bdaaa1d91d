"""Attention in plain jnp whose sums have one order: keys by their position, in runs that begin at absolute multiples.

The queries of a sequence go through one compiled loop in tiles of one size, whether a step has one of them or all, so
that a query has the same bits in a prompt, in a chunk of it, in a decode step and in a training pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jattn.bridge.calls import empty_outputs
from jattn.ops import softmax
from jattn.ops.batch import one_by_one
from jattn.ops.quantise import quantised, scaled
from torch_core.attention.call import AttentionCall, TableCall

_C = TypeVar("_C", bound=AttentionCall[Any])
#: Keys and values at positions int32[keys] of a sequence, float[keys, num_kv_heads, size] in the dtype of the
#: computation.
Read = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]

_QUERIES, _KEYS = 8, 64


def attend_in_order(call: _C, read: Read, *, plain: Callable[[_C], dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """Computes a batch-invariant call; its derivative is that of `plain`, of the same call without the flag.

    Args:
        call: checked.
        read: reads keys and values.
        plain: computes a call in any order.
    """
    if call.is_empty or call.max_query_len == 0:
        return empty_outputs(call)
    names = tuple(call.arrays())

    def filled(operands: tuple[jax.Array, ...]) -> Any:
        return call.with_arrays(dict(zip(names, operands, strict=True)))

    @custom_vmap
    def mapped(*operands: jax.Array) -> dict[str, jax.Array]:
        return _attend(filled(operands), read)

    @mapped.def_vmap
    def _map(axis_size: int, in_batched: list[bool], *operands: jax.Array) -> tuple[Any, Any]:
        found = one_by_one(mapped, in_batched, operands)
        return found, dict.fromkeys(found, True)

    @jax.custom_jvp
    def differentiable(*operands: jax.Array) -> dict[str, jax.Array]:
        return mapped(*operands)

    @differentiable.defjvp
    def _derive(primals: tuple[jax.Array, ...], tangents: Any) -> tuple[Any, Any]:
        in_any_order = jax.jvp(
            lambda *operands: plain(_changed(filled(operands), batch_invariant=False)), primals, tangents
        )
        return differentiable(*primals), in_any_order[1]

    return differentiable(*call.arrays().values())


def _attend(call: AttentionCall[jax.Array], read: Read) -> dict[str, jax.Array]:
    dtype, starts = softmax.compute_dtype(call), call.query_start_loc
    key_lens = call.seq_lens if isinstance(call, TableCall) else jnp.diff(call.key_start_loc)  # type: ignore[attr-defined]
    query_lens = jnp.diff(starts)
    tile_ends = jnp.cumsum(-(-query_lens // _QUERIES), dtype=jnp.int32)
    query = scaled(call.query.astype(dtype), getattr(call, "q_scale", None))
    out = jnp.zeros((call.num_tokens, call.num_heads, call.value_head_size), dtype)
    lse = jnp.full((call.num_tokens, call.num_heads), -jnp.inf, dtype)

    def visit_queries(tile: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        seq = jnp.searchsorted(tile_ends, tile, side="right").astype(jnp.int32)
        first = (tile - jnp.where(seq > 0, tile_ends[jnp.maximum(seq - 1, 0)], 0)) * _QUERIES
        tokens = first + jnp.arange(_QUERIES, dtype=jnp.int32)
        rows = jnp.where(tokens < query_lens[seq], starts[seq] + tokens, call.num_tokens)
        context = (key_lens[seq] - query_lens[seq])[None]
        found = _attend_tile(
            _of_one_sequence(call, seq),
            query.at[rows].get(mode="fill", fill_value=0),
            context[:, None] + tokens[None],
            key_lens[seq][None],
            context,
            lambda positions: read(call, seq, positions),
        )
        return tuple(whole.at[rows].set(part, mode="drop") for whole, part in zip(results, found, strict=True))  # type: ignore[return-value]

    out, lse = jax.lax.fori_loop(jnp.int32(0), tile_ends[-1], visit_queries, (out, lse))
    results = {"out": quantised(out, call.out_scale, call.result_dtype)}
    return {**results, "lse": lse} if call.with_lse else results


def _attend_tile(
    call: AttentionCall[jax.Array],
    query: jax.Array,
    positions: jax.Array,
    key_lens: jax.Array,
    context: jax.Array,
    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Attends one tile of a sequence's queries [queries, num_heads, head_size]; positions are int32[1, queries]."""
    by_head = query.reshape(1, _QUERIES, call.num_kv_heads, call.group, call.head_size)
    first = softmax.first_visible(call, positions[:, 0])[0]

    def visit(state: tuple[jax.Array, softmax.SoftmaxState]) -> tuple[jax.Array, softmax.SoftmaxState]:
        run, softmax_state = state
        key_positions = run * _KEYS + jnp.arange(_KEYS, dtype=jnp.int32)
        mask, bias = softmax.visible(call, positions, key_positions, key_lens, context)
        # Beyond the end, and in a block that was given back because no query sees it, lies anything at all.
        seen = mask.any((0, 1))[:, None, None]
        keys, values = read(jnp.minimum(key_positions, key_lens[0] - 1))
        keys, values = jnp.where(seen, keys, 0)[None], jnp.where(seen, values, 0)[None]
        scores = jnp.einsum("sqhgd,skhd->shgqk", by_head, keys)
        scores = softmax.modified_scores(call, scores, positions, key_positions, mask, bias)
        return run + 1, softmax.update(softmax_state, scores, "shgqk,skhd->shgqd", values)

    # By the mask alone: keys after the queries' own change no bit, but cost time.
    spec = call.spec
    ends_with_queries = spec.causal and call.seq_causal is None and call.mm_prefix_range is None
    end = jnp.minimum(key_lens[0], positions[0, -1] + 1) if ends_with_queries else key_lens[0]
    start = jnp.maximum(first, 0) // _KEYS, softmax.empty_state(call)
    _, state = jax.lax.while_loop(lambda state: state[0] * _KEYS < end, visit, start)
    out, lse = softmax.finish(state)
    size = call.value_head_size
    return out[0].transpose(2, 0, 1, 3).reshape(_QUERIES, -1, size), lse[0].transpose(2, 0, 1).reshape(_QUERIES, -1)


def _of_one_sequence(call: AttentionCall[jax.Array], seq: jax.Array) -> Any:
    """Returns the call of one tile of a sequence, for its masks and its state; its queries are not read."""
    whole = {name: getattr(call, name) for name in ("seq_causal", "mm_prefix_range")}
    own = {name: array[seq][None] for name, array in whole.items() if array is not None}
    return _changed(call, **own, query_start_loc=call.query_start_loc[:2], max_query_len=_QUERIES)


def _changed(call: Any, **values: Any) -> Any:
    return call.of({**{field.name: getattr(call, field.name) for field in fields(call)}, **values})
