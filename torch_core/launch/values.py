"""Checks of the numbers in index arrays, if the host can see them: lengths, offsets, block ids and slots.

Each call class names its own in `Call.check_values`; these are the checks that calls share.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from torch_core.base.errors import InvalidInput


def check_starts(
    name: str, start_loc: Any, num_rows: int, max_len: int | None = None, *, rows_in: str | None = None
) -> list[int]:
    """Returns the lengths between cumulative offsets into the rows of `rows_in`, "query" for "query_start_loc"."""
    starts = start_loc.tolist()
    if not starts or starts[0] != 0:
        raise InvalidInput(name, f"starts with {starts[:1]}", "it must hold num_seqs + 1 offsets from 0 on")
    lens = [end - start for start, end in pairwise(starts)]
    if lens and min(lens) < 0:
        first = next(seq for seq, length in enumerate(lens) if length < 0)
        problem = f"is {starts[first + 1]}, less than {starts[first]} before it"
        raise InvalidInput(f"{name}[{first + 1}]", problem, "offsets never fall")
    if starts[-1] > num_rows:
        rows_in = rows_in or name.partition("_")[0]
        raise InvalidInput(f"{name}[-1]", f"is {starts[-1]}", f"{rows_in} has only {num_rows} rows")
    if max_len is not None and lens and max(lens) > max_len:
        first = next(seq for seq, length in enumerate(lens) if length > max_len)
        text = f"sequence {first} has {lens[first]} rows in {name}; the stated maximum is {max_len}."
        raise InvalidInput(text, argument=name)
    return lens


def check_tables(
    block_tables: Any, seq_lens: Any, *, num_blocks: int, block_size: int, query_lens: list[int] | None
) -> None:
    """Checks lengths and the blocks that they reach.

    Args:
        block_tables: int32 `[num_seqs, max_blocks]`.
        seq_lens: int32 `[num_seqs]`.
        num_blocks: blocks of the cache.
        block_size: tokens of a block.
        query_lens: query rows of each sequence, which are part of its length; None if it may have more rows than
            keys, as in cross attention to a short input.
    """
    lens, max_blocks = seq_lens.tolist(), block_tables.shape[1]
    for seq, seq_len in enumerate(lens):
        if not 0 <= seq_len <= max_blocks * block_size:
            wanted = f"a row of block_tables holds 0 to {max_blocks} x {block_size} = {max_blocks * block_size} tokens"
            raise InvalidInput(f"seq_lens[{seq}]", value=seq_len, wanted=wanted)
        if query_lens is not None and query_lens[seq] > seq_len > 0:
            problem = f"is {seq_len} and the sequence has {query_lens[seq]} query rows"
            wanted = "the new tokens are part of it, so it cannot be less"
            raise InvalidInput(f"seq_lens[{seq}]", problem, wanted)
    if not lens or max(lens) == 0:
        return
    # As uint32 a negative id is large, so that one comparison finds both kinds of bad ones.
    tables = np.asarray(block_tables).view(np.uint32)[:, : -(-max(lens) // block_size)]
    bad = tables >= num_blocks
    if not bad.any():
        return
    for seq, seq_len in enumerate(lens):
        for column in np.flatnonzero(bad[seq, : -(-seq_len // block_size)]).tolist():
            problem = f"is {int(tables.view(np.int32)[seq, column])}"
            wanted = f"the cache has blocks 0 to {num_blocks - 1}"
            raise InvalidInput(f"block_tables[{seq}, {column}]", problem, wanted)


def check_slots(slot_mapping: Any, num_blocks: int, block_size: int) -> None:
    """Checks that no slot is past the end of a cache; negative ones write nothing."""
    slots = np.asarray(slot_mapping)
    limit = num_blocks * block_size
    if slots.size and slots.max() >= limit:
        first = int((slots >= limit).argmax())
        wanted = f"a cache of {num_blocks} blocks of {block_size} has slots 0 to {limit - 1}"
        raise InvalidInput(f"slot_mapping[{first}]", value=slots[first], wanted=wanted)
