"""Several devices of one process: sums of small arrays, decoding of spread sequences, and prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jattn import ops, parallel
from jattn.bench.runner import Benchmark, sizes
from torch_core.attention.call import PagedCall
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec

_HEADS, _KV_HEADS, _HEAD_SIZE, _BLOCK_SIZE = 32, 8, 128, 16
#: Calls of two programs, each of which waits for the one before: the difference has no start and no end. A sum takes
#: microseconds, and a program of several devices starts within a millisecond.
_SUMS, _DECODES, _PROMPTS = (64, 576), (16, 48), (1, 4)
_AXIS, _WHOLE = "devices", PartitionSpec()


@dataclass(frozen=True, slots=True)
class DevicesRow:
    """Microseconds of one call on one device and on all, and their ratio by the number of devices (1 is linear).

    Sums have none on one device; `one_us` is then XLA's own sum, and `of_linear` is its time by ours.
    """

    load: str
    devices: int
    one_us: float
    all_us: float
    of_linear: float


def run(
    *,
    devices: int | None = None,
    sums: Sequence[str] = ("1x4096", "64x4096", "64x8192"),
    decode: Sequence[int] = (524288, 1048576),
    prompt: Sequence[int] = (65536, 131072),
    rounds: int = 9,
) -> Iterator[DevicesRow]:
    """Yields a row for each load: 32 query and 8 key/value heads of 128 in bfloat16, blocks of 16 tokens.

    Args:
        devices: number of devices, two or more; None for all.
        sums: ROWSxWIDTH of bfloat16 arrays that all devices add up.
        decode: tokens of a sequence that is spread over the devices, for one new token.
        prompt: tokens of a prompt that the devices compute as a ring, and with gathered keys.
        rounds: timed rounds of a row, of which the median counts.
    """
    found = jax.devices()
    count = len(found) if devices is None else devices
    if not 2 <= count <= len(found):
        raise InvalidInput("devices", value=count, wanted=f"it must be 2 or more, and JAX sees {len(found)}")
    mesh = Mesh(np.asarray(found[:count], object), (_AXIS,))
    for text in sums:
        xla, ours = _sums(mesh, *sizes(text), rounds=rounds)
        yield DevicesRow(f"sum {text}", count, xla, ours, xla / ours)
    for length in decode:
        one, every = _decode(mesh, length, rounds)
        yield DevicesRow(f"decode {length}", count, one, every, one / every / count)
    for length in prompt:
        one, *others = _prompt(mesh, length, rounds)
        for way, every in zip(("ring", "gathered"), others, strict=True):
            yield DevicesRow(f"prompt {length}, {way}", count, one, every, one / every / count)


def _sums(mesh: Mesh, rows: int, width: int, *, rounds: int) -> tuple[float, float]:
    """Returns the microseconds of XLA's sum and of ours; the latter is NaN where the devices cannot use it."""
    peers = parallel.Peers.of(mesh, _AXIS)
    spec = PartitionSpec(_AXIS)
    x = _placed(mesh, jnp.ones((mesh.size * rows, width), jnp.bfloat16), spec)

    def chained(add: Callable[..., jax.Array], num_arrays: int) -> Callable[[int], Callable[..., jax.Array]]:
        def chain(calls: int) -> Callable[..., jax.Array]:
            def run(x: jax.Array, *table: jax.Array) -> jax.Array:
                for _ in range(calls):
                    x = add(x, _AXIS, *table) / mesh.size
                return x

            every = (spec,) * num_arrays
            return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=every, out_specs=spec, check_vma=False))

        return chain

    xla = _us_of_one(chained(jax.lax.psum, 1), (x,), rounds, _SUMS)
    if peers is None:
        return xla, float("nan")
    return xla, _us_of_one(chained(parallel.all_reduce, 2), (x, peers.table), rounds, _SUMS)


