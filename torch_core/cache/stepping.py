"""The three moves of a step: plan (decides, changes nothing), commit (takes blocks), retire (gives them back)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat

from torch_core.base.errors import InvalidInput, RequestTooLong
from torch_core.cache.config import NULL_BLOCK
from torch_core.cache.pool import BlockPool
from torch_core.cache.records import BlockCopy, CommittedStep, StateCopy, StepPlan, StepRow, StepRows
from torch_core.cache.slots import StateSlots
from torch_core.cache.state import CacheState, StepRecord
from torch_core.cache.table import Growth, SequenceTable


def plan_step(state: CacheState, work: Sequence[tuple[str, int]]) -> StepPlan:
    """Computes the blocks that a step would take; see `CacheManager.plan`."""
    # A decode step names hundreds of sequences and grows few of them: whole columns at a time, then only those few.
    try:
        seq_ids: tuple[str, ...]
        counts: tuple[int, ...]
        seq_ids, counts = zip(*work, strict=True) if work else ((), ())
        sequences = list(map(state.sequences.get, seq_ids))
    except (TypeError, ValueError) as error:
        raise InvalidInput("work", "must be a sequence of pairs (seq_id: str, num_new_tokens: int)") from error
    tables = [sequence.table for sequence in sequences if sequence is not None and sequence.table is not None]
    if len(tables) != len(counts) or (counts and (set(map(type, counts)) != {int} or min(counts) < 1)):
        for seq_id, count in zip(seq_ids, counts, strict=True):
            _check_entry(state, seq_id, count)
    if len(set(seq_ids)) != len(seq_ids):
        seq_id = next(seq_id for seq_id in seq_ids if seq_ids.count(seq_id) > 1)
        raise InvalidInput("work", f"names sequence {seq_id!r} twice", "add its tokens up into one entry")
    ends = [table.scheduled + count for table, count in zip(tables, counts, strict=True)]
    growths: dict[int, Growth] = {}
    claimed: dict[int, int] = {}
    for position, table in enumerate(tables):
        if ends[position] > table.limit:
            growths[position] = _checked_growth(state, table, ends[position], claimed)
    needed = 0
    if growths:
        needed = sum(fresh + (copied != NULL_BLOCK) for growth in growths.values() for fresh, copied in growth)
    if needed:
        _check_room(state, [tables[position] for position in growths], needed)
    moves: dict[int, bool] = {}
    if state.slots is not None:
        moves = state.slots.plan(tables)
        _check_slots(state, state.slots.pool, len(moves))
    return StepPlan(
        num_tokens=sum(counts),
        blocks_needed=needed,
        version=state.version,
        owner=state,
        tables=tables,
        counts=counts,
        ends=ends,
        growths=growths,
        moves=moves,
    )


def commit_plan(state: CacheState, plan: StepPlan) -> CommittedStep:
    """Takes the blocks of a plan; see `CacheManager.commit`."""
    if not isinstance(plan, StepPlan) or plan.owner is not state:
        raise InvalidInput("plan", "was not made by this cache manager", "commit what its own plan() returned")
    if plan.version != state.version:
        problem = f"was made on state {plan.version} of the cache, which is now at {state.version}"
        raise InvalidInput("plan", problem, "plan again")
    fresh = iter(state.pool.take(plan.blocks_needed) if plan.blocks_needed else ())
    step_id, record = state.open_step()
    record.tables, record.ends, record.counts = plan.tables, plan.ends, plan.counts
    copies: list[BlockCopy] = []
    for position, growth in plan.growths.items():
        _grow(state, record, plan.tables[position], growth, fresh, copies)
    state_copies = _move(state.slots, record, plan) if state.slots is not None else ()
    tables = [table.rows or table.freeze() for table in plan.tables]
    # In the order of the fields of `StepRow`.
    columns = {
        "seq_id": [table.seq_id for table in plan.tables],
        "block_ids": [groups[0] for groups in tables],
        "num_computed_tokens": [table.scheduled for table in plan.tables],
        "num_new_tokens": plan.counts,
        "group_block_ids": tables,
        "state_slot": [table.slot for table in plan.tables],
    }
    rows = StepRows(map(tuple.__new__, repeat(StepRow), zip(*columns.values(), strict=True)))
    rows.columns = columns
    for table, end in zip(plan.tables, plan.ends, strict=True):
        table.scheduled = end
        table.last_step = step_id
    state.counters["copies"] += len(copies)
    state.version += 1
    state.counters["state_copies"] += len(state_copies)
    return state.committed(step_id, rows=rows, copies=tuple(copies), state_copies=state_copies)


def retire_step(state: CacheState, step_id: int, num_kept_tokens: Mapping[str, int] | None = None) -> None:
    """Marks a step as seen and settles every step up to the oldest unseen one; see `CacheManager.retire`."""
    steps = state.steps
    record = steps.get(step_id) if step_id.__class__ is int else None
    if record is None or record.seen:
        waiting = ", ".join(str(step) for step, record in steps.items() if not record.seen) or "none"
        raise InvalidInput("step_id", value=step_id, wanted=f"steps in flight are {waiting}. Retire each step once")
    if num_kept_tokens:
        for position, end in _checked_cuts(record, step_id, num_kept_tokens):
            _cut(state, record, position, end)
    record.seen = True
    while steps:
        oldest = next(iter(steps))
        if not steps[oldest].seen:
            break
        state.close_step(steps.pop(oldest))
    state.version += 1


def deferred_hint(state: CacheState) -> str:
    """Says, for the text of an OutOfBlocks, which steps to retire to get blocks back; empty when none would help."""
    waiting = [step for step, record in state.steps.items() if record.holds_memory]
    return f" More return when step {waiting[-1]} and those before it retire." if waiting else ""


def _grow(
    state: CacheState, record: StepRecord, table: SequenceTable, growth: Growth, fresh, copies: list[BlockCopy]
) -> None:
    sizes = []
    for number, (count, copied) in enumerate(growth):
        blocks = table.blocks[number]
        size = state.groups[number].block_size
        if copied != NULL_BLOCK:
            target = next(fresh)
            blocks[table.scheduled // size] = target
            state.pool.pin(copied)
            record.pinned.append(copied)
            copies.append(BlockCopy(copied, target, number))
        for _ in range(count):
            blocks.append(next(fresh))
        sizes.append(len(blocks) * size)
    table.limit = min(sizes)
    table.rows = None


def _move(slots: StateSlots, record: StepRecord, plan: StepPlan) -> tuple[StateCopy, ...]:
    copies: list[StateCopy] = []
    for (position, is_snapshot), fresh in zip(plan.moves.items(), slots.pool.take(len(plan.moves)), strict=True):
        copies.extend(slots.move(plan.tables[position], is_snapshot, fresh, record.pinned_slots))
    return tuple(copies)


def _checked_cuts(record: StepRecord, step_id: int, num_kept_tokens: Mapping[str, int]) -> list[tuple[int, int]]:
    if not isinstance(num_kept_tokens, Mapping):
        raise InvalidInput("num_kept_tokens", f"is a {type(num_kept_tokens).__name__}", "it must map seq_id to an int")
    positions = {table.seq_id: position for position, table in enumerate(record.tables)}
    cuts = []
    for seq_id, kept in num_kept_tokens.items():
        position = positions.get(seq_id)
        if position is None or not record.counts:
            raise InvalidInput("num_kept_tokens", f"names sequence {seq_id!r}, which has no row in step {step_id}")
        table, count, end = record.tables[position], record.counts[position], record.ends[position]
        if type(kept) is not int or not 1 <= kept <= count:
            wanted = f"it must be an int from 1 to {count}, the new tokens of its row in step {step_id}"
            raise InvalidInput("num_kept_tokens", f"of sequence {seq_id!r} is {kept!r}", wanted)
        if kept == count:
            continue
        end -= count - kept
        if table.last_step != step_id:
            problem = f"of sequence {seq_id!r} is {kept}, less than the {count} tokens of step {step_id}"
            wanted = f"step {table.last_step}, which continues behind them, is committed already"
            raise InvalidInput("num_kept_tokens", problem, wanted)
        if table.known > end:
            problem = f"of sequence {seq_id!r} is {kept}, and leaves {end} of its {table.known} known tokens"
            wanted = "append the ids of a step after it was retired with num_kept_tokens"
            raise InvalidInput("num_kept_tokens", problem, wanted)
        cuts.append((position, end))
    return cuts


def _cut(state: CacheState, record: StepRecord, position: int, end: int) -> None:
    table = record.tables[position]
    if table.trusted is not None:
        # It left its sequence: all of its blocks go when the step settles.
        record.ends[position] = end
        return
    record.ends[position] = end
    for group, blocks in zip(state.groups, table.blocks, strict=True):
        columns = -(-end // group.block_size)
        record.dropped.extend(reversed(blocks[columns:]))
        del blocks[columns:]
    table.scheduled = end
    # A fork may share the tail since the step was committed: the next step has to look.
    table.limit = end
    table.rows = None


def _checked_growth(state: CacheState, table: SequenceTable, end: int, claimed: dict[int, int]) -> Growth:
    growth = table.growth(end, state.groups, state.pool, claimed)
    width = state.config.max_blocks_per_seq
    if width is None:
        return growth
    for number, (count, _) in enumerate(growth):
        columns = len(table.blocks[number]) + count
        if columns > width:
            raise RequestTooLong(
                "num_new_tokens",
                f"of sequence {table.seq_id!r} leads to {end} tokens ({columns} blocks)",
                f"its block table has {width} columns (max_blocks_per_seq). Finish it, or give the cache wider tables",
            )
    return growth


def _check_room(state: CacheState, growing: list[SequenceTable], needed: int) -> None:
    pool = state.pool
    reserve = state.config.watermark_blocks
    if reserve:
        starting = any(table.last_step < 0 for table in growing)
        running = any(
            sequence.table is not None and sequence.table.last_step >= 0 for sequence in state.sequences.values()
        )
        reserve = reserve if starting and running else 0
    if needed + reserve > pool.num_available:
        held_back = f" ({reserve} are kept for running sequences)" if reserve else ""
        raise pool.out_of_blocks(
            f"the step needs {needed} blocks for {len(growing)} sequences",
            needed,
            f"{held_back}.{deferred_hint(state)} Wait, or preempt a sequence.",
        )


def _check_slots(state: CacheState, pool: BlockPool, needed: int) -> None:
    if needed > pool.num_available:
        text = f"the step needs {needed} state slots"
        raise pool.out_of_blocks(text, needed, f".{deferred_hint(state)} Wait, or preempt a sequence.")


def _check_entry(state: CacheState, seq_id: object, count: object) -> None:
    sequence = state.known(seq_id)
    if sequence.table is None:
        place, verb = ("swapped out", "swap_in") if sequence.swapped else ("preempted", "resume")
        raise InvalidInput("seq_id", value=seq_id, wanted=f"it is {place}: call {verb} before it is planned")
    if type(count) is not int or count < 1:
        raise InvalidInput("num_new_tokens", f"of sequence {seq_id!r} is {count!r}", "it must be an int of at least 1")
