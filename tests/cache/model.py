"""A plain model of a device beside a cache manager: what each slot holds, who may write it, what may be shared.

The model knows the true tokens of every sequence, also of those whose ids the manager has not been told yet. It runs a
committed step as late as it can, when that step or a later one is retired, and then compares every slot that the step
can see with what the tokens say must be there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.cache.snapshot import snapshot
from torch_core.base.errors import JattnError, OutOfBlocks
from torch_core.cache import CacheConfig, CacheManager, CommittedStep


class BrokenPromiseError(AssertionError):
    """The manager broke a promise."""


@dataclass
class ModelSequence:
    """The model's view of one sequence."""

    salt: bytes | None
    tokens: list[int]
    known: int
    computed: int
    place: str = "device"
    blocks: tuple[tuple[int, ...], ...] = ()
    table_number: int = 0

    def lose_table(self, place: str) -> None:
        self.place, self.blocks = place, ()
        self.table_number += 1

    def state(self, num_tokens: int) -> Any:
        return ("state", self.salt, tuple(self.tokens[:num_tokens])) if num_tokens else None

    def content(self, group: int, position: int) -> Any:
        return (group, self.salt, tuple(self.tokens[: position + 1]))


@dataclass
class Flight:
    """A committed step: what the device will do, and who may meanwhile write what it touches."""

    step: CommittedStep
    writes: list[tuple[int, int, Any]] = field(default_factory=list)
    reads: list[tuple[int, int, Any, str]] = field(default_factory=list)
    writers: dict[int, set[str]] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)
    states: list[tuple[str, int, Any, Any]] = field(default_factory=list)
    fresh_slots: list[int] = field(default_factory=list)
    starts: dict[str, tuple[ModelSequence, int, int]] = field(default_factory=dict)
    done: bool = False
    ran: bool = False


