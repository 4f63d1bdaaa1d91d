"""The whole state of a cache and the moves on it that several verbs share; no locks, no checks of the caller."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_core.base.checks import INT32_MAX
from torch_core.base.errors import InvalidInput
from torch_core.cache.config import CacheConfig
from torch_core.cache.keys import KeyChain
from torch_core.cache.pool import BlockPool
from torch_core.cache.prefix import PrefixIndex
from torch_core.cache.records import CommittedStep
from torch_core.cache.slots import StateSlots
from torch_core.cache.table import SequenceState, SequenceTable

_TOP_BYTE = 3 if sys.byteorder == "little" else 0


@dataclass(slots=True)
class StepRecord:
    """A step in flight and everything that waits for it.

    Attributes:
        tables: the tables that the step uses.
        ends: the tokens of each after the step.
        counts: the new tokens of each; empty for a step without rows.
        leaving: tables without a sequence; their blocks are released when the step retires.
        dropped: blocks that left a table (window drop); one hold each is released.
        pinned: sources of the step's copies; one pin each is released.
        host_slots: host slots that are free when the step retires.
        pinned_slots: sources of the step's copies of states; one pin each is released.
        host_state_slots: host slots of states that are free when the step retires.
        seen: the step was retired, but an earlier one was not yet.
    """

    tables: list[SequenceTable] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    counts: tuple[int, ...] = ()
    leaving: list[SequenceTable] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    host_slots: list[int] = field(default_factory=list)
    pinned_slots: list[int] = field(default_factory=list)
    host_state_slots: list[int] = field(default_factory=list)
    seen: bool = False

    @property
    def holds_memory(self) -> bool:
        """Whether blocks or slots return when the step retires."""
        return bool(self.leaving or self.dropped or self.pinned or self.pinned_slots)


class CacheState:
    """Sequences, pool, prefix index and steps in flight of one cache. Changed by the manager's verbs only.

    Attributes:
        groups: the cache groups with their block sizes.
        publishing: the prefix index, or None when prefixes are not shared.
        steps: step id to record, for the steps in flight, in order.
        version: changes with every change of the state, so that an old plan is noticed.
        host_free: free host slots; the next one to be taken is the last.
        slots: the state slots; None for a cache without states.
        counters: totals of `CacheStats` by name.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.groups = config.layouts
        self.sequences: dict[str, SequenceState] = {}
        self.next_step = 0
        self.version = 0
        self.counters: Counter[str] = Counter()
        self.clear_blocks()

    def clear_blocks(self) -> None:
        """Makes every block and host slot free and forgets all keys and steps in flight."""
        self.index = PrefixIndex(len(self.groups), verify=self.config.verify_tokens)
        self.publishing = self.index if self.config.enable_prefix_caching else None
        self.pool = BlockPool(self.config.num_blocks, self.index, scrub=self.config.scrub_on_free)
        self.steps: dict[int, StepRecord] = {}
        self.host_free = list(range(self.config.num_host_blocks - 1, -1, -1))
        self.slots = None if self.config.states is None else StateSlots(self.config, self.config.states)

    def committed(self, step_id: int, **moves: Any) -> CommittedStep:
        """Returns a step with these moves, which also scrubs the blocks and slots freed since the last one."""
        slots = () if self.slots is None else self.slots.pool.take_dirty()
        return CommittedStep(step_id=step_id, blocks_to_scrub=self.pool.take_dirty(), slots_to_scrub=slots, **moves)

    def known(self, seq_id: object) -> SequenceState:
        """Returns a sequence, or raises InvalidInput if there is none of that id."""
        sequence = self.sequences.get(seq_id) if isinstance(seq_id, str) else None
        if sequence is None:
            raise InvalidInput("seq_id", value=seq_id, wanted="it is unknown: it was never added, or it has finished")
        return sequence

    def append_tokens(self, new: Sequence[tuple[object, Sequence[int]]]) -> None:
        """Makes token ids of sequences known, or none of them; see `CacheManager.append_each`."""
        try:
            seq_ids, each = zip(*new, strict=True) if new else ((), ())
        except (TypeError, ValueError) as error:
            raise InvalidInput("new", "must be a sequence of pairs (seq_id: str, token_ids: ints)") from error
        checked: list[tuple[array[int], Sequence[int]]] = []
        for seq_id, token_ids in zip(seq_ids, each, strict=True):
            known = self.known(seq_id).tokens
            # Decoding appends one token to each of many sequences: worth a short way.
            if token_ids.__class__ in (tuple, list) and len(token_ids) == 1 and token_ids[0].__class__ is int:
                if not 0 <= token_ids[0] <= INT32_MAX:
                    raise _token_error(token_ids)
                checked.append((known, token_ids))
            else:
                checked.append((known, checked_tokens(token_ids)))
        for known, token_ids in checked:
            known.extend(token_ids)
        self.version += 1

    def open_step(self) -> tuple[int, StepRecord]:
        """Starts the record of the next step."""
        step_id, record = self.next_step, StepRecord()
        self.steps[step_id] = record
        self.next_step += 1
        return step_id, record

    def close_step(self, record: StepRecord) -> None:
        """Settles a step that has left `steps`: progress, keys, and everything that waited for it."""
        for table, end in zip(record.tables, record.ends, strict=True):
            table.retired = end
            if end >= table.next_event:
                self.advance(table)
            if table.snapshots and self.slots is not None:
                self.counters["snapshots"] += self.slots.settle(table)
        pool = self.pool
        for block in record.pinned:
            pool.unpin(block)
        if record.dropped:
            pool.release(record.dropped)
        if self.slots is not None:
            for slot in record.pinned_slots:
                self.slots.pool.unpin(slot)
            self.slots.host_free.extend(record.host_state_slots)
        for table in record.leaving:
            self.release_table(table)
        self.host_free.extend(record.host_slots)

    def advance(self, table: SequenceTable) -> None:
        """Publishes and drops a table's finished blocks; dropped blocks wait for the steps that list them."""
        dropped = table.advance(self.groups, self.publishing)
        if not dropped:
            return
        record = self.steps.get(table.last_step)
        if record is None:
            self.pool.release(dropped)
        else:
            record.dropped.extend(dropped)

    def attach_table(self, sequence: SequenceState) -> int:
        """Gives a sequence a table that starts with its longest cached prefix; returns that prefix's tokens.

        At least one token is left to compute, because a step without a new token has no output.
        """
        length, shared, blocks = 0, 0, [[] for _ in self.groups]
        slots = self.slots

        def shorten(chain: KeyChain, limit: int) -> int:
            nonlocal shared
            shared = max(shared, limit)
            return limit if slots is None else slots.longest(chain, limit)

        if self.config.enable_prefix_caching:
            limit = len(sequence.tokens) - 1
            length, blocks = self.index.match(
                self.groups, sequence.chains, sequence.tokens, limit, None if slots is None else shorten
            )
            self.counters["queried_tokens"] += len(sequence.tokens)
            self.counters["hit_tokens"] += length
            for held in blocks:
                self.pool.hold(held)
        table = SequenceTable(sequence, blocks, length)
        for number, group in enumerate(self.groups):
            table.published[number] = len(blocks[number])
            table.dropped[number] = group.first_needed_token(length) // group.block_size
        table.limit = length
        if slots is not None:
            slots.attach(table, shared)
        sequence.table = table
        return length

    def detach_table(self, sequence: SequenceState) -> None:
        """Takes a sequence's table away; its blocks return when the last step that uses them has retired."""
        table, sequence.table = sequence.table, None
        if table is None:
            return
        table.leave()
        record = self.steps.get(table.last_step)
        if record is None:
            self.release_table(table)
        else:
            record.leaving.append(table)

    def release_table(self, table: SequenceTable) -> None:
        """Publishes a table's remaining full blocks and releases its holds, last block first."""
        self.pool.release(table.advance(self.groups, self.publishing))
        for blocks in table.blocks:
            self.pool.release(reversed(blocks))
        if self.slots is not None:
            self.counters["snapshots"] += self.slots.release(table)

    def drop_host_slots(self, sequence: SequenceState) -> None:
        """Frees the host slots of a swapped-out sequence, after the step that fills them."""
        swapped, sequence.swapped = sequence.swapped, None
        if swapped is None:
            return
        slots = [slot for group in swapped.slots for slot in group if slot is not None]
        record = self.steps.get(swapped.step_id)
        (self.host_free if record is None else record.host_slots).extend(slots)
        if self.slots is not None and swapped.state_slot is not None:
            (self.slots.host_free if record is None else record.host_state_slots).append(swapped.state_slot)


