"""Builds the host record of a step from its rows: one pass, vectorised, checked before anything is uploaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from torch_core.base.checks import INT32_MAX
from torch_core.base.errors import InvalidInput, RequestTooLong
from torch_core.base.specs import PAD_SLOT_ID
from torch_core.metadata.check import check_written_blocks, row_name
from torch_core.metadata.common import CommonAttentionMetadata
from torch_core.metadata.encoder import EncoderRow, build_encoder_metadata, check_encoder_rows, encoder_layout
from torch_core.metadata.layout import PackedLayout, metadata_layout
from torch_core.metadata.rows import RowColumns, SequenceRowLike, lengths_of
from torch_core.metadata.slots import state_layout, write_slots, write_state_slots
from torch_core.metadata.tables import BlockTableCache, write_checked_tables

_ARRAYS = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping", "positions")


def build_common_metadata(
    rows: Sequence[SequenceRowLike],
    *,
    block_size: int,
    num_blocks: int,
    num_seqs: int | None = None,
    num_tokens: int | None = None,
    max_blocks: int | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    causal: bool = True,
    window_left: int | None = None,
    cache_group: int | None = None,
    table_cache: BlockTableCache | None = None,
    encoder_rows: Sequence[EncoderRow] | None = None,
    num_slots: int | None = None,
    layout: PackedLayout | None = None,
    buffer: np.ndarray | None = None,
) -> CommonAttentionMetadata:
    """Returns the metadata of one step.

    Every value that a kernel would follow is checked here: the block ids that are in use, the width of the table, the
    lengths, the padded sizes, and that no two sequences write one block. `check_metadata` checks the rest.

    Args:
        rows: one row per sequence; new tokens are laid out in this order. Not changed, not kept.
        block_size: tokens of one block.
        num_blocks: blocks of the pool, the null block (0) included.
        num_seqs: padded number of rows; None for none.
        num_tokens: padded number of new tokens; None for none.
        max_blocks: columns of the block tables; None for just enough.
        max_query_len: a bound to record instead of the largest query length; a static size of compiled programs.
        max_seq_len: likewise for the sequence lengths.
        causal: whether a query sees no key after itself; recorded in the result.
        window_left: keys before its own position that a query still sees, when *every* layer has a window: blocks
            that are wholly before it may be the null block. None demands real blocks throughout.
        cache_group: index into the rows' `group_block_ids`, for allocators with several groups of layers; None reads
            `block_ids`. `build_group_metadata` adds the other groups of the step.
        table_cache: remembers the tables' int32 form between steps; for rows with a `seq_id` and tuples of ids. One
            for each cache group.
        encoder_rows: the encoder tokens of each row, for cross attention; a given `layout` needs the fields of
            `encoder_layout`, and the encoder's cache has the same block size and pool.
        num_slots: state slots of the pool, for layers with a recurrent state: the `state_slot` of each row is recorded;
            a given `layout` needs the field of `state_layout`. None for a model without such layers.
        layout: layout of the arrays, from `metadata_layout` with these padded sizes (perhaps with extra fields);
            None makes one.
        buffer: the int32 buffer to write; None makes a new one. The record is valid until the buffer is written
            again: never pass one whose copy to the device may still be running (see `StepBuffers`). Extra fields are
            left as they are.

    Raises:
        InvalidInput: a value is wrong; the message names it. Only the buffer was changed.
        RequestTooLong: the step does not fit in the padded sizes.

    Example:
        >>> from torch_core.metadata import SequenceRow, build_common_metadata
        >>> rows = [SequenceRow([5, 2], 0, 6), SequenceRow([9], 3, 1)]
        >>> step = build_common_metadata(rows, block_size=4, num_blocks=16, num_seqs=4, num_tokens=8)
        >>> step.query_start_loc.tolist(), step.seq_lens.tolist()
        ([0, 6, 7, 7, 7], [6, 4, 0, 0])
        >>> step.slot_mapping.tolist()
        [20, 21, 22, 23, 8, 9, 39, -1]
    """
    columns = RowColumns(rows)
    num_reqs = columns.num_rows
    _check_ints(block_size=block_size, num_blocks=num_blocks, num_seqs=num_seqs, num_tokens=num_tokens)
    _check_ints(max_blocks=max_blocks, max_query_len=max_query_len, max_seq_len=max_seq_len, num_slots=num_slots)
    _check_pool(block_size, num_blocks)
    computed, new, totals, num_new, longest_query, longest, uniform = lengths_of(columns)
    live = -(-totals // block_size)
    widest = -(-longest // block_size)

    if num_seqs is None or num_seqs < num_reqs:
        num_seqs = _padded("num_seqs", num_seqs, num_reqs, "rows")
    if num_tokens is None or num_tokens < num_new:
        num_tokens = _padded("num_tokens", num_tokens, num_new, "new tokens")
    if max_blocks is not None and max_blocks < widest:
        index = int(np.argmax(live > max_blocks))
        raise RequestTooLong(
            f"seq_lens[{index}]",
            f"is {totals[index]} ({live[index]} blocks of {block_size}) but block_tables has {max_blocks} columns "
            f"(max_blocks) for {row_name(index, columns.seq_ids())}. Widen the table or end the sequence",
        )
    width = widest if max_blocks is None else max_blocks
    if max_query_len is None or max_query_len < longest_query:
        max_query_len = _padded("max_query_len", max_query_len, longest_query, "new tokens in its longest row")
    if max_seq_len is None or max_seq_len < longest:
        max_seq_len = _padded("max_seq_len", max_seq_len, longest, "tokens in its longest sequence")

    if encoder_rows is not None:
        check_encoder_rows(encoder_rows)
    if layout is None:
        extra = [] if encoder_rows is None else _encoder_extra(encoder_rows, num_seqs, block_size)
        extra += [] if num_slots is None else state_layout(num_seqs)
        layout = metadata_layout(num_seqs=num_seqs, num_tokens=num_tokens, max_blocks=width, extra=extra)
    if buffer is None:
        buffer = np.zeros(layout.num_elements, np.int32)
    else:
        layout.check_buffer(buffer)
    query_start_loc, seq_lens, tables, slot_mapping, positions = views = layout.views(buffer, _ARRAYS)
    if (seq_lens.size, slot_mapping.size, tables.shape[1]) != (num_seqs, num_tokens, width):
        problem = f"is for {seq_lens.size} sequences, {slot_mapping.size} tokens and {tables.shape[1]} blocks"
        padded = f"the step is padded to {num_seqs}, {num_tokens} and {width}"
        raise InvalidInput("layout", problem, f"{padded}. Pass its sizes as num_seqs, num_tokens and max_blocks")

    if uniform:
        query_start_loc[: num_reqs + 1] = _multiples(uniform, num_reqs + 1)
    else:
        query_start_loc[0] = 0
        query_start_loc[1 : num_reqs + 1] = np.cumsum(new)
    seq_lens[:num_reqs] = totals
    if num_seqs > num_reqs:
        query_start_loc[num_reqs + 1 :] = num_new
        seq_lens[num_reqs:] = 0
    write_checked_tables(
        columns.tables(cache_group),
        tables,
        totals,
        new,
        block_size=block_size,
        num_blocks=num_blocks,
        seq_ids=columns.seq_ids,
        window_left=window_left,
        table_cache=table_cache,
    )

    if uniform:
        _write_uniform_slots(slot_mapping, positions, computed, uniform, tables, block_size=block_size)
    else:
        starts = query_start_loc[: num_reqs + 1]
        positions[:num_new] = write_slots(slot_mapping, starts, computed, tables, block_size=block_size)
        positions[num_new:] = 0
    if num_new > 1:
        check_written_blocks(slot_mapping[:num_new], new, block_size=block_size, seq_ids=columns.seq_ids)

    encoder = None
    if encoder_rows is not None:
        encoder = build_encoder_metadata(
            encoder_rows,
            layout=layout,
            buffer=buffer,
            block_size=block_size,
            num_blocks=num_blocks,
            seq_ids=columns.seq_ids(),
        )
    state_slots = None
    if num_slots is not None:
        state_slots = layout["state_slots"].of(buffer)
        write_state_slots(columns, state_slots, num_slots)
        state_slots.setflags(write=False)
    for view in views:
        view.setflags(write=False)
    return CommonAttentionMetadata(
        **dict(zip(_ARRAYS, views, strict=True)),
        num_reqs=num_reqs,
        num_actual_tokens=num_new,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        block_size=block_size,
        num_blocks=num_blocks,
        cache_group=cache_group or 0,
        causal=causal,
        encoder=encoder,
        state_slots=state_slots,
        packed=buffer,
        layout=layout,
    )


def _write_uniform_slots(
    out: np.ndarray,
    positions: np.ndarray,
    computed: np.ndarray,
    num_new_tokens: int,
    block_tables: np.ndarray,
    *,
    block_size: int,
) -> None:
    """Writes positions and slots (int32[T]) of rows with equally many new tokens, and padding; the short way to decode.

    `computed`, int32[S], are the tokens of each row before the step; the tables are contiguous.
    """
    num_rows, width = computed.shape[0], block_tables.shape[1]
    if num_rows == num_new_tokens == 1:
        # One token of one row, as most steps of a lone user are: arrays cost more than the arithmetic.
        position = int(computed[0])
        column, offset = divmod(position, block_size)
        positions[0], out[0] = position, int(block_tables[0, column]) * block_size + offset
        positions[1:], out[1:] = 0, PAD_SLOT_ID
        return
    first_entry, where = _multiples(width, num_rows), computed
    if num_new_tokens > 1:
        where = (computed[:, None] + np.arange(num_new_tokens, dtype=np.int32)).reshape(-1)
        first_entry = first_entry.repeat(num_new_tokens)
    column = where // block_size
    slots = block_tables.reshape(-1)[first_entry + column]
    # block * size + (position - column * size)
    slots -= column
    slots *= block_size
    num_new = where.shape[0]
    np.add(slots, where, out=out[:num_new])
    positions[:num_new] = where
    if num_new < out.shape[0]:
        positions[num_new:] = 0
        out[num_new:] = PAD_SLOT_ID


@lru_cache(maxsize=64)
def _multiples(step: int, count: int) -> np.ndarray:
    """Returns int64[count], read-only: 0, step, 2 * step and so on; the same array for the same sizes."""
    values = np.arange(count) * step
    values.setflags(write=False)
    return values


def _check_ints(**sizes: int | None) -> None:
    # numpy's integers serve as well; a float would be recorded as it is, and end in an error of numpy's or XLA's.
    for name, size in sizes.items():
        if size is not None and not isinstance(size, (int, np.integer)):
            or_none = "" if name in ("block_size", "num_blocks") else ", or None"
            raise InvalidInput(name, value=size, wanted=f"it must be an int{or_none}")


def _check_pool(block_size: int, num_blocks: int) -> None:
    if block_size < 1:
        raise InvalidInput("block_size", value=block_size, wanted="it must be at least 1")
    if num_blocks < 2:
        wanted = "it must be at least 2, since block 0 is the null block"
        raise InvalidInput("num_blocks", value=num_blocks, wanted=wanted)
    if num_blocks * block_size > INT32_MAX:
        wanted = f"int32 slots allow at most {INT32_MAX}"
        raise InvalidInput("num_blocks", f"* block_size is {num_blocks * block_size}", wanted)


def _padded(name: str, size: int | None, needed: int, what: str) -> int:
    if size is None:
        return needed
    if size < needed:
        raise RequestTooLong(name, f"is {size}, but the step has {needed} {what}. Pad to a larger bucket")
    return size


def _encoder_extra(rows: Sequence[EncoderRow], num_seqs: int, block_size: int) -> list[tuple[str, tuple]]:
    widest = max((-(-row.num_tokens // block_size) for row in rows), default=0)
    num_new = sum(row.num_new_tokens for row in rows)
    return encoder_layout(num_seqs=num_seqs, num_encoder_tokens=max(num_new, 0), max_encoder_blocks=max(widest, 0))
