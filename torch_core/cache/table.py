"""The cache's record of one sequence: its tokens and keys, and the table of the blocks that hold them."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from torch_core.cache.config import NULL_BLOCK, GroupLayout
from torch_core.cache.keys import KeyChain
from torch_core.cache.pool import BlockPool
from torch_core.cache.prefix import PrefixIndex


@dataclass(slots=True, eq=False)
class SequenceTable:
    """The blocks of a sequence in every group, and how far its steps have come.

    A sequence that is preempted and resumed gets a new table; the old one lives on until the steps that use it have
    retired. Only the allocator changes a table, and only by append, tail copy-on-write and window drop.

    Attributes:
        sequence: the sequence of the table.
        seq_id: its id.
        blocks: for each group, the block ids in order, null if a window has passed.
        published: for each group, the number of leading blocks whose keys were published.
        dropped: for each group, the number of leading blocks that were given back to the null block.
        scheduled: tokens that committed steps write, at the latest; the position of the next one.
        retired: tokens whose steps were seen.
        trusted: the number of token ids that equal the tokens written by the table's steps; later ids may differ,
            because the table left its sequence before they were known. None while the table belongs to the sequence.
        last_step: the latest step that uses the table; -1 for none.
        limit: `scheduled` may grow to this without a new block or a copy.
        next_event: the value of `retired` at which a key can be published or a block dropped.
        rows: the tables as tuples, or None after a change.
        slot: slot of the state after `scheduled` tokens; the null slot before the first step, or without states.
        snapshots: earlier states whose keys are not yet known: number of tokens and slot, each with a hold.
        boundaries: numbers of tokens after which a snapshot is due: where the tokens that the table started with leave
            those of other sequences, and their last block boundary.
    """

    sequence: SequenceState
    blocks: list[list[int]]
    scheduled: int
    seq_id: str = field(init=False)
    published: list[int] = field(init=False)
    dropped: list[int] = field(init=False)
    retired: int = field(init=False)
    trusted: int | None = None
    last_step: int = -1
    limit: int = 0
    next_event: int | float = 0
    rows: tuple[tuple[int, ...], ...] | None = None
    slot: int = NULL_BLOCK
    snapshots: list[tuple[int, int]] = field(default_factory=list)
    boundaries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.seq_id, self.retired = self.sequence.seq_id, self.scheduled
        self.published, self.dropped = [0] * len(self.blocks), [0] * len(self.blocks)

    @property
    def known(self) -> int:
        """Leading tokens whose ids are known to be those that the table's steps wrote."""
        return len(self.sequence.tokens) if self.trusted is None else self.trusted

    @property
    def ready(self) -> int:
        """Leading tokens that are written for certain and whose ids are known."""
        return min(self.retired, self.known)

    def leave(self) -> None:
        """Notes that the table no longer belongs to its sequence."""
        self.trusted = len(self.sequence.tokens)

    def freeze(self) -> tuple[tuple[int, ...], ...]:
        """Renews `rows` after a change and returns it."""
        self.rows = tuple(map(tuple, self.blocks))
        return self.rows

    def growth(self, end: int, groups: tuple[GroupLayout, ...], pool: BlockPool, claimed: dict[int, int]) -> Growth:
        """Returns for each group the number of new blocks, and the tail block to copy first, for tokens up to `end`.

        Changes only `claimed`: tails that sequences of the same plan copy, with the number of holds that this ends.
        """
        found = []
        for group, blocks in zip(groups, self.blocks, strict=True):
            size = group.block_size
            copied = NULL_BLOCK
            if end > self.scheduled and self.scheduled % size:
                tail = blocks[self.scheduled // size]
                others = pool.refs[tail] - pool.pins.get(tail, 0) - claimed.get(tail, 0) > 1
                # A fork's partial tail can be full, and published, in its parent's table.
                if others or tail in pool.index.keys:
                    copied = tail
                    claimed[tail] = claimed.get(tail, 0) + 1
            found.append((-(-end // size) - len(blocks), copied))
        return tuple(found)

    def advance(self, groups: tuple[GroupLayout, ...], index: PrefixIndex | None) -> list[int]:
        """Publishes the keys of blocks that are full, known and written; drops blocks that no later query sees.

        The caller gives the holds of the returned blocks, those that were dropped, back.
        """
        ready = self.ready
        gone: list[int] = []
        next_event: int | float = math.inf
        for number, group in enumerate(groups):
            size = group.block_size
            if index is not None:
                count = ready // size
                if count > self.published[number]:
                    chain = self.sequence.chains[number]
                    chain.extend(self.sequence.tokens, count)
                    index.publish(number, chain, self.blocks[number], self.published[number], count)
                    self.published[number] = count
                event = (self.published[number] + 1) * size
                if event < next_event:
                    next_event = event
            if not group.keeps_everything:
                blocks = self.blocks[number]
                needed = min(group.first_needed_token(ready) // size, len(blocks))
                for position in range(self.dropped[number], needed):
                    gone.append(blocks[position])
                    blocks[position] = NULL_BLOCK
                    self.rows = None
                self.dropped[number] = max(self.dropped[number], needed)
                next_event = min(next_event, group.position_that_frees((self.dropped[number] + 1) * size))
        self.next_event = next_event
        return gone


#: For each group: the number of new blocks, and the tail block to copy first (the null block for none).
Growth = tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class SwappedTable:
    """A table whose blocks are in host memory.

    Attributes:
        slots: for each group, the host slots in table order, None if the table has the null block.
        scheduled: tokens that the table held.
        retired: those of them whose steps had been seen.
        dropped: for each group, its leading null blocks.
        step_id: the step that copies the blocks to the host.
        state_slot: host slot of the state; None if there is none.
        boundaries: those of the table.
    """

    slots: list[list[int | None]]
    scheduled: int
    retired: int
    dropped: list[int]
    step_id: int
    state_slot: int | None = None
    boundaries: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence: its id, its known token ids, its keys, and where its blocks are.

    Attributes:
        seq_id: the caller's name for it.
        tokens: known token ids, as int32.
        chains: for each group, the key chain; groups of equal block size share one.
        table: the blocks on the device; None while preempted or swapped out.
        swapped: the blocks in host memory; None unless swapped out.
    """

    seq_id: str
    tokens: array[int]
    chains: tuple[KeyChain, ...]
    table: SequenceTable | None = None
    swapped: SwappedTable | None = None
