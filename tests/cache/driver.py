"""Random moves on the model, decided by a source of small numbers: shared by hypothesis and by the long nightly run."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.cache.model import Model
from torch_core.cache import CacheConfig, CacheGroup, StateConfig

#: Draws an int from 0 to the argument, inclusive.
Draw = Callable[[int], int]

MOST_SEQUENCES = 4
MOST_TOKENS = 14
MOST_IN_FLIGHT = 4
SALTS = (None, b"tenant")


def draw_config(draw: Draw, *, states: bool = False) -> CacheConfig:
    """Draws a tiny cache: everything collides and runs out often. It has states, or half the time."""
    layout = draw(5)
    window, chunk, groups = None, None, ()
    if layout == 1:
        window = 1 + draw(4)
    elif layout == 2:
        chunk = 1 + draw(4)
    elif layout == 3:
        groups = (CacheGroup(name="full"), CacheGroup(name="window", sliding_window=2 + draw(3)))
    elif layout == 4:
        groups = (CacheGroup(name="full"), CacheGroup(name="latent", block_size=4))
    return CacheConfig(
        num_blocks=4 + draw(9) + 6 * bool(groups),
        block_size=2,
        sliding_window=window,
        attention_chunk=chunk,
        groups=groups,
        enable_prefix_caching=draw(7) > 0,
        watermark_blocks=draw(1),
        num_host_blocks=draw(1) * 5,
        verify_tokens=draw(3) == 0,
        scrub_on_free=draw(1) == 0,
        states=StateConfig(num_slots=4 + draw(5), snapshot_blocks=1 + draw(2), num_host_slots=draw(2))
        if states or draw(1)
        else None,
    )


class Driver:
    """Makes one legal move at a time on a model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.made = 0
        self.moves = (
            self.add,
            self.grow,
            self.grow,
            self.grow,
            self.batch,
            self.batch,
            self.reveal,
            self.sample,
            self.retire,
            self.retire,
            self.retire,
            self.leave,
            self.fork,
            self.preempt,
            self.resume,
            self.swap,
            self.refused,
            self.rare,
        )

    def move(self, draw: Draw) -> None:
        """Makes the move that the first number chooses, as far as the state allows, and checks everything."""
        self.moves[draw(len(self.moves) - 1)](draw)
        self.model.check()

    def add(self, draw: Draw) -> None:
        if len(self.model.sequences) >= MOST_SEQUENCES:
            return
        room = self.model.config.capacity * self.model.config.block_size // len(self.model.groups) // 2
        length = 1 + draw(min(7, max(0, room - 1)))
        tokens = [draw(1) for _ in range(length)]
        self.model.add(self._fresh_name(), tokens, SALTS[draw(1)])

    def grow(self, draw: Draw) -> None:
        name = self._pick(draw, "device")
        if name is not None:
            self._step(draw, [name])

    def batch(self, draw: Draw) -> None:
        self._step(draw, self._names("device"))

    def reveal(self, draw: Draw) -> None:
        names = [n for n in self._names("device", "host") if self._hidden(n)]
        if names:
            self.model.reveal(names[draw(len(names) - 1)], 1 + draw(2))

    def sample(self, draw: Draw) -> None:
        names = [n for n in self._names("device", "host", "waiting") if self._can_sample(n)]
        if names:
            self.model.sample(names[draw(len(names) - 1)], draw(2))

    def retire(self, draw: Draw) -> None:
        waiting = [s for s, flight in self.model.flights.items() if not flight.done]
        if waiting:
            step_id = waiting[min(draw(3), len(waiting) - 1) if draw(2) == 0 else 0]
            cuttable = self.model.cuttable(step_id) if draw(1) else {}
            kept = {name: least + draw(most - least) for name, (least, most) in cuttable.items()}
            self.model.retire(step_id, kept or None)

    def leave(self, draw: Draw) -> None:
        name = self._pick(draw, "device", "host", "waiting")
        if name is not None:
            self.model.leave(name, cancel=draw(1) == 1)

    def fork(self, draw: Draw) -> None:
        name = self._pick(draw, "device")
        if name is not None and len(self.model.sequences) < MOST_SEQUENCES:
            self.model.fork(name, self._fresh_name())

    def preempt(self, draw: Draw) -> None:
        name = self._pick(draw, "device")
        if name is not None:
            self.model.preempt(name)

    def resume(self, draw: Draw) -> None:
        name = self._pick(draw, "waiting")
        if name is not None:
            self.model.resume(name)

    def swap(self, draw: Draw) -> None:
        name = self._pick(draw, "device", "host")
        if name is None or len(self.model.flights) >= MOST_IN_FLIGHT:
            return
        if self.model.sequences[name].place == "host":
            self.model.swap_in(name)
        elif self.model.config.num_host_blocks:
            self.model.swap_out(name)

    def refused(self, draw: Draw) -> None:
        name = self._pick(draw, "device", "host", "waiting")
        if name is not None:
            self.model.refuse(draw(10), name)

    def rare(self, draw: Draw) -> None:
        choice = draw(11)
        if choice == 0:
            self.model.reset()
        elif choice == 1:
            self.model.drain()
        elif choice < 6 and self.model.config.scrub_on_free and len(self.model.flights) < MOST_IN_FLIGHT:
            self.model.scrub()

    def _step(self, draw: Draw, names: list[str]) -> None:
        if len(self.model.flights) >= MOST_IN_FLIGHT:
            return
        work = []
        for name in names:
            sequence = self.model.sequences[name]
            count = min(1 + draw(4), MOST_TOKENS - sequence.computed)
            if count and draw(1):
                count = self.model.cache.until_snapshot(name, count)
            true = sequence.tokens[sequence.computed : sequence.computed + count]
            # Beyond its true tokens a step computes what it samples itself, or drafts that may come to nothing.
            if len(true) < count:
                true += [draw(2) for _ in range(count - len(true) if draw(1) else not true)]
            if true:
                work.append((name, true))
        if work:
            self.model.step(work)

    def _hidden(self, name: str) -> bool:
        sequence = self.model.sequences[name]
        return sequence.known < len(sequence.tokens)

    def _can_sample(self, name: str) -> bool:
        sequence = self.model.sequences[name]
        if sequence.place == "waiting":
            return len(sequence.tokens) == sequence.known < MOST_TOKENS
        return sequence.computed == sequence.known == len(sequence.tokens) < MOST_TOKENS

    def _names(self, *places: str) -> list[str]:
        return [name for name, sequence in self.model.sequences.items() if sequence.place in places]

    def _pick(self, draw: Draw, *places: str) -> str | None:
        names = self._names(*places)
        return names[draw(len(names) - 1)] if names else None

    def _fresh_name(self) -> str:
        self.made += 1
        return f"s{self.made}"


def run_trace(seed: int, moves: int, *, states: bool = False) -> Model:
    """Makes `moves` random moves from one seed and drains; a failure names the seed."""
    source = random.Random(seed).random
    driver = Driver(Model(draw_config(lambda most: int(source() * (most + 1)), states=states)))
    try:
        for _ in range(moves):
            driver.move(lambda most: int(source() * (most + 1)))
        driver.model.drain()
    except Exception as error:
        error.add_note(f"seed {seed}, {driver.model.config}")
        raise
    return driver.model
