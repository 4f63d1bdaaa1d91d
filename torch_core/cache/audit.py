"""The audit: recomputes every invariant of the cache from scratch and names the blocks that break one; statistics."""

from __future__ import annotations

from collections import Counter
from itertools import chain, repeat
from operator import itemgetter

from torch_core.base.errors import CacheCorruption
from torch_core.cache.audit_pool import astray, audit_host, audit_pool, named
from torch_core.cache.audit_slots import audit_slots, count_slots
from torch_core.cache.config import NULL_BLOCK
from torch_core.cache.records import CacheStats
from torch_core.cache.state import CacheState
from torch_core.cache.table import SequenceTable


def audit_state(state: CacheState, *, rehash: bool) -> None:
    """Raises CacheCorruption with one sentence for each broken invariant; see `CacheManager.audit`."""
    digests = _digests(state, rehash=rehash)
    holds = _deferred_holds(state)
    holds.update(chain.from_iterable(chain.from_iterable(table.blocks for table in _live_tables(state))))
    report = [
        *audit_pool(state.pool, holds, chain.from_iterable(record.pinned for record in state.steps.values())),
        *_audit_host_slots(state),
        *_audit_index(state),
        *_audit_tables(state, digests),
    ]
    if state.slots is not None:
        report += audit_slots(state, state.slots, _live_tables(state), _all_tables(state), digests)
    if report:
        raise CacheCorruption("the block cache is corrupt: " + " ".join(report), report=tuple(report))


def collect_stats(state: CacheState) -> CacheStats:
    """Returns the frozen statistics; see `CacheManager.stats`."""
    pool = state.pool
    waiting = _deferred_holds(state)
    deferred = sum(1 for block, holds in waiting.items() if pool.refs[block] == holds)
    slot_counts = {} if state.slots is None else count_slots(state.slots)
    return CacheStats(
        num_blocks=pool.num_blocks,
        null=1,
        free=len(pool.free),
        cached=len(pool.cached),
        used=pool.num_blocks - 1 - len(pool.free) - len(pool.cached) - deferred,
        deferred=deferred,
        host_free=len(state.host_free),
        num_sequences=len(state.sequences),
        **slot_counts,
        steps_in_flight=len(state.steps),
        evictions=pool.evictions,
        **state.counters,
        steps=state.next_step,
    )


def _live_tables(state: CacheState) -> list[SequenceTable]:
    return [sequence.table for sequence in state.sequences.values() if sequence.table is not None]


def _all_tables(state: CacheState) -> list[SequenceTable]:
    return [*_live_tables(state), *chain.from_iterable(record.leaving for record in state.steps.values())]


def _deferred_holds(state: CacheState) -> Counter[int]:
    holds: Counter[int] = Counter()
    for record in state.steps.values():
        holds.update(record.dropped)
        holds.update(record.pinned)
        for table in record.leaving:
            holds.update(chain.from_iterable(table.blocks))
    return holds


def _audit_host_slots(state: CacheState) -> list[str]:
    slots = list(state.host_free)
    slots.extend(chain.from_iterable(record.host_slots for record in state.steps.values()))
    for sequence in state.sequences.values():
        if sequence.swapped is not None:
            slots.extend(s for column in sequence.swapped.slots for s in column if s is not None)
    return audit_host(slots, state.config.num_host_blocks, "Host slots")


def _audit_index(state: CacheState) -> list[str]:
    index = state.index
    wrong: list[int] = []
    orphans: list[int] = []
    if not _index_looks_right(state):
        keeps = [group.keeps_everything for group in state.groups]
        for block, (group, digest, parent) in index.keys.items():
            blocks = index.blocks[group]
            if blocks.get(digest) != block and block not in index.twins[group].get(digest, ()):
                wrong.append(block)
            if parent is not None and parent not in blocks and keeps[group]:
                orphans.append(block)
    wrong.extend(astray(index))
    report = [f"Index and blocks disagree about the keys of blocks {named(wrong)}."] if wrong else []
    if orphans:
        report.append(f"Keys without their parent's, which no lookup can reach: blocks {named(orphans)}.")
    if index.verify and index.nodes.keys() != index.keys.keys():
        report.append(f"Keys and lineages disagree: blocks {named(index.nodes.keys() ^ index.keys.keys())}.")
    return report


