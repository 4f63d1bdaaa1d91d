"""The audit of state slots, and their counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

from torch_core.cache.audit_pool import astray, audit_host, audit_pool, named
from torch_core.cache.config import NULL_BLOCK
from torch_core.cache.slots import StateSlots
from torch_core.cache.state import CacheState
from torch_core.cache.table import SequenceTable


def audit_slots(
    state: CacheState,
    slots: StateSlots,
    live: Iterable[SequenceTable],
    tables: Iterable[SequenceTable],
    digests: Mapping[int, list[bytes]],
) -> list[str]:
    """Returns a sentence for each broken invariant of the state slots.

    Args:
        state: the state.
        slots: its slots.
        live: the tables of sequences.
        tables: those, and the tables that wait for a step.
        digests: each chain's keys by the chain's identity.
    """
    holds: Counter[int] = Counter()
    for table in tables:
        holds[table.slot] += 1
        holds.update(slot for _, slot in table.snapshots)
    records = state.steps.values()
    for record in records:
        holds.update(record.pinned_slots)
    report = audit_pool(slots.pool, holds, chain.from_iterable(record.pinned_slots for record in records))
    hosted = [*slots.host_free, *chain.from_iterable(record.host_state_slots for record in records)]
    for sequence in state.sequences.values():
        if sequence.swapped is not None and sequence.swapped.state_slot is not None:
            hosted.append(sequence.swapped.state_slot)
    report += audit_host(hosted, slots.config.num_host_slots, "Host slots of states")
    index = slots.index
    named_by = index.blocks[0]
    wrong = [
        s for s, (_, key, _) in index.keys.items() if named_by.get(key) != s and s not in index.twins[0].get(key, ())
    ]
    wrong += astray(index)
    if wrong:
        report.append(f"Index and state slots disagree about the keys of slots {named(wrong)}.")
    if index.verify and index.nodes.keys() != index.keys.keys():
        report.append(f"Keys and lineages of state slots disagree: {named(index.nodes.keys() ^ index.keys.keys())}.")
    for table in live:
        report += _audit_table(slots, table, digests[id(table.sequence.chains[0])])
    return report


def count_slots(slots: StateSlots) -> dict[str, int]:
    """Returns the fields of `CacheStats` about state slots, but the totals."""
    pool = slots.pool
    return {
        "num_slots": pool.num_blocks,
        "slots_free": len(pool.free),
        "slots_cached": len(pool.cached),
        "evicted_snapshots": pool.evictions,
    }


def _audit_table(slots: StateSlots, table: SequenceTable, digests: list[bytes]) -> list[str]:
    report = []
    if (table.slot == NULL_BLOCK) != (table.scheduled == 0):
        report.append(f"has state slot {table.slot} after {table.scheduled} tokens.")
    size = table.sequence.chains[0].block_size
    states = [*table.snapshots, (table.scheduled, table.slot)]
    counts = [tokens for tokens, _ in states]
    if counts != sorted(counts) or any(tokens % slots.block_size or not tokens for tokens in counts[:-1]):
        report.append(f"has snapshots after {counts[:-1]} of its {table.scheduled} tokens.")
    keys = slots.index.keys
    wrong = [
        slot
        for tokens, slot in states
        if slot in keys
        and (tokens % size or (0 < tokens // size <= len(digests) and keys[slot][1] != digests[tokens // size - 1]))
    ]
    if wrong:
        report.append(f"holds states whose key is not that of their tokens: slots {named(wrong)}.")
    return [f"Sequence {table.seq_id!r} {text}" for text in report]
