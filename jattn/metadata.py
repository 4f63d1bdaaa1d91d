"""The device side of one step's attention metadata: a pytree of int32 arrays that every layer shares."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

__all__ = ["AttentionMetadata"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """What the attention ops of one step need to know about its batch.

    The sizes are padded: rows beyond the real sequences have `seq_lens` 0 and an empty query range, tokens beyond the
    real ones have slot -1. Nothing here is written by an op; the arrays may be reused by every layer.

    Attributes:
        block_tables: int32[num_seqs, max_blocks]; the blocks of each sequence in order. Entries past
            `ceil(seq_len / block_size)` may hold anything and are never followed.
        seq_lens: int32[num_seqs]; tokens of each sequence after this step's were written.
        query_start_loc: int32[num_seqs + 1]; running sum of the query lengths, starting with 0.
        slot_mapping: int32[num_tokens]; `block * block_size + offset` for each new token, -1 for padding.
        max_query_len: an upper bound on every query length; static, so part of the compiled shape.
    """

    block_tables: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array
    slot_mapping: jax.Array
    max_query_len: int = field(metadata={"static": True})
