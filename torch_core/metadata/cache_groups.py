"""The tables and slots of further cache groups of a step, in one packed buffer with those of the first group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_core.base.errors import InvalidInput
from torch_core.metadata.check import check_written_blocks
from torch_core.metadata.common import CommonAttentionMetadata
from torch_core.metadata.rows import RowColumns, SequenceRowLike
from torch_core.metadata.slots import write_slots
from torch_core.metadata.tables import BlockTableCache, write_checked_tables


def group_fields(cache_group: int) -> tuple[str, str]:
    """Returns the names of a cache group's block tables and slots in a packed buffer; the first's are the plain ones.

    Example:
        >>> group_fields(0), group_fields(2)
        (('block_tables', 'slot_mapping'), ('block_tables 2', 'slot_mapping 2'))
    """
    suffix = f" {cache_group}" if cache_group else ""
    return f"block_tables{suffix}", f"slot_mapping{suffix}"


def group_layout(
    num_groups: int, *, num_seqs: int, num_tokens: int, max_blocks: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the `extra` of `metadata_layout` that gives room for the groups after the first one.

    Args:
        num_groups: cache groups, the first included.
        num_seqs, num_tokens, max_blocks: padded sizes of the step.
    """
    return [
        entry
        for group in range(1, num_groups)
        for entry in zip(group_fields(group), ((num_seqs, max_blocks), (num_tokens,)), strict=True)
    ]


def build_group_metadata(
    first: CommonAttentionMetadata,
    rows: Sequence[SequenceRowLike],
    *,
    cache_group: int,
    block_size: int | None = None,
    window_left: int | None = None,
    table_cache: BlockTableCache | None = None,
) -> CommonAttentionMetadata:
    """Writes another cache group's tables and slots into a step's buffer; returns the step's record for that group.

    Args:
        first: the step's record, of `build_common_metadata` with a layout that has the fields of `group_layout`.
        rows: those that it was built from.
        cache_group: index into the rows' `group_block_ids`, at least 1.
        block_size: tokens of a block of the group; None for those of the first group.
        window_left: keys before its own position that a query of the group sees: blocks wholly before may be the null
            block. None demands real blocks throughout.
        table_cache: table cache of this group; see `build_common_metadata`.

    Raises:
        InvalidInput: a value is wrong, as in `build_common_metadata`, or the layout has no room for the group. Nothing
            was changed but the buffer.

    Example:
        >>> from typing import NamedTuple
        >>> class Row(NamedTuple):
        ...     block_ids: tuple; num_computed_tokens: int; num_new_tokens: int; group_block_ids: tuple
        >>> from torch_core.metadata import build_common_metadata, metadata_layout
        >>> sizes = {"num_seqs": 1, "num_tokens": 2, "max_blocks": 3}
        >>> layout = metadata_layout(**sizes, extra=group_layout(2, **sizes))
        >>> rows = [Row((5, 2, 7), 8, 1, ((5, 2, 7), (0, 6, 3)))]
        >>> step = build_common_metadata(rows, block_size=4, num_blocks=9, layout=layout, **sizes)
        >>> local = build_group_metadata(step, rows, cache_group=1, window_left=3)
        >>> local.block_tables.tolist(), local.slot_mapping.tolist(), step.slot_mapping.tolist()
        ([[0, 6, 3]], [12, -1], [28, -1])
    """
    if first.layout is None or first.packed is None:
        raise InvalidInput("first", "has no layout: its arrays were given apart. Make it with build_common_metadata")
    columns, num_reqs = RowColumns(rows), first.num_reqs
    block_size = first.block_size if block_size is None else block_size
    tables, slots = (first.layout[name].of(first.packed) for name in group_fields(cache_group))
    totals, new, num_new = first.seq_lens[:num_reqs], first.query_lens[:num_reqs], first.num_actual_tokens
    write_checked_tables(
        columns.tables(cache_group),
        tables,
        totals,
        new,
        block_size=block_size,
        num_blocks=first.num_blocks,
        seq_ids=columns.seq_ids,
        window_left=window_left,
        table_cache=table_cache,
    )
    write_slots(slots, first.query_start_loc[: num_reqs + 1], totals - new, tables, block_size=block_size)
    if num_new > 1:
        check_written_blocks(slots[:num_new], new, block_size=block_size, seq_ids=columns.seq_ids)
    for view in (tables, slots):
        view.setflags(write=False)
    return replace(first, block_size=block_size, block_tables=tables, slot_mapping=slots, cache_group=cache_group)