class Model:
    """Drives a manager and checks it after every call."""

    def __init__(self, config: CacheConfig, manager: type[CacheManager] = CacheManager) -> None:
        self.config = config
        self.groups = config.layouts
        self.windows = [(g.sliding_window, g.attention_chunk) for g in config.groups] or [
            (config.sliding_window, config.attention_chunk)
        ]
        self.cache = manager(config)
        self.sequences: dict[str, ModelSequence] = {}
        self.memory: dict[tuple[int, int], Any] = {}
        self.host: dict[int, dict[int, Any]] = {}
        self.state_memory: dict[int, Any] = {}
        self.state_host: dict[int, Any] = {}
        self.flights: dict[int, Flight] = {}
        self.complete: set[Any] = set()
        self.refused = 0
        self.cuts = 0
        self.scrubbed = self.scrubbed_slots = 0

    # Verbs

    def add(self, name: str, tokens: list[int], salt: bytes | None) -> None:
        hit = self.cache.add(name, tokens, salt=salt)
        self.sequences[name] = ModelSequence(salt, list(tokens), len(tokens), hit)
        self._check_hit(name, hit)

    def resume(self, name: str) -> None:
        sequence = self.sequences[name]
        # What was in flight at the preemption is sampled again, and may come out differently.
        del sequence.tokens[sequence.known :]
        sequence.computed = self.cache.resume(name)
        sequence.place = "device"
        self._check_hit(name, sequence.computed)

    def step(self, work: list[tuple[str, list[int]]]) -> bool:
        """Commits one step: for each sequence, the true ids of its new tokens (those known already included)."""
        counted = [(name, len(tokens)) for name, tokens in work]
        before = self.cache.stats()
        try:
            plan = self.cache.plan(counted)
        except OutOfBlocks as error:
            self.refused += 1
            after = self.cache.stats()
            counts = ((after.free, after.cached), (after.slots_free, after.slots_cached))
            if before != after or (error.free, error.evictable) not in counts:
                raise BrokenPromiseError(
                    f"a refused plan changed {before} to {after}, or carries wrong numbers"
                ) from error
            return False
        if self.cache.stats() != before:
            raise BrokenPromiseError("plan changed the state")
        step = self.cache.commit(plan)
        flight = Flight(step)
        for copy in step.copies:
            holders = {name for name, s in self.sequences.items() if any(copy.source in ids for ids in s.blocks)}
            flight.writers.setdefault(copy.source, set()).update(holders)
        if len(step.rows) != len(work):
            raise BrokenPromiseError("a step has a row for each sequence")
        for row, (name, tokens) in zip(step.rows, work, strict=True):
            sequence = self.sequences[name]
            if (row.seq_id, row.num_computed_tokens, row.num_new_tokens) != (name, sequence.computed, len(tokens)):
                raise BrokenPromiseError(
                    f"row {row} is not what was asked for: {name}, {sequence.computed}, {len(tokens)}"
                )
            sequence.tokens[sequence.computed : sequence.computed + len(tokens)] = tokens
            for number, group in enumerate(self.groups):
                ids = row.group_block_ids[number]
                held = len(sequence.blocks[number]) if sequence.blocks else 0
                flight.fresh.extend(ids[max(held, -(-sequence.computed // group.block_size)) :])
            flight.starts[name] = (sequence, sequence.table_number, sequence.computed)
            sequence.blocks = row.group_block_ids
            self._claim(flight, name, sequence, len(tokens))
            if self.config.states is not None:
                start, end = sequence.computed, sequence.computed + len(tokens)
                flight.states.append((name, row.state_slot, sequence.state(start), sequence.state(end)))
            sequence.computed += len(tokens)
        flight.fresh_slots.extend(copy.target for copy in step.state_copies)
        slots = [slot for _, slot, _, _ in flight.states]
        if len(set(slots)) != len(slots) or 0 in slots:
            raise BrokenPromiseError(f"the rows of step {step.step_id} have state slots {slots}")
        for copy in step.copies:
            flight.fresh.append(copy.target)
            self._check_writer(
                copy.target, next(r.seq_id for r in step.rows if copy.target in r.group_block_ids[copy.group])
            )
        written = [slot[:2] for slot in flight.writes]
        if len(set(written)) != len(written):
            raise BrokenPromiseError(f"two tokens of step {step.step_id} have one slot")
        self.flights[step.step_id] = flight
        return True

    def reveal(self, name: str, count: int) -> None:
        """Tells the manager the next true ids that it does not know."""
        sequence = self.sequences[name]
        fresh = sequence.tokens[sequence.known : sequence.known + count]
        self.cache.append_tokens(name, fresh)
        sequence.known += len(fresh)

    def sample(self, name: str, token: int) -> None:
        """Makes a new token known that no step has used yet."""
        sequence = self.sequences[name]
        self.cache.append_tokens(name, [token])
        sequence.tokens.append(token)
        sequence.known += 1

    def fork(self, parent: str, child: str) -> None:
        source = self.sequences[parent]
        start = self.cache.fork(parent, child)
        if self.config.states is not None and source.computed > source.known:
            self.sequences[child] = ModelSequence(source.salt, source.tokens[: source.known], source.known, start)
            self._check_hit(child, start)
            return
        if start != min(source.computed, source.known):
            raise BrokenPromiseError(f"the fork starts at {start}")
        blocks = tuple(
            ids[: -(-start // (group.block_size))] for ids, group in zip(source.blocks, self.groups, strict=False)
        )
        # Who shares a block may write behind a step in flight, for steps run in order; a new owner may not.
        for flight in self.flights.values():
            for block in {block for ids in blocks for block in ids} & flight.writers.keys():
                flight.writers[block].add(child)
        self.sequences[child] = ModelSequence(
            source.salt, source.tokens[: source.known], source.known, start, blocks=blocks
        )

    def leave(self, name: str, *, cancel: bool) -> None:
        (self.cache.cancel if cancel else self.cache.finish)(name)
        del self.sequences[name]

    def preempt(self, name: str) -> None:
        self.cache.preempt(name)
        sequence = self.sequences[name]
        sequence.lose_table("waiting")
        sequence.computed = 0

    def swap_out(self, name: str) -> bool:
        return self._swap(name, "host")

    def swap_in(self, name: str) -> bool:
        return self._swap(name, "device")

    def retire(self, step_id: int, kept: dict[str, int] | None = None) -> None:
        """Runs the device up to the step, then retires it; of a sequence in `kept` only so many new tokens stand."""
        for flight in self.flights.values():
            if flight.step.step_id <= step_id and not flight.ran:
                self._run(flight)
        flight = self.flights[step_id]
        flight.done = True
        if kept is None:
            self.cache.retire(step_id)
        else:
            self.cache.retire(step_id, kept)
            for name, count in kept.items():
                self._cut(flight, name, count)
        while self.flights:
            oldest = next(iter(self.flights))
            if not self.flights[oldest].done:
                break
            self._note_complete(self.flights.pop(oldest))

    def cuttable(self, step_id: int) -> dict[str, tuple[int, int]]:
        """Returns the least and the most that each row may keep, for the rows that may keep less than all."""
        flight = self.flights[step_id]
        found = {}
        for name, (sequence, number, start) in flight.starts.items():
            later = any(name in other.starts for other_id, other in self.flights.items() if other_id > step_id)
            if self.sequences.get(name) is not sequence or sequence.table_number != number or later:
                continue
            least = max(1, sequence.known - start)
            if least < sequence.computed - start:
                found[name] = (least, sequence.computed - start - 1)
        return found

    def _cut(self, flight: Flight, name: str, count: int) -> None:
        self.cuts += 1
        sequence, _, start = flight.starts[name]
        end = start + count
        # The next id is still to be drawn: what the step had there came to nothing.
        del sequence.tokens[end:]
        self.state_memory.update({slot: sequence.state(end) for row, slot, *_ in flight.states if row == name})
        gone = {
            (ids[position // group.block_size], position % group.block_size)
            for ids, group in zip(sequence.blocks, self.groups, strict=True)
            for position in range(end, sequence.computed)
        }
        flight.writes = [write for write in flight.writes if write[:2] not in gone]
        if self.cache.num_computed_tokens(name) != end:
            raise BrokenPromiseError(f"{name} continues from {self.cache.num_computed_tokens(name)}, not from {end}")
        sequence.computed = end
        sequence.blocks = tuple(
            ids[: -(-end // group.block_size)] for ids, group in zip(sequence.blocks, self.groups, strict=True)
        )

    def reset(self) -> None:
        self.cache.reset()
        self.flights.clear()
        self.complete.clear()
        self.memory.clear()
        self.host.clear()
        self.state_memory.clear()
        self.state_host.clear()
        for sequence in self.sequences.values():
            sequence.lose_table("waiting")
            sequence.computed = 0

    def refuse(self, choice: int, name: str) -> None:
        """Makes a call that can be refused, and demands that a refused one leaves the state deeply equal."""
        cache = self.cache
        calls = (
            lambda: cache.finish("nobody"),
            lambda: cache.fork("nobody", "child"),
            lambda: cache.fork(name, name),
            lambda: cache.add(name, [1]),
            lambda: cache.add("child", [1] * (2 + self.config.num_blocks * 4)),
            lambda: cache.append_tokens(name, [1, -1]),
            lambda: cache.plan([(name, self.config.num_blocks * 4)]),
            lambda: cache.plan([(name, 1), (name, 1)]),
            lambda: cache.step([(other, self.config.num_blocks * 4) for other in self.sequences]),
            lambda: cache.retire(-1),
            lambda: cache.retire(next(iter(self.flights), -1), {"nobody": 1}),
        )
        before = snapshot(cache)
        try:
            calls[choice]()
        except JattnError as error:
            self.refused += 1
            if snapshot(cache) != before:
                raise BrokenPromiseError(f"refused call {choice} changed the state: {error}") from error
        else:
            raise BrokenPromiseError(f"call {choice} of {name} was not refused")

    # Checks

    def check(self) -> None:
        """Audits the manager and compares its counts."""
        self.cache.audit()
        stats = self.cache.stats()
        total = stats.null + stats.free + stats.cached + stats.used + stats.deferred
        if total != self.config.num_blocks or min(stats.free, stats.cached, stats.used, stats.deferred) < 0:
            raise BrokenPromiseError(f"blocks do not add up: {stats}")
        if (stats.num_sequences, stats.steps_in_flight) != (len(self.sequences), len(self.flights)):
            raise BrokenPromiseError(f"counts are wrong: {stats}")

    def drain(self) -> None:
        """Ends everything; no block may be left."""
        for name in list(self.sequences):
            self.leave(name, cancel=False)
        for step_id in [s for s, flight in self.flights.items() if not flight.done]:
            self.retire(step_id)
        self.check()
        stats = self.cache.stats()
        if stats.used or stats.deferred or stats.host_free != self.config.num_host_blocks:
            raise BrokenPromiseError(f"blocks leaked: {stats}")
        if stats.num_slots and stats.slots_free + stats.slots_cached != stats.num_slots - 1:
            raise BrokenPromiseError(f"state slots leaked: {stats}")
        if self.config.scrub_on_free:
            self._check_scrubbed()

    def scrub(self) -> int:
        step = self.cache.scrub()
        self.flights[step.step_id] = Flight(step)
        return step.step_id

    def _check_scrubbed(self) -> None:
        self.retire(self.scrub())
        cached = self.cache._state.pool.cached
        left = {block for (block, _), content in self.memory.items() if content is not None and block not in cached}
        if left:
            raise BrokenPromiseError(f"blocks {sorted(left)} are free and still hold content")
        slots = self.cache._state.slots
        kept = slots.pool.cached if slots is not None else ()
        left = {slot for slot, content in self.state_memory.items() if content is not None and slot not in kept}
        if left:
            raise BrokenPromiseError(f"state slots {sorted(left)} are free and still hold content")

    def _claim(self, flight: Flight, name: str, sequence: ModelSequence, count: int) -> None:
        start, end = sequence.computed, sequence.computed + count
        for number, group in enumerate(self.groups):
            size = group.block_size
            ids = sequence.blocks[number]
            if len(ids) != -(-end // size):
                raise BrokenPromiseError(f"{name} has {len(ids)} blocks for {end} tokens")
            first = self._first_visible(number, start)
            for position in range(first, end):
                block, content = ids[position // size], sequence.content(number, position)
                if not 0 < block < self.config.num_blocks:
                    raise BrokenPromiseError(f"{name} needs token {position}, but its block is {block}")
                if position >= start:
                    self._check_writer(block, name)
                    flight.writes.append((block, position % size, content))
                flight.reads.append((block, position % size, content, name))
            for block in ids:
                if block:
                    flight.writers.setdefault(block, set()).add(name)

    def _first_visible(self, group: int, position: int) -> int:
        window, chunk = self.windows[group]
        visible = range(position + 1)
        if window is not None:
            visible = visible[-window:]
        if chunk is not None:
            visible = [p for p in visible if p // chunk == position // chunk]
        return visible[0]

    def _check_writer(self, block: int, name: str) -> None:
        for flight in self.flights.values():
            if block in flight.writers and name not in flight.writers[block]:
                raise BrokenPromiseError(
                    f"block {block} is written by {name} while step {flight.step.step_id} of "
                    f"{sorted(flight.writers[block])} is in flight"
                )

    def _run(self, flight: Flight) -> None:
        flight.ran = True
        size = max(group.block_size for group in self.groups)
        self.scrubbed += len(flight.step.blocks_to_scrub)
        for block in flight.step.blocks_to_scrub:
            self.memory.update({(block, i): None for i in range(size)})
        if self.config.scrub_on_free:
            for block in flight.fresh:
                if any(self.memory.get((block, i)) is not None for i in range(size)):
                    raise BrokenPromiseError(f"block {block} reached step {flight.step.step_id} with old content")
        for swap in flight.step.swaps:
            if swap.to_host:
                self.host[swap.host_block] = {i: self.memory.get((swap.device_block, i)) for i in range(size)}
            else:
                self.memory.update({(swap.device_block, i): v for i, v in self.host[swap.host_block].items()})
        for copy in flight.step.copies:
            self.memory.update({(copy.target, i): self.memory.get((copy.source, i)) for i in range(size)})
        self._run_states(flight)
        for block, offset, content in flight.writes:
            self.memory[block, offset] = content
        for block, offset, content, name in flight.reads:
            if self.memory.get((block, offset)) != content:
                raise BrokenPromiseError(
                    f"step {flight.step.step_id} of {name} reads {self.memory.get((block, offset))} in block {block}, "
                    f"offset {offset}; {content} should be there"
                )

    def _run_states(self, flight: Flight) -> None:
        step, memory = flight.step, self.state_memory
        self.scrubbed_slots += len(step.slots_to_scrub)
        memory.update(dict.fromkeys(step.slots_to_scrub))
        for slot in flight.fresh_slots:
            if self.config.scrub_on_free and memory.get(slot) is not None:
                raise BrokenPromiseError(f"state slot {slot} reached step {step.step_id} with old content")
        for swap in step.state_swaps:
            if swap.to_host:
                self.state_host[swap.host_slot] = memory.get(swap.device_slot)
            else:
                memory[swap.device_slot] = self.state_host[swap.host_slot]
        memory.update({copy.target: memory.get(copy.source) for copy in step.state_copies})
        for name, slot, before, after in flight.states:
            if before is not None and memory.get(slot) != before:
                raise BrokenPromiseError(
                    f"step {step.step_id} of {name} reads {memory.get(slot)} in state slot {slot}, not {before}"
                )
            memory[slot] = after

    def _note_complete(self, flight: Flight) -> None:
        self.complete.update(content for *_, content in flight.writes)

    def _check_hit(self, name: str, hit: int) -> None:
        sequence = self.sequences[name]
        if not 0 <= hit < sequence.known:
            raise BrokenPromiseError(f"{name} has {sequence.known} tokens and {hit} of them cached")
        for number, group in enumerate(self.groups):
            if hit % (group.block_size):
                raise BrokenPromiseError(f"{name} shares a partial block: {hit} tokens")
            for position in range(self._first_visible(number, hit), hit):
                if sequence.content(number, position) not in self.complete:
                    raise BrokenPromiseError(f"{name} shares token {position}, which no retired step has written")

    def _swap(self, name: str, place: str) -> bool:
        sequence = self.sequences[name]
        try:
            step = (self.cache.swap_out if place == "host" else self.cache.swap_in)(name)
        except OutOfBlocks:
            self.refused += 1
            return False
        flight = Flight(step)
        for swap in step.swaps:
            if place == "device":
                self._check_writer(swap.device_block, name)
            flight.writers.setdefault(swap.device_block, set()).add(name)
        sequence.lose_table(place)
        if place == "device":
            flight.fresh.extend(swap.device_block for swap in step.swaps)
            flight.fresh_slots.extend(swap.device_slot for swap in step.state_swaps)
            sequence.blocks = tuple(
                tuple(ids)
                for ids in self.cache._state.sequences[name].table.blocks  # type: ignore[union-attr]
            )
        self.flights[step.step_id] = flight
        return True
