"""A decode step through `jattn.nn.MultiHeadAttention` next to flax's own dense cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.bench.runner import Benchmark
from jattn.nn import MultiHeadAttention

_LAYERS = 32


@dataclass(frozen=True, slots=True)
class StepRow:
    """Milliseconds of a decode step by tokens present and room; see `step_times`."""

    tokens_present: int
    room_for: int
    jattn_ms: float
    flax_ms: float
    flax_over_jattn: float


@dataclass(frozen=True, slots=True)
class HostRow:
    """Milliseconds of the host for a dispatched step; see `host_times`."""

    way_of_calling: str
    ms: float


def run(
    *, batch: int = 8, context: int = 512, features: int = 512, rounds: int = 30, host: bool = False
) -> list[StepRow] | list[HostRow]:
    """Measures steps at three fillings of the cache, or the host's time for many layers.

    Args:
        batch: sequences.
        context: tokens that each sequence holds.
        features: width of 8 query and 8 key/value heads together.
        rounds: timed steps of each row.
        host: the host's time for a step of 32 layers instead.
    """
    if host:
        return host_times(batch, rounds)
    rows = []
    for present, room in ((context, 1), (context, 4), (context // 4, 4)):
        max_length = context * room + 16
        ours, flax = step_times(batch, present, max_length, features, rounds)
        rows.append(StepRow(present, max_length, ours, flax, flax / ours))
    return rows


def step_times(batch: int, context: int, max_length: int, features: int, rounds: int) -> tuple[float, float]:
    """Returns the median milliseconds of one decoded token for each sequence: ours, flax's; rounds alternate."""
    x, steps = jnp.ones((batch, 1, features)), []
    for kind in (MultiHeadAttention, nnx.MultiHeadAttention):
        module = kind(8, features, decode=True, rngs=nnx.Rngs(0))
        module.init_cache((batch, max_length, features))
        index: Any = module.cache_index
        index.set_value(jnp.full_like(index[...], context))
        steps.append(_Step(module, x))
    times = [[step.run() for step in steps] for _ in range(rounds + 3)][3:]
    ours, flax = zip(*times, strict=True)
    return statistics.median(ours), statistics.median(flax)


class _Step:
    """A module split once, its cache donated to each step; the length is constant, so that all rounds are equal."""

    def __init__(self, module: nnx.Module, x: jax.Array) -> None:
        self._graph, self._cache, self._rest = nnx.split(module, nnx.Cache, ...)
        self._index = jax.tree.map(jnp.copy, self._cache["cache_index"])
        self._x, self._step = x, jax.jit(self._decode, donate_argnums=0)

    def _decode(self, cache: Any, rest: Any, x: jax.Array) -> Any:
        module = nnx.merge(self._graph, cache, rest)
        y = module(x)  # type: ignore[operator]
        return nnx.state(module, nnx.Cache), y

    def run(self) -> float:
        self._cache["cache_index"] = jax.tree.map(jnp.copy, self._index)
        jax.block_until_ready(self._cache)
        started = time.perf_counter()
        self._cache, y = self._step(self._cache, self._rest, self._x)
        jax.block_until_ready(y)
        return (time.perf_counter() - started) * 1e3


class _Layers(nnx.Module):
    def __init__(self, batch: int) -> None:
        self.layers = nnx.List([MultiHeadAttention(8, 512, decode=True, rngs=nnx.Rngs(0)) for _ in range(_LAYERS)])
        for layer in self.layers:
            layer.init_cache((batch, 64, 512))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + layer(x)
        return x


def host_times(batch: int, rounds: int) -> list[HostRow]:
    """Returns the median milliseconds until a dispatched step of many layers returns to Python, by way of calling."""
    # Two models: a donated cache is gone for the other way of calling.
    x, model = jnp.ones((batch, 1, 512)), _Layers(batch)
    graph, cache, rest = nnx.split(_Layers(batch), nnx.Cache, ...)
    (leaves, tree), (weights, rest_tree) = jax.tree.flatten(cache), jax.tree.flatten(rest)

    def step(leaves: list[jax.Array], weights: list[jax.Array], x: jax.Array) -> Any:
        merged = nnx.merge(graph, jax.tree.unflatten(tree, leaves), jax.tree.unflatten(rest_tree, weights))
        y = merged(x)
        return jax.tree.leaves(nnx.state(merged, nnx.Cache)), y

    jitted, through_nnx = jax.jit(step, donate_argnums=0), nnx.jit(_Layers.__call__, donate_argnums=0)

    def split_once() -> Any:
        nonlocal leaves
        leaves, y = jitted(leaves, weights, x)
        return y

    return [
        HostRow("split once, jax.jit over leaves", _dispatch_ms(split_once, rounds)),
        HostRow("nnx.jit", _dispatch_ms(lambda: through_nnx(model, x), rounds)),
    ]


def _dispatch_ms(step: Callable[[], jax.Array], rounds: int) -> float:
    times = []
    for _ in range(rounds + 3):
        started = time.perf_counter()
        y = step()
        times.append((time.perf_counter() - started) * 1e3)
        jax.block_until_ready(y)
    return statistics.median(times[3:])


BENCHMARK = Benchmark("module", __doc__, run)
