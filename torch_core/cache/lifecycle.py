"""How sequences come, wait, split and go: admission, add, append, fork, preempt, resume, swap, finish, reset.

Of a swap to host memory and back this is the allocator's side; the pool else executes the copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, OutOfBlocks, RequestTooLong
from torch_core.cache.config import NULL_BLOCK
from torch_core.cache.keys import KeyChain, encode_root
from torch_core.cache.pool import BlockPool
from torch_core.cache.records import BlockSwap, CommittedStep, StateSwap
from torch_core.cache.state import CacheState, checked_tokens
from torch_core.cache.stepping import deferred_hint
from torch_core.cache.table import SequenceState, SequenceTable, SwappedTable

_MAX_ID_CHARACTERS = 1024


def check_admission(state: CacheState, seq_id: str | None, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuses a request that can never fit; see `CacheManager.check_admission`."""
    name = "the request" if seq_id is None else repr(seq_id)
    check_int(f"num_prompt_tokens of {name}", num_prompt_tokens, 1)
    check_int(f"max_new_tokens of {name}", max_new_tokens, 0)
    total = num_prompt_tokens + max_new_tokens
    config = state.config
    width = max(-(-total // group.block_size) for group in state.groups)
    asked = f"({num_prompt_tokens:,} prompt + {max_new_tokens:,} new tokens)"
    if config.max_blocks_per_seq is not None and width > config.max_blocks_per_seq:
        text = f"{name} needs {width} blocks {asked}; a block table has {config.max_blocks_per_seq} columns."
        raise RequestTooLong(text, argument="num_prompt_tokens")
    needed = sum(group.most_blocks(total, config.max_step_tokens) for group in state.groups)
    if needed > config.capacity:
        text = f"{name} needs {needed} blocks {asked}; the pool can ever give {config.capacity}."
        raise RequestTooLong(text, argument="num_prompt_tokens")


def add(
    state: CacheState,
    seq_id: str,
    token_ids: Sequence[int],
    salt: bytes | None,
    extra_keys: Iterable[bytes | str | int],
) -> int:
    """Registers a sequence; see `CacheManager.add`."""
    _check_new_id(state, seq_id)
    tokens = checked_tokens(token_ids)
    if not tokens:
        raise InvalidInput("token_ids", f"of {seq_id!r} is empty", "a sequence starts with at least one token")
    check_admission(state, seq_id, len(tokens), 0)
    config = state.config
    root: dict[str, Any] = {"model_fingerprint": config.model_fingerprint, "cache_dtype": config.cache_dtype}
    root["extra_keys"] = tuple(extra_keys) if not isinstance(extra_keys, (bytes, str)) else extra_keys
    chains = {
        size: KeyChain(encode_root(salt=salt, block_size=size, **root), size, verify=config.verify_tokens)
        for size in dict.fromkeys(group.block_size for group in state.groups)
    }
    sequence = SequenceState(seq_id, tokens, tuple(chains[group.block_size] for group in state.groups))
    state.sequences[seq_id] = sequence
    state.version += 1
    return state.attach_table(sequence)


def fork(state: CacheState, parent_id: str, child_id: str) -> int:
    """Adds a sequence that shares all blocks of another; see `CacheManager.fork`."""
    parent, table = _running(state, parent_id, "forked")
    _check_new_id(state, child_id)
    copies = {id(chain): chain.copy() for chain in parent.chains}
    child = SequenceState(child_id, parent.tokens[:], tuple(copies[id(chain)] for chain in parent.chains))
    if state.slots is not None and table.scheduled > len(parent.tokens):
        # The parent's state is that after tokens which the child does not get.
        length = state.attach_table(child)
    else:
        length = _share_table(state, table, child)
    state.sequences[child_id] = child
    state.counters["forks"] += 1
    state.version += 1
    return length


def preempt(state: CacheState, seq_id: str) -> None:
    """Takes a sequence's blocks away; see `CacheManager.preempt`."""
    sequence, table = _running(state, seq_id, "preempted")
    state.detach_table(sequence)
    # One that never ran only gives the cached prefix back that it held while it waited.
    state.counters["preemptions"] += table.last_step >= 0
    state.version += 1


def resume(state: CacheState, seq_id: str) -> int:
    """Brings a preempted sequence back; see `CacheManager.resume`."""
    sequence = state.known(seq_id)
    if sequence.swapped is not None:
        raise InvalidInput("seq_id", value=seq_id, wanted="it is swapped out, not preempted: call swap_in")
    if sequence.table is not None:
        wanted = "it is not preempted: only preempt() or reset() puts one there"
        raise InvalidInput("seq_id", value=seq_id, wanted=wanted)
    state.version += 1
    return state.attach_table(sequence)


def swap_out(state: CacheState, seq_id: str) -> CommittedStep:
    """Gives a sequence host slots for its blocks; see `CacheManager.swap_out`."""
    sequence, table = _running(state, seq_id, "swapped out")
    needed = sum(block != NULL_BLOCK for blocks in table.blocks for block in blocks)
    if needed > len(state.host_free):
        raise OutOfBlocks(
            f"swapping out sequence {seq_id!r} needs {needed} host blocks; {len(state.host_free)} of "
            f"{state.config.num_host_blocks} are free. Preempt it instead, or swap another one in.",
            needed=needed,
            free=len(state.host_free),
        )
    state_slots = state.slots.host_free if state.slots is not None and table.slot != NULL_BLOCK else None
    if state_slots is not None and not state_slots:
        raise OutOfBlocks(
            f"swapping out sequence {seq_id!r} needs a host slot for its state, and none is free. Preempt it instead, "
            "or swap another one in.",
            needed=1,
            free=0,
        )
    step_id, record = state.open_step()
    swaps: list[BlockSwap] = []
    slots: list[list[int | None]] = []
    for number, blocks in enumerate(table.blocks):
        column = [None if block == NULL_BLOCK else state.host_free.pop() for block in blocks]
        slots.append(column)
        pairs = zip(blocks, column, strict=True)
        swaps += [BlockSwap(block, slot, True, number) for block, slot in pairs if slot is not None]
    state_slot = None if state_slots is None else state_slots.pop()
    sequence.swapped = SwappedTable(
        slots, table.scheduled, table.retired, table.dropped.copy(), step_id, state_slot, table.boundaries
    )
    sequence.table = None
    table.leave()
    table.last_step = step_id
    record.leaving.append(table)
    state.counters["swapped_out"] += len(swaps)
    state.version += 1
    state_swaps = () if state_slot is None else (StateSwap(table.slot, state_slot, True),)
    return state.committed(step_id, swaps=tuple(swaps), state_swaps=state_swaps)


def swap_in(state: CacheState, seq_id: str) -> CommittedStep:
    """Gives a swapped-out sequence blocks again; see `CacheManager.swap_in`."""
    sequence = state.known(seq_id)
    swapped = sequence.swapped
    if swapped is None:
        raise InvalidInput("seq_id", value=seq_id, wanted="it is not swapped out: only swap_out() puts one there")
    pool = state.pool
    needed = sum(slot is not None for column in swapped.slots for slot in column)
    if needed > pool.num_available:
        text = f"swapping in sequence {seq_id!r} needs {needed} blocks"
        raise pool.out_of_blocks(text, needed, f".{deferred_hint(state)}")
    slot_pool = state.slots.pool if state.slots is not None and swapped.state_slot is not None else None
    if slot_pool is not None and not slot_pool.num_available:
        text = f"swapping in sequence {seq_id!r} needs a state slot"
        raise slot_pool.out_of_blocks(text, 1, f".{deferred_hint(state)}")
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
    table.boundaries = swapped.boundaries
    step_id, record = state.open_step()
    state_swaps: tuple[StateSwap, ...] = ()
    if slot_pool is not None and swapped.state_slot is not None:
        (table.slot,) = slot_pool.take(1)
        state_swaps = (StateSwap(table.slot, swapped.state_slot, False),)
        record.host_state_slots.append(swapped.state_slot)
    table.last_step = step_id
    record.tables.append(table)
    record.ends.append(swapped.scheduled)
    sequence.table = table
    sequence.swapped = None
    record.host_slots.extend(slot for column in swapped.slots for slot in column if slot is not None)
    state.counters["swapped_in"] += len(swaps)
    state.version += 1
    return state.committed(step_id, swaps=swaps, state_swaps=state_swaps)


def remove(state: CacheState, seq_id: str) -> None:
    """Forgets a sequence; see `CacheManager.finish`."""
    sequence = state.known(seq_id)
    del state.sequences[seq_id]
    state.detach_table(sequence)
    state.drop_host_slots(sequence)
    state.version += 1


def reset(state: CacheState) -> None:
    """Forgets the content of all blocks; see `CacheManager.reset`."""
    for sequence in state.sequences.values():
        sequence.table = sequence.swapped = None
    old, old_slots = state.pool, state.slots
    state.clear_blocks()
    _note_dirty(old, state.pool)
    if old_slots is not None and state.slots is not None:
        _note_dirty(old_slots.pool, state.slots.pool)
    state.version += 1


def _note_dirty(old: BlockPool, new: BlockPool) -> None:
    if old.dirty is not None:
        # New memory would be clean, but nothing here can know that it is new.
        clean = {*old.free} - {*old.dirty}
        new.dirty = [block for block in range(1, old.num_blocks) if block not in clean]


def _share_table(state: CacheState, table: SequenceTable, child: SequenceState) -> int:
    """Gives a fork the blocks of its parent's table up to the last known token; returns that number of tokens."""
    length = min(table.scheduled, len(child.tokens))
    blocks = [
        column[: -(-length // group.block_size)] for column, group in zip(table.blocks, state.groups, strict=True)
    ]
    twin = SequenceTable(child, blocks, length)
    twin.retired = min(table.retired, length)
    twin.published = table.published.copy()
    twin.dropped = table.dropped.copy()
    twin.last_step = table.last_step
    # Below its limit a table may write without looking who else holds its tail; both must look now.
    twin.limit = length
    table.limit = min(table.limit, table.scheduled)
    for column in blocks:
        state.pool.hold(column)
    if state.slots is not None:
        twin.slot, twin.boundaries = table.slot, table.boundaries
        state.slots.pool.hold((twin.slot,))
    child.table = twin
    return length


def _running(state: CacheState, seq_id: str, verb: str) -> tuple[SequenceState, SequenceTable]:
    """Returns a sequence and its table, or raises InvalidInput if it has no blocks on the device."""
    sequence = state.known(seq_id)
    if sequence.table is None:
        place = "preempted" if sequence.swapped is None else "swapped out"
        wanted = f"it is {place}, has no blocks on the device and cannot be {verb}"
        raise InvalidInput("seq_id", value=seq_id, wanted=wanted)
    return sequence, sequence.table


def _check_new_id(state: CacheState, seq_id: object) -> None:
    if not isinstance(seq_id, str) or not 1 <= len(seq_id) <= _MAX_ID_CHARACTERS:
        shown = f"has {len(seq_id)} characters" if isinstance(seq_id, str) else f"is a {type(seq_id).__name__}"
        raise InvalidInput("seq_id", shown, f"it must be a string of 1 to {_MAX_ID_CHARACTERS} characters")
    if seq_id in state.sequences:
        raise InvalidInput("seq_id", value=seq_id, wanted="it exists already: finish it first, or choose another id")
