"""Cascade attention on JAX arrays: a prefix that all sequences share is attended once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jattn.bridge.calls import register_call
from jattn.metadata import PrefixGroups
from jattn.ops.run import run
from torch_core.attention import cascade
from torch_core.attention.call import PagedCall
from torch_core.attention.cascade import SharedPrefix


def attend_groups(
    call: PagedCall[jax.Array], groups: PrefixGroups | None, implementation: str | None
) -> dict[str, jax.Array]:
    """Runs a call; prefixes that its sequences share are attended once, if the call's mask and bits allow it."""
    # Pieces count sequences, as a step of one new token each has tokens.
    if groups is None or call.sees_distances or call.batch_invariant or call.max_query_len > 1:
        return run(call, implementation)
    tables, lens, starts = jnp.asarray(call.block_tables), groups.prefix_lens, groups.piece_starts
    first = jnp.minimum(starts[:-1], lens.size - 1)
    columns = jnp.arange(tables.shape[1], dtype=jnp.int32) + (lens // call.block_size)[:, None]
    prefix = SharedPrefix(
        prefix_block_table=tables[first],
        # A piece without sequences would read the last one's prefix without need.
        prefix_kv_lens=jnp.where(starts[1:] > starts[:-1], lens[first], 0),
        cu_prefix_query_lens=starts,
        suffix_block_table=jnp.take_along_axis(tables, jnp.minimum(columns, tables.shape[1] - 1), 1),
        suffix_kv_lens=(call.seq_lens - lens).clip(min=0),
        max_prefix_query_len=groups.piece_tokens,
    )
    return cascade_attention(call, prefix, implementation)


def shared_prefix(call: PagedCall[jax.Array], common_prefix_len: int, *, piece_tokens: int) -> SharedPrefix[jax.Array]:
    """Splits the sequences of a call at a prefix that all of them share, for `cascade_attention`.

    Args:
        call: call of the whole sequences, every query after the prefix.
        common_prefix_len: static; tokens of the prefix in whole blocks, from
            `torch_core.metadata.common_prefix_length`. It is not checked, because tables are on the device: the first
            sequence's blocks are attended for all.
        piece_tokens: static; queries that attend to the prefix as one sequence, from
            `torch_core.metadata.prefix_piece_tokens`.
    """
    return cascade.shared_prefix(
        jnp.asarray(call.block_tables),
        jnp.asarray(call.seq_lens),
        jnp.asarray(call.query_start_loc),
        num_tokens=call.num_tokens,
        block_size=call.block_size,
        common_prefix_len=common_prefix_len,
        piece_tokens=piece_tokens,
        library=jnp,
    )


def cascade_attention(
    call: PagedCall[jax.Array], prefix: SharedPrefix[jax.Array], implementation: str | None = None
) -> dict[str, jax.Array]:
    """Computes the result of `run(call)`, within rounding, but reads a shared prefix once for all sequences.

    That pays for many sequences with a long prefix: `torch_core.metadata.use_cascade_attention` says when.

    Args:
        call: call of the whole sequences; no window, chunk, ALiBi or bidirectional range.
        prefix: the same sequences, split by `shared_prefix`.
        implementation: "triton", "torch", "xla", or None for the fastest that serves the call.

    Returns:
        `out`, and `lse` if the call wants it; see `paged_attention`.

    Raises:
        InvalidInput: the call or the prefix is inconsistent.
        Unsupported: the implementation cannot run here, or the mask depends on the distance to the prefix.
    """
    return cascade.cascade_attention(call, prefix, functools.partial(run, implementation=implementation))


register_call(SharedPrefix)