def _index_looks_right(state: CacheState) -> bool:
    """Says, for the plain case of one group and no twins, that keys and blocks agree and that parents are there."""
    index = state.index
    if len(index.blocks) > 1 or index.twins[0] or not index.keys:
        return False
    blocks = index.blocks[0]
    groups, digests, parents = (map(itemgetter(field), index.keys.values()) for field in range(3))
    reachable = not state.groups[0].keeps_everything or all(map(blocks.__contains__, filter(None, parents)))
    return reachable and not any(groups) and list(map(blocks.get, digests)) == list(index.keys)


def _digests(state: CacheState, *, rehash: bool) -> dict[int, list[bytes]]:
    """Returns each chain's keys by the chain's identity: hashed again, or as stored."""
    found: dict[int, list[bytes]] = {}
    for table in _all_tables(state):
        for keys in table.sequence.chains:
            if id(keys) not in found:
                tokens = table.sequence.tokens
                found[id(keys)] = keys.recomputed(tokens, len(tokens) // keys.block_size) if rehash else keys.digests
    return found


def _audit_tables(state: CacheState, digests: dict[int, list[bytes]]) -> list[str]:
    report = []
    checked: set[int] = set()
    for table in _all_tables(state):
        for keys in table.sequence.chains:
            if id(keys) not in checked and digests[id(keys)][: len(keys.digests)] != keys.digests:
                report.append(f"Sequence {table.seq_id!r} has keys that are not those of its tokens.")
            checked.add(id(keys))
        if not 0 <= table.retired <= table.scheduled:
            report.append(f"Sequence {table.seq_id!r} has {table.retired} tokens retired of {table.scheduled}.")
        for number, keys in enumerate(table.sequence.chains):
            report.extend(_audit_column(state, table, number, digests[id(keys)]))
    return report


def _audit_column(state: CacheState, table: SequenceTable, number: int, digests: list[bytes]) -> list[str]:
    group, column, pool = state.groups[number], table.blocks[number], state.pool
    size = group.block_size
    dropped, published = table.dropped[number], table.published[number]
    ready = table.ready
    report = []
    if len(column) != -(-table.scheduled // size):
        report.append(f"has {len(column)} blocks for {table.scheduled} tokens: {named(column)}.")
    if column.count(NULL_BLOCK) != dropped or any(column[:dropped]):
        report.append(f"has the null block elsewhere than in its first {dropped} columns.")
    elif len(set(column)) != len(column) - max(0, dropped - 1):
        report.append(f"holds a block twice: {named([b for b, n in Counter(column).items() if b and n > 1])}.")
    if dropped * size > group.first_needed_token(ready):
        report.append(f"gave back {dropped} blocks, though token {group.first_needed_token(ready)} is still needed.")
    if published * size > ready:
        report.append(
            f"published {published} blocks with {ready} tokens written and known: {named(column[:published])}."
        )
    keys = state.index.keys
    full = min(len(table.sequence.tokens), table.scheduled) // size
    # A block that a fork shares may have got its key from the other holder, before this chain reached it.
    known = min(full, len(digests))
    found = list(map(keys.get, column[dropped:]))
    expected = list(zip(repeat(number), digests, chain((None,), digests)))[dropped:published]
    wrong = found != expected + [None] * (len(column) - published) and [
        block
        for position, block in enumerate(column)
        if (block in keys and position < known and keys[block][:2] != (number, digests[position]))
        or (block and position < published and block not in keys and state.config.enable_prefix_caching)
    ]
    if wrong:
        report.append(f"holds blocks whose key is not that of their tokens: {named(wrong)}.")
    if table.limit > table.scheduled and table.scheduled % size and column:
        tail = column[-1] if column[-1] < pool.num_blocks else NULL_BLOCK
        if pool.refs[tail] - pool.pins.get(tail, 0) > 1 or (tail in keys and full < len(column)):
            report.append(f"may write into block {tail}, which is shared.")
    return [f"Sequence {table.seq_id!r}, group {group.name!r}, {text}" for text in report]
