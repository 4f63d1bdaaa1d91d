"""Moving a sequence's blocks to host memory and back: the allocator's side; somebody else executes the copies."""

from __future__ import annotations

from torch_core.cache.config import NULL_BLOCK
from torch_core.cache.records import BlockSwap, CommittedStep
from torch_core.cache.state import CacheState
from torch_core.cache.stepping import deferred_hint
from torch_core.cache.table import SequenceState, SequenceTable, SwappedTable
from torch_core.errors import OutOfBlocks

__all__ = ["swap_in", "swap_out"]


def swap_out(state: CacheState, sequence: SequenceState, table: SequenceTable) -> CommittedStep:
    """Gives a sequence host slots for its blocks; see `CacheManager.swap_out`."""
    needed = sum(block != NULL_BLOCK for blocks in table.blocks for block in blocks)
    if needed > len(state.host_free):
        raise OutOfBlocks(
            f"swapping out sequence {sequence.seq_id!r} needs {needed} host blocks; {len(state.host_free)} of "
            f"{state.config.num_host_blocks} are free. Preempt it instead, or swap another one in.",
            needed=needed,
            free=len(state.host_free),
        )
    step_id, record = state.open_step()
    swaps: list[BlockSwap] = []
    slots: list[list[int | None]] = []
    for number, blocks in enumerate(table.blocks):
        column: list[int | None] = []
        for block in blocks:
            slot = None if block == NULL_BLOCK else state.host_free.pop()
            column.append(slot)
            if slot is not None:
                swaps.append(BlockSwap(block, slot, True, number))
        slots.append(column)
    sequence.swapped = SwappedTable(slots, table.scheduled, table.retired, table.dropped.copy(), step_id)
    sequence.table = None
    table.leave()
    table.last_step = step_id
    record.leaving.append(table)
    state.counters["swapped_out"] += len(swaps)
    state.version += 1
    return CommittedStep(step_id=step_id, swaps=tuple(swaps), blocks_to_scrub=state.pool.take_dirty())


def swap_in(state: CacheState, sequence: SequenceState, swapped: SwappedTable) -> CommittedStep:
    """Gives a swapped-out sequence blocks again; see `CacheManager.swap_in`."""
    pool = state.pool
    needed = sum(slot is not None for column in swapped.slots for slot in column)
    if needed > pool.num_available:
        text = f"swapping in sequence {sequence.seq_id!r} needs {needed} blocks"
        raise pool.out_of_blocks(text, needed, f".{deferred_hint(state)}")
    fresh = iter(pool.take(needed))
    blocks = [[NULL_BLOCK if slot is None else next(fresh) for slot in column] for column in swapped.slots]
    swaps = tuple(
        BlockSwap(block, slot, False, number)
        for number, column in enumerate(swapped.slots)
        for block, slot in zip(blocks[number], column, strict=True)
        if slot is not None
    )
    table = SequenceTable(sequence, blocks, swapped.scheduled)
    table.retired = swapped.retired
    table.dropped = swapped.dropped.copy()
    table.published = swapped.dropped.copy()
    table.limit = min(len(column) * group.block_size for column, group in zip(blocks, state.groups, strict=True))
    step_id, record = state.open_step()
    table.last_step = step_id
    record.tables.append(table)
    record.ends.append(swapped.scheduled)
    sequence.table = table
    sequence.swapped = None
    record.host_slots.extend(slot for column in swapped.slots for slot in column if slot is not None)
    state.counters["swapped_in"] += len(swaps)
    state.version += 1
    return CommittedStep(step_id=step_id, swaps=swaps, blocks_to_scrub=pool.take_dirty())