def checked_tokens(token_ids: Sequence[int]) -> array[int]:
    """Returns token ids as int32; raises InvalidInput for other values."""
    # An array takes text and bytes for its own memory.
    if isinstance(token_ids, (str, bytes, bytearray)):
        raise InvalidInput("token_ids", f"is a {type(token_ids).__name__}", "it must be a sequence of ints")
    try:
        tokens = array("i", token_ids)
    except (TypeError, OverflowError) as error:
        raise _token_error(token_ids) from error
    # The top byte of each id: at most 127 when it is not negative, which `isascii` finds out at memory speed.
    if not tokens.tobytes()[_TOP_BYTE::4].isascii():
        raise _token_error(token_ids)
    return tokens


def _token_error(token_ids: object) -> InvalidInput:
    # Positions and types only: tokens are the user's text.
    wanted = f"each must be an int from 0 to {INT32_MAX}"
    try:
        for position, token in enumerate(token_ids):  # type: ignore[call-overload]
            try:
                value = array("i", [token])[0]
            except TypeError:
                return InvalidInput(f"token_ids[{position}]", f"is a {type(token).__name__}", wanted)
            except OverflowError:
                return InvalidInput(f"token_ids[{position}]", "does not fit into 32 bits", wanted)
            if value < 0:
                return InvalidInput(f"token_ids[{position}]", "is negative", wanted)
    except TypeError:
        return InvalidInput("token_ids", f"is a {type(token_ids).__name__}", "it must be a sequence of ints")
    return InvalidInput("token_ids", f"is a {type(token_ids).__name__} with a token of the wrong type", wanted)
