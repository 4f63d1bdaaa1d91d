"""The part of the audit that blocks and state slots have in common: holds, places, pins, keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, filterfalse, repeat

from torch_core.cache.config import NULL_BLOCK
from torch_core.cache.pool import BlockPool
from torch_core.cache.prefix import PrefixIndex

_MOST_NAMED = 8


def audit_pool(pool: BlockPool, holds: Counter[int], pinned: Iterable[int]) -> list[str]:
    """Returns a sentence for each broken invariant of a pool.

    Args:
        pool: the pool.
        holds: the holds on each block that tables and steps have; those on the null block do not count.
        pinned: the blocks that steps in flight have pinned.
    """
    report = [*_audit_holds(pool, holds), *_misplaced_blocks(pool)]
    if pool.dirty and not (set(pool.free).issuperset(pool.dirty) and len({*pool.dirty}) == len(pool.dirty)):
        free = set(pool.free)
        wrong = [block for block, count in Counter(pool.dirty).items() if count > 1 or block not in free]
        report.append(f"{_noun(pool)}s to scrub that are not free, or named twice: {named(wrong)}.")
    pins = Counter(pinned)
    if pins != pool.pins:
        wrong = [block for block in pins.keys() | pool.pins.keys() if pins[block] != pool.pins.get(block, 0)]
        report.append(f"Pins do not match the copies of the steps in flight: {pool.noun}s {named(wrong)}.")
    return report


def audit_host(slots: list[int], num_slots: int, noun: str) -> list[str]:
    """Returns a sentence if some host slots are not in exactly one place."""
    if sorted(slots) == list(range(num_slots)):
        return []
    counted = Counter(slots)
    return [f"{noun} are lost or in two places: {named(s for s in {*counted, *range(num_slots)} if counted[s] != 1)}."]


def astray(index: PrefixIndex) -> list[int]:
    """Returns the blocks that an index names without a key, or twice."""
    num_twins = sum(map(len, chain.from_iterable(twins.values() for twins in index.twins)))
    if sum(map(len, index.blocks)) + num_twins == len(index.keys):
        return []
    blocks = [*chain.from_iterable(blocks.values() for blocks in index.blocks)]
    blocks.extend(chain.from_iterable(chain.from_iterable(twins.values() for twins in index.twins)))
    return [*set(blocks) - index.keys.keys(), *(block for block, count in Counter(blocks).items() if count > 1)]


def named(blocks: Iterable[int]) -> str:
    """Returns the numbers of some blocks for a message."""
    ordered = sorted(blocks)
    shown = ", ".join(map(str, ordered[:_MOST_NAMED]))
    return f"{shown} and {len(ordered) - _MOST_NAMED} more" if len(ordered) > _MOST_NAMED else shown


def _audit_holds(pool: BlockPool, holds: Counter[int]) -> list[str]:
    del holds[NULL_BLOCK]
    counted = list(map(holds.get, range(pool.num_blocks), repeat(0)))
    report = []
    if sum(counted) != holds.total():
        strangers = [block for block in holds if not 0 < block < pool.num_blocks]
        report.append(f"Tables hold {pool.noun}s outside the pool: {named(strangers)}.")
    if counted != pool.refs:
        wrong = [b for b, (is_, should) in enumerate(zip(pool.refs, counted, strict=False)) if is_ != should]
        details = ", ".join(f"{b} has {pool.refs[b]} for {counted[b]} holders" for b in wrong[:_MOST_NAMED])
        report.append(f"Reference counts are wrong: {pool.noun} {details}.")
    return report


def _misplaced_blocks(pool: BlockPool) -> list[str]:
    keys = pool.index.keys
    free, cached = set(pool.free), pool.cached.keys()
    unheld = {block for block, refs in enumerate(pool.refs) if not refs and block != NULL_BLOCK}
    twice = [b for b, n in Counter(pool.free).items() if n > 1] if len(free) != len(pool.free) else ()
    outside = list(filterfalse(range(1, pool.num_blocks).__contains__, keys))
    problems = (
        ("on the free list twice", twice),
        ("free and cached at once", free & cached),
        ("without a holder, yet neither free nor cached", unheld - free - cached),
        ("held, yet free or cached", (free | cached) - unheld),
        ("free, yet they have a key", free & keys.keys()),
        ("cached without a key", cached - keys.keys()),
        (f"the null {pool.noun} or no {pool.noun} of the pool, yet they have a key", outside),
    )
    return [f"{_noun(pool)}s {what}: {named(blocks)}." for what, blocks in problems if blocks]


def _noun(pool: BlockPool) -> str:
    return pool.noun[0].upper() + pool.noun[1:]
