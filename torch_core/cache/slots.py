"""State slots: the second kind of cache, with the holds, keys and steps of blocks.

A table has one slot, with the state after its last committed step. A step writes it in place, unless another sequence
holds it or it is, or becomes, a snapshot: then the step writes a copy. If the last tokens of a row are rejected, the
slot has the state after the kept ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_core.cache.config import NULL_BLOCK, CacheConfig, StateConfig
from torch_core.cache.keys import KeyChain
from torch_core.cache.pool import BlockPool
from torch_core.cache.prefix import PrefixIndex
from torch_core.cache.records import StateCopy
from torch_core.cache.table import SequenceTable


class StateSlots:
    """The slots of one cache: who holds them, which are snapshots, and where the next snapshot is due.

    Attributes:
        config: the sizes.
        index: keys of snapshots: those of the first group's blocks that end at the same token.
        pool: holds, free slots and the order in which snapshots are evicted.
        block_size: tokens between two boundaries at which all groups have whole blocks.
        publishing: whether snapshots are kept.
        host_free: free host slots; the next one to be taken is the last.
    """

    def __init__(self, config: CacheConfig, states: StateConfig) -> None:
        self.config = states
        self.index = PrefixIndex(1, verify=config.verify_tokens)
        self.pool = BlockPool(states.num_slots, self.index, scrub=config.scrub_on_free, noun="state slot")
        self.block_size = math.lcm(*(group.block_size for group in config.layouts))
        self.publishing = config.enable_prefix_caching
        self.host_free = list(range(states.num_host_slots - 1, -1, -1))

    def find(self, chain: KeyChain, num_tokens: int) -> int | None:
        """Returns the slot of a snapshot after this many tokens, a multiple of the chain's block size, or None."""
        return self.index.find(0, chain, num_tokens // chain.block_size - 1)

    def longest(self, chain: KeyChain, limit: int) -> int:
        """Returns the most tokens, at most `limit`, a whole boundary, after which there is a snapshot; 0 if none."""
        length = limit
        while length and self.find(chain, length) is None:
            length -= self.block_size
        return length

    def attach(self, table: SequenceTable, shared: int) -> None:
        """Gives a new table the snapshot after its cached prefix; other sequences share `shared` of its tokens."""
        last = (len(table.sequence.tokens) - 1) // self.block_size * self.block_size
        table.boundaries = (min(shared, last), last)
        if table.scheduled:
            table.slot = self.find(table.sequence.chains[0], table.scheduled) or NULL_BLOCK
            self.pool.hold((table.slot,))

    def until_snapshot(self, table: SequenceTable, count: int) -> int:
        """Returns how many of the next `count` tokens a step should take, to end where a snapshot is due.

        Every end of a step costs time, so it is the next of the table's boundaries, or the last regular one.
        """
        if not self.publishing:
            return count
        first, every = table.scheduled, self.block_size * self.config.snapshot_blocks
        due = [each for each in table.boundaries if first < each <= first + count]
        if due:
            return min(due) - first
        regular = (first + count) // every * every
        return regular - first if regular > first else count

    def is_due(self, table: SequenceTable) -> bool:
        """Says whether the state of a table, which has one, is to become a snapshot, if it is not one."""
        tokens = table.scheduled
        if not self.publishing or table.slot in self.index.keys:
            return False
        return tokens in table.boundaries or tokens % (self.block_size * self.config.snapshot_blocks) == 0

    def plan(self, tables: Sequence[SequenceTable]) -> dict[int, bool]:
        """Returns which rows of a step get a new slot, and whether their old one stays until its key is known.

        The old state is copied to the new slot. There may be too few slots. Changes nothing.
        """
        moves: dict[int, bool] = {}
        wanted: list[int] = []
        claimed: dict[int, int] = {}
        pool = self.pool
        for position, table in enumerate(tables):
            slot = table.slot
            others = pool.refs[slot] - pool.pins.get(slot, 0) - claimed.get(slot, 0) > 1
            if slot == NULL_BLOCK or others or slot in self.index.keys:
                moves[position] = slot != NULL_BLOCK and self.is_due(table)
                claimed[slot] = claimed.get(slot, 0) + (not moves[position])
            elif self.is_due(table):
                wanted.append(position)
        for position in wanted[: max(0, pool.num_available - len(moves))]:
            moves[position] = True
        return moves

    def move(self, table: SequenceTable, is_snapshot: bool, fresh: int, pinned: list[int]) -> tuple[StateCopy, ...]:
        """Gives a table a new slot and returns the copy to it; the caller unpins `pinned` when the step retires."""
        old, table.slot = table.slot, fresh
        if old == NULL_BLOCK:
            return ()
        if is_snapshot:
            table.snapshots.append((table.scheduled, old))
            self.pool.hold((old,))
        self.pool.pin(old)
        pinned.append(old)
        return (StateCopy(old, fresh),)

    def settle(self, table: SequenceTable) -> int:
        """Publishes the snapshots of a table whose tokens are written and known; returns how many are new."""
        ready, count = table.ready, 0
        while table.snapshots and table.snapshots[0][0] <= ready:
            tokens, slot = table.snapshots.pop(0)
            chain = table.sequence.chains[0]
            position = tokens // chain.block_size - 1
            chain.extend(table.sequence.tokens, position + 1)
            # A second snapshot of the same tokens would only push out another one.
            if self.find(chain, tokens) is None:
                self.index.publish(0, chain, {position: slot}, position, position + 1)
                count += 1
            self.pool.release((slot,))
        return count

    def release(self, table: SequenceTable) -> int:
        """Gives a table's slots back, its last state as a snapshot if one is due; returns how many are new."""
        if table.slot != NULL_BLOCK:
            slot = table.slot
            if self.is_due(table):
                table.snapshots.append((table.scheduled, slot))
            else:
                self.pool.release((slot,))
            table.slot = NULL_BLOCK
        count = self.settle(table)
        self.pool.release(slot for _, slot in table.snapshots)
        table.snapshots.clear()
        return count
