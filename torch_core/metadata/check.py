"""Value checks of a step's metadata; each message names the first bad entry, the limit and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import PAD_SLOT_ID
from torch_core.metadata.common import CommonAttentionMetadata

SeqIds = Sequence[str | None] | None


def check_metadata(
    metadata: CommonAttentionMetadata,
    *,
    window_left: int | None = None,
    seq_ids: SeqIds = None,
    ref_counts: np.ndarray | None = None,
) -> None:
    """Checks everything that the arrays of a step promise, including that they agree with each other.

    The builder already makes the checks that keep a kernel inside its memory. This one recomputes the rest: use it in
    tests and debug runs, and on metadata that someone else built.

    Args:
        metadata: the record to check; not changed.
        window_left: as in `build_common_metadata`.
        seq_ids: names of the rows, for messages.
        ref_counts: int[num_blocks], holders of each block; written blocks must have exactly one.

    Raises:
        InvalidInput: the first thing that is wrong.

    Example:
        >>> from torch_core.metadata import SequenceRow, build_common_metadata
        >>> check_metadata(build_common_metadata([SequenceRow([1], 0, 3)], block_size=4, num_blocks=2))
    """
    _check_arrays(metadata)
    reqs = metadata.num_reqs
    check_query_start_loc(metadata.query_start_loc, metadata.num_actual_tokens, num_reqs=reqs, seq_ids=seq_ids)
    query_lens = metadata.query_lens[:reqs]
    _check_seq_lens(metadata.seq_lens, query_lens, reqs, seq_ids)
    _check_bound("max_query_len", metadata.max_query_len, query_lens)
    _check_bound("max_seq_len", metadata.max_seq_len, metadata.seq_lens)
    check_block_tables(
        metadata.block_tables[:reqs],
        metadata.seq_lens[:reqs],
        query_lens,
        block_size=metadata.block_size,
        num_blocks=metadata.num_blocks,
        window_left=window_left,
        seq_ids=lambda: seq_ids,
    )
    _check_tails(metadata, seq_ids)
    _check_slot_mapping(metadata, seq_ids)
    check_written_blocks(
        metadata.slot_mapping[: metadata.num_actual_tokens],
        query_lens,
        block_size=metadata.block_size,
        seq_ids=lambda: seq_ids,
    )
    _check_sharing(metadata, seq_ids, ref_counts)


def check_query_start_loc(
    query_start_loc: np.ndarray, num_tokens: int, *, num_reqs: int | None = None, seq_ids: SeqIds = None
) -> None:
    """Raises InvalidInput unless the sum starts at 0, grows in every real row and no other, and ends at num_tokens."""
    rows = query_start_loc.shape[0] - 1
    reqs = rows if num_reqs is None else num_reqs
    if rows < 0:
        raise InvalidInput("query_start_loc", "is empty", "it needs num_seqs + 1 entries, the first one 0")
    if query_start_loc[0] != 0:
        raise InvalidInput("query_start_loc[0]", value=query_start_loc[0], wanted="a running sum starts with 0")
    steps = np.diff(query_start_loc)
    if (index := first_true(steps < 0)) is not None:
        problem = f"is {query_start_loc[index + 1]} after {query_start_loc[index]}"
        wanted = f"it cannot decrease ({row_name(index, seq_ids)})"
        raise InvalidInput(f"query_start_loc[{index + 1}]", problem, wanted)
    if (index := first_true(steps[:reqs] == 0)) is not None:
        raise InvalidInput(
            f"query_start_loc[{index + 1}]",
            f"equals query_start_loc[{index}] ({query_start_loc[index]}): {row_name(index, seq_ids)} has no query. "
            "Leave it out of the step, or make it a padding row",
        )
    if (index := first_true(steps != 0, reqs)) is not None:
        sums = f"is {query_start_loc[index + 1]} after {query_start_loc[index]}"
        problem = f"{sums}, but row {index} is padding (num_reqs is {reqs})"
        raise InvalidInput(f"query_start_loc[{index + 1}]", problem, "padding rows repeat the last sum")
    if query_start_loc[-1] != num_tokens:
        wanted = f"it must equal the number of new tokens, {num_tokens}"
        raise InvalidInput(f"query_start_loc[{rows}]", value=query_start_loc[-1], wanted=wanted)


def _check_seq_lens(seq_lens: np.ndarray, query_lens: np.ndarray, num_reqs: int, seq_ids: SeqIds) -> None:
    live = seq_lens[:num_reqs]
    if (index := first_true(live < 1)) is not None:
        wanted = "a sequence in a step has at least 1 token"
        raise InvalidInput(f"seq_lens[{index}]", f"is {live[index]} for {row_name(index, seq_ids)}", wanted)
    if (index := first_true(query_lens > live)) is not None:
        problem = f"is {live[index]} but its query has {query_lens[index]} tokens ({row_name(index, seq_ids)})"
        wanted = "seq_lens counts the new tokens too"
        raise InvalidInput(f"seq_lens[{index}]", problem, wanted)
    if (index := first_true(seq_lens != 0, num_reqs)) is not None:
        raise InvalidInput(f"seq_lens[{index}]", f"is {seq_lens[index]}, but row {index} is padding and must be 0")


def check_block_tables(
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    query_lens: np.ndarray,
    *,
    block_size: int,
    num_blocks: int,
    window_left: int | None = None,
    seq_ids: Callable[[], SeqIds],
    tails_are_zero: bool = False,
) -> None:
    """Raises InvalidInput for a table that is too narrow, or ids outside the pool, or null where the step reads.

    Takes the real rows: int32[S, max_blocks] and int[S]. Blocks before the window of the first query may be null. With
    `tails_are_zero`, which the caller has seen to, a few reductions mostly suffice.
    """
    live = -(-seq_lens // block_size)
    width = block_tables.shape[1]
    if (row := first_true(live > width)) is not None:
        raise InvalidInput(
            f"seq_lens[{row}]",
            f"is {seq_lens[row]} ({live[row]} blocks of {block_size}) but block_tables has {width} columns "
            f"({row_name(row, seq_ids())})",
        )
    # Seen as unsigned, a negative id is larger than any pool.
    in_pool = tails_are_zero and block_tables.view(np.uint32).max(initial=0) < num_blocks
    if in_pool and np.count_nonzero(block_tables) == live.sum():
        return
    columns = np.arange(width, dtype=np.int32)
    used = columns < live[:, None]
    if not in_pool and (wrong := used & ((block_tables < 0) | (block_tables >= num_blocks))).any():
        row, column = np.argwhere(wrong)[0].tolist()
        value = int(block_tables[row, column])
        tail = f". -1 may appear only after column {live[row] - 1}" if value < 0 else ""
        wanted = (
            f"valid ids are 1..{num_blocks - 1} (pool of {num_blocks} blocks, 0 is the null block). "
            f"{row_name(row, seq_ids(), capital=True)} has {seq_lens[row]} tokens and needs {live[row]} blocks{tail}"
        )
        raise InvalidInput(f"block_tables[{row}, {column}]", f"is {value}", wanted)
    if window_left is not None:
        # The first query of each row reads from this block on.
        used &= columns >= (np.maximum(seq_lens - query_lens - window_left, 0) // block_size)[:, None]
    if (null := used & (block_tables == 0)).any():
        row, column = np.argwhere(null)[0].tolist()
        first, last = column * block_size, min((column + 1) * block_size, int(seq_lens[row])) - 1
        where = "visible" if window_left is None else "inside the window"
        problem = f"is the null block but tokens {first}..{last} are {where} ({row_name(row, seq_ids())})"
        raise InvalidInput(f"block_tables[{row}, {column}]", problem)


def check_written_blocks(
    slots: np.ndarray, query_lens: np.ndarray, *, block_size: int, seq_ids: Callable[[], SeqIds] | None = None
) -> None:
    """Raises InvalidInput for a slot of real tokens (int32[T], in row order) written twice, or a block by two rows."""
    # A quick test that may also suspect padding; suspected slots are checked one by one.
    if query_lens.shape[0] == 1:
        ordered = np.sort(slots)
        suspicious = ordered[1:] == ordered[:-1]
    elif query_lens.shape[0] == slots.shape[0]:
        # One token each: any block that is written twice is wrong.
        blocks = slots // block_size
        blocks.sort()
        suspicious = blocks[1:] == blocks[:-1]
    else:
        order = np.argsort(slots, kind="stable")
        ordered, owner = slots[order], np.repeat(np.arange(query_lens.shape[0]), query_lens)[order]
        blocks = ordered // block_size
        suspicious = (owner[1:] != owner[:-1]) | (ordered[1:] == ordered[:-1])
        suspicious &= blocks[1:] == blocks[:-1]
    if np.count_nonzero(suspicious):
        _explain_written_blocks(slots, query_lens, block_size, seq_ids() if seq_ids else None)


def _check_slot_mapping(metadata: CommonAttentionMetadata, seq_ids: SeqIds) -> None:
    tokens, block_size = metadata.num_actual_tokens, metadata.block_size
    slots = metadata.slot_mapping[:tokens]
    limit = metadata.num_blocks * block_size
    outside = (slots < PAD_SLOT_ID) | (slots >= limit) | ((slots >= 0) & (slots < block_size))
    if (token := first_true(outside)) is not None:
        wanted = (
            f"slots are {block_size}..{limit - 1} ({metadata.num_blocks} blocks of {block_size}, block 0 is never "
            f"written) or {PAD_SLOT_ID} for none"
        )
        raise InvalidInput(f"slot_mapping[{token}]", value=slots[token], wanted=wanted)
    if (token := first_true(metadata.slot_mapping != PAD_SLOT_ID, tokens)) is not None:
        problem = f"is {metadata.slot_mapping[token]}, but token {token} is padding (num_actual_tokens is {tokens})"
        wanted = f"it must be {PAD_SLOT_ID}"
        raise InvalidInput(f"slot_mapping[{token}]", problem, wanted)
    query_lens = metadata.query_lens[: metadata.num_reqs]
    row = np.repeat(np.arange(metadata.num_reqs), query_lens)
    computed = metadata.seq_lens[: metadata.num_reqs] - query_lens
    expected_position = np.arange(tokens) - metadata.query_start_loc[row] + computed[row]
    if (token := first_true(metadata.positions[:tokens] != expected_position)) is not None:
        wanted = f"query_start_loc and seq_lens say {expected_position[token]} ({row_name(int(row[token]), seq_ids)})"
        raise InvalidInput(f"positions[{token}]", value=metadata.positions[token], wanted=wanted)
    block = metadata.block_tables[row, expected_position // block_size]
    expected = block * block_size + expected_position % block_size
    if (token := first_true((slots != expected) & (slots != PAD_SLOT_ID))) is not None:
        raise InvalidInput(
            f"slot_mapping[{token}]",
            f"is {slots[token]}, but position {expected_position[token]} of {row_name(int(row[token]), seq_ids)} lies "
            f"in slot {expected[token]} (block {block[token]})",
        )


def first_true(flags: np.ndarray, start: int = 0) -> int | None:
    """Returns the index of the first flag from `start` on that is set, or None."""
    return start + int(np.argmax(flags[start:])) if flags[start:].any() else None


def row_name(index: int, seq_ids: SeqIds, *, capital: bool = False) -> str:
    """Returns how messages call a row: by its sequence id when there is one."""
    name = seq_ids[index] if seq_ids is not None else None
    word = "Sequence" if capital else "sequence"
    return f"{word} {index}" if name is None else f"{word} {name!r}"


def _check_arrays(metadata: CommonAttentionMetadata) -> None:
    shapes = {
        "query_start_loc": (metadata.num_seqs + 1,),
        "seq_lens": (metadata.num_seqs,),
        "block_tables": (metadata.num_seqs, metadata.block_tables.shape[-1]),
        "slot_mapping": (metadata.num_tokens,),
        "positions": (metadata.num_tokens,),
    }
    for name, shape in shapes.items():
        value = getattr(metadata, name)
        if value.dtype != np.int32:
            raise InvalidInput(name, f"has dtype {value.dtype}", f"int32 is required. Use {name}.astype(np.int32)")
        if value.shape != shape:
            raise InvalidInput(name, f"has shape {value.shape}", f"{shape} is required")
    if metadata.num_reqs > metadata.num_seqs or metadata.num_actual_tokens > metadata.num_tokens:
        rows = f"{metadata.num_reqs} of {metadata.num_seqs} rows"
        tokens = f"num_actual_tokens is {metadata.num_actual_tokens} of {metadata.num_tokens} tokens"
        raise InvalidInput("num_reqs", f"is {rows} and {tokens}", "the arrays must hold them all")


def _check_bound(name: str, bound: int, lengths: np.ndarray) -> None:
    if lengths.size and lengths.max() > bound:
        index = int(np.argmax(lengths))
        raise InvalidInput(name, f"is {bound}, but row {index} has {lengths[index]} tokens")


def _check_tails(metadata: CommonAttentionMetadata, seq_ids: SeqIds) -> None:
    live = -(-metadata.seq_lens // metadata.block_size)
    stale = (np.arange(metadata.block_tables.shape[1]) >= live[:, None]) & (metadata.block_tables != 0)
    if stale.any():
        row, column = np.argwhere(stale)[0].tolist()
        who = row_name(row, seq_ids) if row < metadata.num_reqs else f"padding row {row}"
        problem = f"is {metadata.block_tables[row, column]}, beyond the {live[row]} blocks of {who}"
        wanted = "the builder leaves 0 there. The buffer still holds an older step"
        raise InvalidInput(f"block_tables[{row}, {column}]", problem, wanted)


def _check_sharing(metadata: CommonAttentionMetadata, seq_ids: SeqIds, ref_counts: np.ndarray | None) -> None:
    reqs = metadata.num_reqs
    slots = metadata.slot_mapping[: metadata.num_actual_tokens]
    row = np.repeat(np.arange(reqs), metadata.query_lens[:reqs])
    written = slots != PAD_SLOT_ID
    blocks = slots[written] // metadata.block_size
    if ref_counts is not None:
        counts = np.asarray(ref_counts)[blocks]
        if (index := first_true(counts != 1)) is not None:
            token = int(np.flatnonzero(written)[index])
            problem = f"is {slots[token]} in block {blocks[index]}, which has {counts[index]} holders"
            writer = row_name(int(row[token]), seq_ids)
            raise InvalidInput(f"slot_mapping[{token}]", f"{problem} ({writer} writes it)", "copy the block first")
    owner = np.full(metadata.num_blocks, -1)
    owner[blocks] = row[written]
    tables = metadata.block_tables[:reqs]
    holder = owner[tables]
    shared = (holder >= 0) & (holder != np.arange(reqs)[:, None])
    if shared.any():
        other, column = np.argwhere(shared)[0].tolist()
        writes, reads = row_name(int(holder[other, column]), seq_ids), row_name(other, seq_ids)
        problem = f"is block {tables[other, column]}, which {writes} writes and {reads} reads in one step"
        raise InvalidInput(f"block_tables[{other}, {column}]", problem, "copy the block first")
    ordered = np.sort(tables, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != 0)
    if twice.any():
        index, column = np.argwhere(twice)[0].tolist()
        problem = f"holds block {ordered[index, column]} twice ({row_name(index, seq_ids)})"
        raise InvalidInput(f"block_tables[{index}]", problem, "a sequence has each block once")


def _explain_written_blocks(slots: np.ndarray, query_lens: np.ndarray, block_size: int, seq_ids: SeqIds) -> None:
    owner = np.repeat(np.arange(query_lens.shape[0]), query_lens).tolist()
    seen: dict[int, int] = {}
    writer: dict[int, int] = {}
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block = slot // block_size
        first = writer.setdefault(block, owner[token])
        if first != owner[token]:
            both = f"{row_name(first, seq_ids)} and {row_name(owner[token], seq_ids)}"
            problem = f"is in block {block}, which {both} would write in one step"
            raise InvalidInput(f"slot_mapping[{token}]", problem, "copy the tail before a fork writes it")
        if slot in seen:
            problem = f"and slot_mapping[{token}] are both {slot} ({row_name(owner[token], seq_ids)})"
            raise InvalidInput(f"slot_mapping[{seen[slot]}]", problem, f"its table holds block {block} twice")
        seen[slot] = token
