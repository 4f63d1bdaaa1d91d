"""Every sequence of moves on a tiny cache, up to a depth: nothing random, and no state is visited twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cache.model import Model
from torch_core.cache import CacheConfig

Move = tuple[str, ...]

#: Two prompts with one shared block; together they do not fit into the pool.
PROMPTS = {"short": [1, 2, 3], "long": [1, 2, 4, 5]}
MOST_TOKENS = 6


def explore(config: CacheConfig, names: tuple[str, ...], depth: int) -> tuple[int, int]:
    """Makes every legal move in every reachable state; returns the numbers of states and of moves."""
    start = Model(config)
    seen = {fingerprint(start)}
    frontier: list[tuple[Move, ...]] = [()]
    moves_made = 0
    for _ in range(depth):
        deeper: list[tuple[Move, ...]] = []
        for path in frontier:
            for move in list(legal_moves(replay(config, path), names)):
                model = replay(config, path)
                make(model, move)
                model.check()
                moves_made += 1
                key = fingerprint(model)
                if key not in seen:
                    seen.add(key)
                    deeper.append((*path, move))
                    model.drain()
        frontier = deeper
    return len(seen), moves_made


def replay(config: CacheConfig, path: tuple[Move, ...]) -> Model:
    """Returns the model after a path of moves."""
    model = Model(config)
    for move in path:
        make(model, move)
    return model


def legal_moves(model: Model, names: tuple[str, ...]) -> Iterator[Move]:
    """Yields each move that makes sense now."""
    # Names are interchangeable: the first sequence of an empty cache has the first name.
    for name in names if model.sequences else names[:1]:
        sequence = model.sequences.get(name)
        if sequence is None:
            yield from (("add", name, prompt) for prompt in PROMPTS)
            yield from (("fork", parent, name) for parent in names if _on_device(model, parent))
            continue
        yield ("leave", name)
        if sequence.place == "waiting":
            yield ("resume", name)
            continue
        yield ("preempt", name)
        if sequence.computed < MOST_TOKENS and len(model.flights) < 3:
            yield ("step", name)
            if sequence.computed >= len(sequence.tokens) - 1 and sequence.computed + 3 <= MOST_TOKENS:
                yield ("draft", name)
        if sequence.known < len(sequence.tokens):
            yield ("reveal", name)
    if all(_on_device(model, name) and model.sequences[name].computed < MOST_TOKENS for name in names):
        yield ("step", *names)
    waiting = [step_id for step_id, flight in model.flights.items() if not flight.done]
    if waiting:
        yield ("retire", "oldest")
        if len(waiting) > 1:
            yield ("retire", "newest")
        for name, (least, most) in model.cuttable(waiting[-1]).items():
            yield from (("cut", name, str(kept)) for kept in range(least, most + 1))


def make(model: Model, move: Move) -> None:
    """Makes one move."""
    verb, *names = move
    handlers: dict[str, Callable[..., Any]] = {
        "add": lambda name, prompt: model.add(name, PROMPTS[prompt], None),
        "fork": model.fork,
        "leave": lambda name: model.leave(name, cancel=False),
        "resume": model.resume,
        "preempt": model.preempt,
        "reveal": lambda name: model.reveal(name, 1),
        "step": lambda *chosen: model.step([(name, _next_tokens(model, name)) for name in chosen]),
        "draft": lambda name: model.step([(name, [*_next_tokens(model, name), 8, 9][:3])]),
        "retire": lambda which: _retire(model, which),
        "cut": lambda name, kept: _retire(model, "newest", {name: int(kept)}),
    }
    handlers[verb](*names)


def fingerprint(model: Model) -> Any:
    """Returns what decides a state's future, without totals and with step ids counted from the oldest in flight."""
    state = model.cache._state
    ages = {step_id: age for age, step_id in enumerate(state.steps)}

    def table_key(table: Any) -> Any:
        if table is None:
            return None
        blocks = tuple(map(tuple, table.blocks))
        progress = (tuple(table.published), tuple(table.dropped), table.scheduled, table.retired, table.trusted)
        return (table.seq_id, blocks, progress, table.limit, ages.get(table.last_step))

    sequences = tuple((name, tuple(s.tokens), table_key(s.table)) for name, s in state.sequences.items())
    steps = tuple(
        (
            tuple(map(table_key, record.tables)),
            record.counts,
            tuple(record.ends),
            tuple(map(table_key, record.leaving)),
            tuple(record.dropped),
            tuple(record.pinned),
            record.seen,
        )
        for record in state.steps.values()
    )
    truth = tuple((name, tuple(s.tokens), s.known, s.computed, s.place) for name, s in model.sequences.items())
    pool = (tuple(state.pool.free), tuple(state.pool.cached), tuple(state.pool.refs))
    keys = tuple(sorted((block, digest) for block, (_, digest, _) in state.index.keys.items()))
    return hash((sequences, steps, truth, pool, keys))


def _on_device(model: Model, name: str) -> bool:
    return name in model.sequences and model.sequences[name].place == "device"


def _next_tokens(model: Model, name: str) -> list[int]:
    sequence = model.sequences[name]
    return sequence.tokens[sequence.computed :] or [7]


def _retire(model: Model, which: str, kept: dict[str, int] | None = None) -> None:
    waiting = [step_id for step_id, flight in model.flights.items() if not flight.done]
    model.retire(waiting[0 if which == "oldest" else -1], kept)


@pytest.mark.parametrize("depth", [6, pytest.param(7, marks=pytest.mark.nightly)])
def test_every_short_path_with_three_blocks_and_two_sequences(depth):
    states, moves = explore(CacheConfig(num_blocks=4, block_size=2), ("a", "b"), depth)
    print(f"{states} states, {moves} moves")
    assert states > 150 * depth


@pytest.mark.nightly
@pytest.mark.parametrize("window", [None, 2, 3])
def test_every_path_of_nine_moves(window):
    config = CacheConfig(num_blocks=5, block_size=2, sliding_window=window)
    states, moves = explore(config, ("a", "b"), depth=9)
    print(f"window {window}: {states} states, {moves} moves")
