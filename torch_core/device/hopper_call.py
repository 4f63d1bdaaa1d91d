"""Operands and sizes of a call, which all warps of a Hopper prefill kernel need; each is passed as one record.

The language's own tuples have `values` and a `type`: no field can have these names.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """The sequences of a batch: their rows, lengths and tables.

    Attributes:
        query_start_loc: first query row of each sequence, and the end of the last one.
        seq_lens: keys of each sequence, of a paged cache.
        key_start_loc: first row of each sequence's keys and the end of the last one, of dense keys.
        num_seqs: sequences, padding included.
        block_tables: blocks of each sequence, of a paged cache.
        table_stride: elements from one row of it to the next.
        table_tokens: keys that a row of it can hold.
    """

    query_start_loc: Any
    seq_lens: Any
    key_start_loc: Any
    num_seqs: Any
    block_tables: Any
    table_stride: Any
    table_tokens: Any


class Split(NamedTuple):
    """The chunks of keys of a paged call that are work items of their own, counted from key 0 of each sequence.

    Attributes:
        chunk: keys of a chunk, a multiple of a tile's.
        max_chunks: chunks that one sequence can have.
        max_query: query tokens that one sequence can have.
        out, maximum, total: each chunk's partial result of a row for `attention_combine_kernel`, see
            attention.partials.
    """

    chunk: Any
    max_chunks: Any
    max_query: Any
    out: Any
    maximum: Any
    total: Any


class Call(NamedTuple):
    """The operands of a call.

    Attributes:
        query, key_cache, value_cache: the arrays that the copy engine reads.
        query_rest, key_rest: the same arrays, for the REST_SIZE last elements of a head; None without them.
        scale: of the scores.
        bounds: which keys a row sees.
        output: where finished rows go, a hopper_rows.Output.
        batch: where the sequences stand.
        num_items: work items of all programs.
        split: how keys are split over work items, a hopper_call.Split; None where they are not.
    """

    query: Any
    key_cache: Any
    value_cache: Any
    query_rest: Any
    key_rest: Any
    scale: Any
    bounds: Any
    output: Any
    batch: Any
    num_items: Any
    split: Any


class Shape(NamedTuple):
    """Sizes and strides of a call, known when compiling; rows and columns are those that the copy engine sees.

    Attributes:
        NUM_HEADS, GROUP: query heads; those of one key/value head.
        PACK: query heads that lie side by side in a tile.
        HEADS_TOGETHER: heads, in units of PACK, that are worked on side by side.
        HEAD_SIZE: elements of a value, and of the part of a query or key head that is copied first.
        REST_SIZE: elements of a query or key head after these: sides of a tile are powers of two.
        WARPGROUPS: warpgroups of 64 rows that multiply.
        PING_PONG: they do so in turns.
        BLOCK_N: keys of a tile.
        MIN_QUERY: query tokens from which on a sequence is served.
        PAGED: keys lie in blocks.
        BLOCK_SIZE, BLOCK_ROWS: keys of a block; rows from one block to the next.
        BOX: keys of one copy.
        QUERY_STRIDE, KEY_STRIDE, VALUE_STRIDE: columns from one head to the next.
        VALUE_ROW: row of the first value in a combined cache.
        OUT_STRIDES: elements from one token, and from one head, of the output to the next.
    """

    NUM_HEADS: Any
    GROUP: Any
    PACK: Any
    HEADS_TOGETHER: Any
    HEAD_SIZE: Any
    REST_SIZE: Any
    WARPGROUPS: Any
    PING_PONG: Any
    BLOCK_N: Any
    MIN_QUERY: Any
    PAGED: Any
    BLOCK_SIZE: Any
    BLOCK_ROWS: Any
    BOX: Any
    QUERY_STRIDE: Any
    KEY_STRIDE: Any
    VALUE_STRIDE: Any
    VALUE_ROW: Any
    OUT_STRIDES: Any
