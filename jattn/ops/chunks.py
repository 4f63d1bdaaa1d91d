"""Ops of layers with a state in jnp: the sequences of a batch in chunks, from and to their state slots."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from torch_core.state.call import StateCall
from torch_core.state.delta_call import GatedDeltaCall
from torch_core.state.mamba_call import MambaChunkScanCall

#: From an array with a row for each token to `[chunks, heads, size, ...]`, zeros where a chunk has no token.
Chunks: TypeAlias = Callable[[jax.Array], jax.Array]


def advance_in_chunks(
    call: GatedDeltaCall[jax.Array] | MambaChunkScanCall[jax.Array],
    values: jax.Array,
    columns: int,
    size: int,
    prepare: Callable[[Chunks, jax.Array], tuple[jax.Array, ...]],
    advance: Callable[..., tuple[jax.Array, jax.Array]],
) -> dict[str, jax.Array]:
    """Returns `out` and `states` of a checked call: sequences of one chunk all together, longer ones chunk by chunk.

    Args:
        call: call with states of `columns` columns.
        values: an array with the axes and the dtype of the results.
        columns: likewise.
        size: tokens of a chunk.
        prepare: returns arrays with the chunks as first axis; of a function that finds the rows of a token array, and
            bool[chunks, size], which places have a token.
        advance: returns the results `[heads, size, ...]` of a chunk and the state after it; of the state before it, and
            of its part of those arrays.
    """
    wide = jnp.float64 if getattr(call, call.tokens_in).dtype == jnp.float64 else jnp.float32
    first, slots = initial_states(call, (*values.shape[1:], columns), wide)
    advanced = functools.partial(_advanced, call, min(size, call.max_query_len), prepare, advance, first)
    rows, out, last = advanced(jnp.diff(call.query_start_loc))
    out = jnp.moveaxis(out, 1, 2).astype(values.dtype)
    result = jnp.zeros(values.shape, values.dtype)
    found = {"out": result.at[rows].set(out, mode="drop", unique_indices=True)}
    if call.states is not None:
        if call.num_kept_tokens is not None:
            # Of the two, XLA leaves out what is not used.
            _, _, last = advanced(call.num_kept_tokens)
        kept = jnp.where(slots_of(call)[1], slots, call.states.shape[0] + jnp.arange(call.num_seqs, dtype=jnp.int32))
        new = last.astype(call.states.dtype)
        found["states"] = call.states.at[kept].set(new, mode="drop", unique_indices=True)
    return found


def decay_between(gate: jax.Array) -> jax.Array:
    """Returns the decay from each token to each later one, `[heads, later, token, ...]`; 0 to earlier ones.

    Each is of a sum of its own. A difference of two sums from the chunk's start would have their rounding, which is
    many times its own for neighbours at the end of a chunk.

    Args:
        gate: logarithms of each token's decay, at most 0, `[heads, tokens, ...]`.
    """
    tokens = jnp.arange(gate.shape[1], dtype=jnp.int32)
    is_past = tokens[:, None] >= tokens[None]
    lower, after = is_past.astype(gate.dtype), (tokens[:, None] > tokens[None]).astype(gate.dtype)
    # Far below what an exponential is 0 of: -inf times 0 would be NaN.
    finite = jnp.maximum(gate, -1e4)
    sums = jnp.einsum("ts,si,hs...->hti...", lower, after, finite, precision="highest")
    return jnp.where(is_past.reshape(1, *is_past.shape, *[1] * (gate.ndim - 2)), jnp.exp(sums), 0)


def initial_states(
    call: GatedDeltaCall[jax.Array] | MambaChunkScanCall[jax.Array], shape: tuple[int, ...], wide: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Returns the state that each sequence starts from, and its slot."""
    slots, _, known = slots_of(call)
    if call.states is None:
        return jnp.zeros((call.num_seqs, *shape), wide), slots
    read = jnp.where(known, slots, call.states.shape[0] + jnp.arange(call.num_seqs, dtype=jnp.int32))
    return call.states.at[read].get(mode="fill", fill_value=0, unique_indices=True).astype(wide), slots


def slots_of(call: StateCall[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each sequence's slot, whether its new state is kept there, and whether it starts from the state there.

    Sequences without tokens do neither: they may share a slot with another one.
    """
    slots = jnp.arange(call.num_seqs, dtype=jnp.int32) if call.cache_indices is None else call.cache_indices
    lens = jnp.diff(call.query_start_loc)
    lasts = lens if call.num_kept_tokens is None else call.num_kept_tokens
    known = (slots >= 0) & (lens > 0)
    if call.has_initial_state is not None:
        known &= call.has_initial_state
    return slots, (slots >= 0) & (lasts > 0), known


def _advanced(
    call: GatedDeltaCall[jax.Array] | MambaChunkScanCall[jax.Array],
    size: int,
    prepare: Callable[[Chunks, jax.Array], tuple[jax.Array, ...]],
    advance: Callable[..., tuple[jax.Array, jax.Array]],
    first: jax.Array,
    lens: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes sequences through their first `lens` tokens; see `advance_in_chunks`.

    Returns:
        The rows of the tokens of each chunk, [chunks, size], past the end where there is none; the chunks' results,
        and the last state of each sequence.
    """
    num_tokens, num_seqs, starts = call.num_tokens, call.num_seqs, call.query_start_loc
    wide, is_short = first.dtype, call.max_query_len <= size
    if is_short:
        seqs, chunk = jnp.arange(num_seqs, dtype=jnp.int32), jnp.zeros(num_seqs, jnp.int32)
    else:
        counts = -(-lens // size)
        ends, places = jnp.cumsum(counts), jnp.arange(num_tokens // size + num_seqs, dtype=jnp.int32)
        # Places after the last chunk are of no sequence: number num_seqs.
        seqs = jnp.searchsorted(ends, places, side="right")
        chunk = places - (ends - counts).at[seqs].get(mode="clip")
    steps = chunk[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    is_token = (steps < lens.at[seqs].get(mode="clip")[:, None]) & (seqs < num_seqs)[:, None]
    beyond = num_tokens + jnp.arange(steps.size, dtype=jnp.int32).reshape(steps.shape)
    rows = jnp.where(is_token, starts.at[seqs].get(mode="clip")[:, None] + steps, beyond)

    def chunks(x: jax.Array) -> jax.Array:
        # Unique indices: the transpose is a write, never a sum whose order could vary.
        found = x.at[rows].get(mode="fill", fill_value=0, unique_indices=True).astype(wide)
        return jnp.moveaxis(found, 2, 1)

    each = prepare(chunks, is_token)
    if is_short:
        return rows, *jax.vmap(advance)(first, *each)
    return rows, *_in_order(advance, first, seqs, chunk == 0, each)


def _in_order(
    advance: Callable[..., tuple[jax.Array, jax.Array]],
    first: jax.Array,
    seqs: jax.Array,
    is_first: jax.Array,
    each: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of chunks that follow each other, and the last state of each sequence."""

    def step(carry: tuple[jax.Array, jax.Array], chunk: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state, last = carry
        seq, begins, *arrays = chunk
        state = jnp.where(begins, first.at[seq].get(mode="clip"), state)
        out, state = advance(state, *arrays)
        return (state, last.at[seq].set(state, mode="drop")), out

    (_, last), out = jax.lax.scan(step, (jnp.zeros_like(first[0]), first), (seqs, is_first, *each))
    return out, last
