"""The immutable records that the cache manager returns: plans, committed steps, their rows, and statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple


# Rows are named tuples, not dataclasses: a step makes hundreds, and a frozen dataclass costs three times as much.
class StepRow(NamedTuple):
    """One sequence's part of one step.

    Attributes:
        seq_id: the sequence.
        block_ids: its block table in the first cache group. The same tuple object is returned until the table changes.
        num_computed_tokens: tokens whose keys and values earlier steps wrote, or a shared prefix holds.
        num_new_tokens: tokens that this step writes, at the positions that follow.
        group_block_ids: its block tables in all cache groups, in the order of the configuration.
        state_slot: slot of its recurrent state, which the step replaces; 0 for a cache without states. The step starts
            from the state in it, or from zeros if `num_computed_tokens` is 0.
    """

    seq_id: str
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    num_new_tokens: int
    group_block_ids: tuple[tuple[int, ...], ...]
    state_slot: int = 0


class StepRows(tuple[StepRow, ...]):
    """The rows of a step, with each of their fields as a column, for code that works on whole columns.

    Attributes:
        columns: mapping from field name to the values of all rows, in order; do not change it.
    """

    columns: Mapping[str, Sequence[Any]] = MappingProxyType({})


_NO_ROWS = StepRows()


class BlockCopy(NamedTuple):
    """A device copy of one whole block in all layers of its group, to run before the writes of its step."""

    source: int
    target: int
    group: int = 0


class BlockSwap(NamedTuple):
    """A copy of one whole block between the device and host memory, before the writes of its step.

    Attributes:
        device_block: block id in the pool.
        host_block: slot in host memory, from 0 to `num_host_blocks - 1`.
        to_host: whether the copy goes to the host.
        group: index of the cache group whose layers hold the block.
    """

    device_block: int
    host_block: int
    to_host: bool
    group: int = 0


class StateCopy(NamedTuple):
    """A device copy of one slot in all layers with a state, to run before the writes of its step."""

    source: int
    target: int


class StateSwap(NamedTuple):
    """A copy of one slot between the device and host memory, before the writes of its step.

    Attributes:
        device_slot: slot on the device.
        host_slot: slot in host memory, from 0 to `num_host_slots - 1`.
        to_host: whether the copy goes to the host.
    """

    device_slot: int
    host_slot: int
    to_host: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The blocks that a step would take, computed from one state of the manager. Nothing has been taken yet.

    Attributes:
        num_tokens: number of new tokens of all sequences.
        blocks_needed: number of blocks that `commit` will take.
        version: the state of the manager that the plan was made on; a later state refuses it.
        owner: the manager's state; a plan of another manager is refused.
        tables: the manager's own tables of the sequences; this and the following fields are for `commit`.
        counts: number of new tokens of each sequence.
        ends: number of tokens of each sequence after the step.
        growths: mapping from position in the work to the blocks that its table takes.
        moves: mapping from position in the work to whether the old of its table's state slots becomes a snapshot.
    """

    num_tokens: int
    blocks_needed: int
    version: int
    owner: Any
    tables: list[Any]
    counts: tuple[int, ...]
    ends: list[int]
    growths: dict[int, Any]
    moves: dict[int, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A step whose blocks are taken: it may be dispatched. The device scrubs, swaps, copies, then runs the rows.

    Attributes:
        step_id: increasing number; call `retire(step_id)` when the step's output was seen.
        rows: one row for each sequence, in the order of the work.
        copies: whole-block copies on the device.
        swaps: whole-block copies from or to host memory.
        blocks_to_scrub: blocks to fill with zeros before anything else, with `CacheConfig.scrub_on_free`: all that were
            freed since the last step, and those that this step took from the prefix cache.
        state_copies: copies of whole state slots on the device. All sources are read before a target is written.
        state_swaps: copies of whole state slots from or to host memory.
        slots_to_scrub: state slots to fill with zeros, as `blocks_to_scrub`.
    """

    step_id: int
    rows: StepRows = _NO_ROWS
    copies: tuple[BlockCopy, ...] = ()
    swaps: tuple[BlockSwap, ...] = ()
    blocks_to_scrub: tuple[int, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()
    state_swaps: tuple[StateSwap, ...] = ()
    slots_to_scrub: tuple[int, ...] = ()

    @property
    def moves_memory(self) -> bool:
        """Whether the device has blocks or slots to scrub, swap or copy before the rows."""
        blocks = self.copies or self.swaps or self.blocks_to_scrub
        return bool(blocks or self.state_copies or self.state_swaps or self.slots_to_scrub)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """A snapshot of the cache. `null + free + cached + used + deferred == num_blocks` at all times.

    Attributes:
        num_blocks: blocks of the pool.
        null: the null block; always 1.
        free: number of blocks without an owner or a key.
        cached: blocks without an owner whose prefix key still works; the evictable ones.
        used: blocks in the table of at least one sequence.
        deferred: blocks that only steps in flight still hold; free as soon as those retire.
        host_free: free slots of host memory.
        num_sequences: number of known sequences.
        steps_in_flight: steps committed and not retired.
        queried_tokens: number of prompt tokens that were looked up.
        hit_tokens: number of these tokens that were found.
        evictions: cached blocks that lost their key to a new owner.
        preemptions: preemptions of sequences that had run.
        forks: sequences made by `fork`.
        copies: blocks copied on write.
        swapped_out: blocks copied to host memory.
        swapped_in: blocks copied back.
        cancelled: sequences that were cancelled.
        steps: steps committed.
        num_slots: state slots, the null slot included; 0 for a cache without states.
        slots_free: state slots without an owner or a key.
        slots_cached: snapshots without an owner, the evictable ones.
        evicted_snapshots: snapshots that lost their slot.
        snapshots: states that were kept at a block boundary.
        state_copies: state slots copied on the device.
    """

    num_blocks: int
    null: int
    free: int
    cached: int
    used: int
    deferred: int
    host_free: int
    num_sequences: int
    steps_in_flight: int
    queried_tokens: int = 0
    hit_tokens: int = 0
    evictions: int
    preemptions: int = 0
    forks: int = 0
    copies: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    cancelled: int = 0
    steps: int
    num_slots: int = 0
    slots_free: int = 0
    slots_cached: int = 0
    evicted_snapshots: int = 0
    snapshots: int = 0
    state_copies: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of looked-up tokens that were found; 0.0 before the first look-up."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0
