"""The cost of running the torch core's kernels from JAX: launches, kernel time, Python, addresses, compilations."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jattn import ops
from jattn.bench import measure
from jattn.bench.batch import BLOCK_SIZE, HEADS, KV_HEADS, random_batch
from jattn.bench.report import BenchReport, Row
from jattn.bench.runner import Benchmark
from jattn.bench.session import Session
from jattn.bridge import to_jax
from torch_core import ops as torch_ops
from torch_core.base.specs import AttentionSpec

_CHAIN = 64
_RUNS = 20
_SIZE = 128
_STEPS = 1000
_WRITE_TOKENS = 8192


def run() -> BenchReport:
    """Measures the native bridge against the torch launch of the same plans.

    Values of the report: `native call us` (one of a chain of 64 tiny writes in one jitted program, default XLA
    flags), `kernel in JAX / torch` (decode 32 x 4096, time in the kernels alone), `bytes that differ` between the two
    results, `Python calls in 1000 steps`, `pool addresses in 1000 steps`, `programs in 1000 steps`,
    `write fraction of copy speed` (8192 tokens, 8 heads of 128, bfloat16).
    """
    session = Session("overhead")
    in_torch, in_jax, kernel_ratio, differing = _decode_both_ways()
    writes = _write_us()
    # Microseconds of moving one token's keys and values at copy speed.
    token_us = 2 * KV_HEADS * _SIZE * 2 / session.copy * 1e6
    values = {
        "native call us": _native_call_us(),
        "kernel in JAX / torch": kernel_ratio,
        "bytes that differ": float(differing),
        **_steady_steps(),
        "write fraction of copy speed": 2 * _WRITE_TOKENS * token_us / writes,
    }
    session.rows += [
        Row("decode 32 x 4096", 32 * 4096 * token_us, {"torch": in_torch, "JAX": in_jax}),
        Row(f"write {_WRITE_TOKENS}", 2 * _WRITE_TOKENS * token_us, {"torch": writes}),
    ]
    return session.report("overhead", values=values)


def _native_call_us() -> float:
    def chain(kv_cache: Any, key: Any, slots: Any) -> Any:
        for _ in range(_CHAIN):
            kv_cache = ops.write_kv_cache(key, key, kv_cache, slots, implementation="triton")
        return kv_cache

    program = jax.jit(chain, donate_argnums=0)
    key, slots = jnp.ones((1, KV_HEADS, _SIZE), jnp.bfloat16), jnp.ones(1, jnp.int32)
    kv_cache = jnp.zeros((4, 2, BLOCK_SIZE, KV_HEADS, _SIZE), jnp.bfloat16)
    times = []
    # The first rounds compile and capture; the cache is donated as in a decode loop, so addresses stay.
    for _ in range(25):
        started = time.perf_counter()
        for _ in range(_RUNS):
            kv_cache = program(kv_cache, key, slots)
        jax.block_until_ready(kv_cache)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6 / (_RUNS * _CHAIN)


def _decode_both_ways() -> tuple[float, float, float, int]:
    """Returns microseconds of a decode call in torch and in JAX, the ratio of kernel times, and differing bytes."""
    repeats = 64
    batch = random_batch(((32, 1, 4095),))
    query, kv_cache, metadata = batch.query, batch.kv_cache, (batch.block_tables, batch.seq_lens, batch.starts)
    spec = AttentionSpec(scale=_SIZE**-0.5)

    def chain_in_torch() -> torch.Tensor:
        out = query
        for _ in range(repeats):
            out = torch_ops.paged_attention(out, kv_cache, *metadata, spec=spec, max_query_len=1)
        return out

    def chain_in_jax(query: Any, kv_cache: Any, metadata: Any) -> Any:
        for _ in range(repeats):
            query = ops.paged_attention(query, kv_cache, *metadata, max_query_len=1, implementation="triton")
        return query

    arrays = (to_jax(query), to_jax(kv_cache), tuple(to_jax(tensor) for tensor in metadata))
    program = jax.jit(chain_in_jax)
    expected = chain_in_torch().view(torch.uint8).cpu().numpy()
    differing = int((np.asarray(program(*arrays)).view(np.uint8) != expected).sum())
    in_torch = measure.graph_us([chain_in_torch]) / repeats
    in_jax = measure.jax_us(program, arrays, calls=repeats)
    kernels_in_jax = measure.kernels_us(lambda: jax.block_until_ready(program(*arrays)))
    return in_torch, in_jax, kernels_in_jax / measure.kernels_us(chain_in_torch), differing


def _steady_steps() -> dict[str, float]:
    """Counts events that must not happen in a steady decode step: Python calls, new addresses, new programs."""
    num_seqs, width = 8, 16
    traced = []

    def step(kv_cache: Any, key: Any, metadata: Any) -> Any:
        traced.append(1)
        tables, seq_lens, starts, slots = metadata
        kv_cache = ops.write_kv_cache(key, key, kv_cache, slots, implementation="triton")
        query = jnp.repeat(key, HEADS // KV_HEADS, axis=1)
        out = ops.paged_attention(query, kv_cache, tables, seq_lens, starts, max_query_len=1, implementation="triton")
        return kv_cache, out

    jitted: Any = jax.jit(step, donate_argnums=0)
    kv_cache = jnp.zeros((num_seqs * width + 1, 2, BLOCK_SIZE, KV_HEADS, _SIZE), jnp.bfloat16)
    key = jnp.ones((num_seqs, KV_HEADS, _SIZE), jnp.bfloat16)
    tables = jnp.arange(1, num_seqs * width + 1, dtype=jnp.int32).reshape(num_seqs, width)
    addresses = set()
    for position in range(_STEPS):
        tokens = position % (width * BLOCK_SIZE) + 1
        slots = tables[:, (tokens - 1) // BLOCK_SIZE] * BLOCK_SIZE + (tokens - 1) % BLOCK_SIZE
        seq_lens = jnp.full((num_seqs,), tokens, jnp.int32)
        starts = jnp.arange(num_seqs + 1, dtype=jnp.int32)
        kv_cache, _ = jitted(kv_cache, key, (tables, seq_lens, starts, slots))
        addresses.add(kv_cache.unsafe_buffer_pointer())
    return {
        "Python calls in 1000 steps": float(len(traced) - 1),
        "pool addresses in 1000 steps": float(len(addresses)),
        "programs in 1000 steps": float(jitted._cache_size()),
    }


def _write_us() -> float:
    blocks = _WRITE_TOKENS // BLOCK_SIZE

    def pool() -> tuple[torch.Tensor, ...]:
        key, value = torch.randn(2, _WRITE_TOKENS, KV_HEADS, _SIZE, device="cuda", dtype=torch.bfloat16)
        cache = torch.zeros(2 * blocks, 2, BLOCK_SIZE, KV_HEADS, _SIZE, device="cuda", dtype=torch.bfloat16)
        slots = (torch.randperm(2 * blocks, device="cuda")[:blocks, None] * BLOCK_SIZE).to(torch.int32)
        slots = slots + torch.arange(BLOCK_SIZE, device="cuda", dtype=torch.int32)
        return key, value, cache, slots.flatten().contiguous()

    pools = [pool() for _ in range(measure.num_pools(2 * _WRITE_TOKENS * KV_HEADS * _SIZE * 2))]
    return measure.graph_us([lambda p=p: torch_ops.write_kv_cache(*p) for p in pools])


BENCHMARK = Benchmark("overhead", __doc__, run)
