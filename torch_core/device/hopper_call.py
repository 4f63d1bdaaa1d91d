"""Operands and sizes of a call, which all warps of a Hopper prefill kernel need; each is passed as one record.

The language's own tuples have `values` and a `type`: no field can have these names.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """The sequences of a batch: their rows, lengths and tables."""

    query_start_loc: Any  # First query row of each sequence, and the end of the last one.
    seq_lens: Any  # Keys of each sequence, of a paged cache.
    key_start_loc: Any  # First row of each sequence's keys and the end of the last one, of dense keys.
    num_seqs: Any  # Sequences, padding included.
    block_tables: Any  # Blocks of each sequence, of a paged cache.
    table_stride: Any  # Elements from one row of block_tables to the next.
    table_tokens: Any  # Keys that a row of block_tables can hold.


class Split(NamedTuple):
    """The chunks of keys of a paged call that are work items of their own, counted from key 0 of each sequence."""

    chunk: Any  # Keys of a chunk, a multiple of a tile's.
    max_chunks: Any  # Chunks that one sequence can have.
    max_query: Any  # Query tokens that one sequence can have.
    # out, maximum, total: each chunk's partial result of a row for `attention_combine_kernel`, see attention.partials.
    out: Any
    maximum: Any
    total: Any


class Call(NamedTuple):
    """The operands of a call."""

    query: Any  # query, key_cache, value_cache: the arrays that the copy engine reads.
    key_cache: Any
    value_cache: Any
    query_rest: Any  # query_rest, key_rest: the same arrays for the REST_SIZE last elements of a head, or None.
    key_rest: Any
    scale: Any  # Factor of the scores.
    bounds: Any  # Which keys a row sees.
    output: Any  # Where finished rows go, a hopper_rows.Output.
    batch: Any  # Where the sequences stand.
    num_items: Any  # Work items of all programs.
    split: Any  # How keys are split over work items, a hopper_call.Split; None where they are not.


class Shape(NamedTuple):
    """Sizes and strides of a call, known when compiling; rows and columns are those that the copy engine sees."""

    NUM_HEADS: Any  # Query heads.
    GROUP: Any  # Query heads of one key/value head.
    PACK: Any  # Query heads that lie side by side in a tile.
    HEADS_TOGETHER: Any  # Heads, in units of PACK, that are worked on side by side.
    HEAD_SIZE: Any  # Elements of a value, and of the part of a query or key head that is copied first.
    REST_SIZE: Any  # Elements of a query or key head after these: sides of a tile are powers of two.
    WARPGROUPS: Any  # Warpgroups of 64 rows that multiply.
    PING_PONG: Any  # Warpgroups multiply in turns.
    BLOCK_N: Any  # Keys of a tile.
    MIN_QUERY: Any  # Query tokens from which on a sequence is served.
    PAGED: Any  # Keys lie in blocks.
    BLOCK_SIZE: Any  # Keys of a block.
    BLOCK_ROWS: Any  # Rows from one block to the next.
    BOX: Any  # Keys of one copy.
    QUERY_STRIDE: Any  # QUERY_STRIDE, KEY_STRIDE, VALUE_STRIDE: columns from one head to the next.
    KEY_STRIDE: Any
    VALUE_STRIDE: Any
    VALUE_ROW: Any  # Row of the first value in a combined cache.
    OUT_STRIDES: Any  # Elements from one token, and from one head, of the output to the next.