def _decode(mesh: Mesh, length: int, rounds: int) -> tuple[float, float]:
    peers = parallel.Peers.of(mesh, _AXIS)
    query = jnp.ones((1, _HEADS, _HEAD_SIZE), jnp.bfloat16)

    def measured(world: int, place: Callable[[int], jax.Array], wrap: Any) -> float:
        blocks = -(-length // (_BLOCK_SIZE * world))
        cache = place(world * blocks)
        tables, lens = jnp.arange(blocks, dtype=jnp.int32)[None], jnp.array([length], jnp.int32)

        def attend(calls: int, cache: jax.Array, table: Any, query: Any, tables: Any, lens: Any) -> jax.Array:
            for _ in range(calls):
                call = PagedCall(
                    query=query,
                    kv_cache=cache,
                    block_tables=tables,
                    seq_lens=lens,
                    query_start_loc=jnp.array([0, 1], jnp.int32),
                    spec=AttentionSpec(scale=_HEAD_SIZE**-0.5),
                    max_query_len=1,
                    with_lse=world > 1,
                )
                found = ops.run(call) if world == 1 else parallel.paged_attention(call, _AXIS, peers=table)
                query = found["out"]
            return query

        table = None if world == 1 or peers is None else peers.table
        operands = (cache, table, query, tables, lens)
        return _us_of_one(lambda calls: jax.jit(wrap(partial(attend, calls))), operands, rounds, _DECODES)

    def zeros(blocks: int, sharding: NamedSharding | None = None) -> jax.Array:
        shape = (blocks, 2, _BLOCK_SIZE, _KV_HEADS, _HEAD_SIZE)
        return jax.jit(lambda: jnp.zeros(shape, jnp.bfloat16), out_shardings=sharding)()

    parts = PartitionSpec(_AXIS)
    one = measured(1, zeros, lambda attend: attend)
    options: dict[str, Any] = {"mesh": mesh, "in_specs": (parts, parts, *[_WHOLE] * 3), "out_specs": _WHOLE}
    spread: Any = partial(jax.shard_map, **options, check_vma=False)
    return one, measured(mesh.size, partial(zeros, sharding=NamedSharding(mesh, parts)), spread)


def _prompt(mesh: Mesh, length: int, rounds: int) -> tuple[float, ...]:
    """Returns the microseconds of one device, of the ring, and of gathered keys, measured in turns.

    Devices get warm and their clocks fall: what is measured first would be the fastest.
    """
    tokens = PartitionSpec(None, _AXIS)
    shapes = [(1, length, heads, _HEAD_SIZE) for heads in (_HEADS, _KV_HEADS, _KV_HEADS)]
    # Not ones: their products take less power, and so the clock is higher.
    arrays = [jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed, shape in enumerate(shapes)]
    starts = jnp.array([0, length], jnp.int32)
    whole = jax.jit(lambda query, key, value: ops.attention(query[0], key[0], value[0], starts, max_query_len=length))
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=False)
    ring = jax.jit(mapped(lambda q, k, v: parallel.ring_attention(q, k, v, _AXIS, max_gathered_bytes=0)))
    gathered = jax.jit(mapped(lambda q, k, v: parallel.all_gather_attention(q, k, v, _AXIS)))
    spread = [_placed(mesh, each, tokens) for each in arrays]

    def us(program: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> float:
        return _us_of_one(lambda calls: lambda *x: [program(*x) for _ in range(calls)], arrays, 1, _PROMPTS)

    # While one device computes, the others rest and are fast again: it does so in front of each way.
    loads = (whole, arrays), (ring, spread), (whole, arrays), (gathered, spread)
    times = [[us(*load) for load in loads] for _ in range(rounds)]
    first, ringed, second, every = map(statistics.median, zip(*times, strict=True))
    return (first + second) / 2, ringed, every


def _placed(mesh: Mesh, array: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, spec))


def _us_of_one(
    chain: Callable[[int], Callable[..., Any]], arguments: Sequence[Any], rounds: int, calls: tuple[int, int]
) -> float:
    """Returns the microseconds of one of the calls that `chain(number)` makes one after the other."""
    few, many = calls
    first, second = (_us(chain(number), arguments, rounds) for number in calls)
    return (second - first) / (many - few)


def _us(program: Callable[..., Any], arguments: Sequence[Any], rounds: int) -> float:
    """Returns the median microseconds of a program from its start to its end, the host's time included."""
    times = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times[2:])


BENCHMARK = Benchmark("devices", __doc__, run, may_be_empty=("sums", "decode", "prompt"))
