"""The three moves of a step: plan (decides, changes nothing), commit (takes blocks), retire (gives them back)."""

from __future__ import annotations

from collections.abc import Sequence

from torch_core.cache.config import NULL_BLOCK
from torch_core.cache.records import BlockCopy, CommittedStep, SequenceRow, StepPlan
from torch_core.cache.state import CacheState, StepRecord, WorkItem
from torch_core.cache.table import Growth, SequenceTable
from torch_core.errors import InvalidInput, OutOfBlocks, RequestTooLong

__all__ = ["commit_plan", "deferred_hint", "plan_step", "retire_step"]


def plan_step(state: CacheState, work: Sequence[tuple[str, int]]) -> StepPlan:
    """Works out what a step would take; see `CacheManager.plan`."""
    items: list[WorkItem] = []
    sequences = state.sequences
    claimed: dict[int, int] = {}
    needed = num_tokens = 0
    try:
        for seq_id, count in work:
            sequence = sequences.get(seq_id)
            table = None if sequence is None else sequence.table
            if table is None or count.__class__ is not int or count < 1:
                raise _bad_work(state, seq_id, count)
            end = table.scheduled + count
            growth = None
            if end > table.limit:
                growth = _checked_growth(state, table, end, claimed)
                for fresh, copied in growth:
                    needed += fresh + (copied != NULL_BLOCK)
            num_tokens += count
            items.append((table, count, end, growth))
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput("work must be a sequence of pairs (seq_id: str, num_new_tokens: int).") from error
    if len({id(item[0]) for item in items}) != len(items):
        raise _repeated(items)
    if needed:
        _check_room(state, items, needed)
    return StepPlan(num_tokens=num_tokens, blocks_needed=needed, version=state.version, owner=state, items=items)


def commit_plan(state: CacheState, plan: StepPlan) -> CommittedStep:
    """Takes what a plan says; see `CacheManager.commit`."""
    if not isinstance(plan, StepPlan) or plan.owner is not state:
        raise InvalidInput("the plan was not made by this cache manager; commit what its own plan() returned.")
    if plan.version != state.version:
        raise InvalidInput(
            f"the plan was made on state {plan.version} of the cache, which is now at {state.version}; plan again."
        )
    fresh = iter(state.pool.take(plan.blocks_needed))
    step_id, record = state.open_step()
    record.items = plan.items
    copies: list[BlockCopy] = []
    rows: list[SequenceRow] = []
    new_row = tuple.__new__
    for table, count, end, growth in plan.items:
        if growth is not None:
            _grow(state, record, table, growth, fresh, copies)
        blocks = table.rows or table.freeze()
        rows.append(new_row(SequenceRow, (table.seq_id, blocks[0], table.scheduled, count, blocks)))
        table.scheduled = end
        table.last_step = step_id
    state.counters.copies += len(copies)
    state.version += 1
    return CommittedStep(step_id=step_id, rows=tuple(rows), copies=tuple(copies))


def retire_step(state: CacheState, step_id: int) -> None:
    """Marks a step as seen and settles every step up to the oldest unseen one; see `CacheManager.retire`."""
    steps = state.steps
    record = steps.get(step_id) if step_id.__class__ is int else None
    if record is None or record.seen:
        raise InvalidInput(f"step_id is {step_id!r}; steps in flight are {_step_list(state)}. Retire each step once.")
    record.seen = True
    while steps:
        oldest = next(iter(steps))
        if not steps[oldest].seen:
            break
        state.close_step(steps.pop(oldest))
    state.version += 1


def deferred_hint(state: CacheState) -> str:
    """Says, for the text of an OutOfBlocks, which steps to retire to get blocks back; empty when none would help."""
    waiting = [step for step, record in state.steps.items() if record.leaving or record.dropped or record.pinned]
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


def _checked_growth(state: CacheState, table: SequenceTable, end: int, claimed: dict[int, int]) -> Growth:
    growth = table.growth(end, state.groups, state.pool, claimed)
    width = state.config.max_blocks_per_seq
    for number, (count, _) in enumerate(growth):
        columns = len(table.blocks[number]) + count
        if width is not None and columns > width:
            raise RequestTooLong(
                f"sequence {table.seq_id!r} would have {end} tokens ({columns} blocks); its block table has "
                f"{width} columns (max_blocks_per_seq). Finish it, or build the cache with a wider table."
            )
    return growth


def _check_room(state: CacheState, items: list[WorkItem], needed: int) -> None:
    pool = state.pool
    reserve = state.config.watermark_blocks
    if reserve:
        starting = {id(table) for table, _, _, growth in items if growth is not None and table.last_step < 0}
        running = any(
            sequence.table is not None and sequence.table.last_step >= 0 for sequence in state.sequences.values()
        )
        reserve = reserve if starting and running else 0
    if needed + reserve > pool.num_available:
        held_back = f" ({reserve} are kept for running sequences)" if reserve else ""
        raise OutOfBlocks(
            f"the step of {len(items)} sequences needs {needed} blocks; {len(pool.free)} are free and "
            f"{len(pool.cached)} evictable{held_back}.{deferred_hint(state)} Wait, or preempt a sequence.",
            needed=needed,
            free=len(pool.free),
            evictable=len(pool.cached),
        )


def _bad_work(state: CacheState, seq_id: object, count: object) -> InvalidInput:
    sequence = state.sequences.get(seq_id) if isinstance(seq_id, str) else None
    if sequence is None:
        return InvalidInput(f"sequence {seq_id!r} is unknown: it was never added, or it has finished.")
    if sequence.table is None:
        state_name, verb = ("swapped out", "swap_in") if sequence.swapped else ("preempted", "resume")
        return InvalidInput(f"sequence {seq_id!r} is {state_name}; call {verb}({seq_id!r}) before it is planned.")
    return InvalidInput(f"num_new_tokens of sequence {seq_id!r} is {count!r}; it must be an int of at least 1.")


def _repeated(items: list[WorkItem]) -> InvalidInput:
    seen: set[str] = set()
    for table, *_ in items:
        if table.seq_id in seen:
            return InvalidInput(f"work names sequence {table.seq_id!r} twice; add its tokens up into one entry.")
        seen.add(table.seq_id)
    return InvalidInput("work names a sequence twice.")


def _step_list(state: CacheState) -> str:
    waiting = [step for step, record in state.steps.items() if not record.seen]
    return ", ".join(map(str, waiting)) if waiting else "none"
