"""The block allocator's host time: a decode step and its metadata, hashing, a long look-up, the audit; next to vLLM's.

One thread does all the work and never waits. Its processor time is therefore its latency on a machine with an idle
core, and other processes do not change it.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jattn.bench.runner import Benchmark
from torch_core.cache import CacheConfig, CacheManager
from torch_core.cache.keys import KeyChain, encode_root
from torch_core.cache.pool import BlockPool
from torch_core.cache.prefix import PrefixIndex
from torch_core.metadata import BlockTableCache, build_common_metadata, metadata_layout

_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class AllocatorRow:
    """One measurement on the host: processor time of the thread over all repeats.

    `limit` is the median's; `vllm` is the median of the same work with vLLM's block pool, if it has this work and is
    installed.
    """

    name: str
    unit: str
    median: float
    best: float
    limit: float | None = None
    vllm: float | None = None


def run(
    *,
    batch: int = 256,
    context: int = 1024,
    block_size: int = 16,
    long_prompt: int = 131_072,
    audit_blocks: int = 10_000,
    repeats: int = 100,
) -> list[AllocatorRow]:
    """Measures the allocator.

    Args:
        batch: decoding sequences of a step.
        context: most tokens of a sequence at the start; lengths are spread, so that block borders are crossed evenly.
        block_size: tokens of a block.
        long_prompt: tokens of the prompt that is hashed and looked up.
        audit_blocks: held blocks of the pool that is audited.
        repeats: repeats of the short measurements; the long ones take a tenth.
    """
    few = max(3, repeats // 10)
    pool = BlockPool(4 * batch, PrefixIndex(1, verify=False))
    times = _times(lambda: pool.release(pool.take(batch)), repeats)
    return [
        *_decode_rows(batch, context, block_size, repeats),
        *_prefix_rows(long_prompt, block_size, few),
        *_audit_rows(audit_blocks, block_size, few),
        _row(f"take and release {batch} blocks of the pool", "us", times, 1e6, peer=_vllm_pool(batch, repeats)),
    ]


def _decode_rows(batch: int, context: int, block_size: int, repeats: int) -> list[AllocatorRow]:
    source = random.Random(0)
    max_blocks = -(-(context + repeats + 1) // block_size)
    blocks = batch * max_blocks + 1
    cache = CacheManager(CacheConfig(num_blocks=blocks, block_size=block_size))
    work = [(f"sequence {number}", 1) for number in range(batch)]
    for seq_id, _ in work:
        _fill(cache, seq_id, _tokens(source, source.randint(1 + context // 2, context)))
        cache.append_tokens(seq_id, (1,))
    layout = metadata_layout(num_seqs=batch, num_tokens=batch, max_blocks=max_blocks)
    tables, buffer = BlockTableCache(), np.zeros(layout.num_elements, np.int32)
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        step = cache.commit(cache.plan(work))
        cache.retire(step.step_id)
        stepped = time.thread_time()
        cache.append_each([(seq_id, (1,)) for seq_id, _ in work])
        appended = time.thread_time()
        build_common_metadata(
            step.rows,
            block_size=block_size,
            num_blocks=blocks,
            max_blocks=max_blocks,
            layout=layout,
            buffer=buffer,
            table_cache=tables,
        )
        times.append((stepped - start, appended - stepped, time.thread_time() - appended))
    steps, appends, builds = map(list, zip(*times, strict=True))
    return [
        _row(f"plan + commit + retire, {batch} decoding", "us", steps, 1e6, limit=500),
        _row(f"append_each, {batch} decoding", "us", appends, 1e6),
        _row(f"metadata build, {batch} decoding", "us", builds, 1e6, limit=200),
    ]


def _prefix_rows(long_prompt: int, block_size: int, repeats: int) -> list[AllocatorRow]:
    prompt = array("i", _tokens(random.Random(1), long_prompt))
    root = encode_root(salt=None, model_fingerprint=b"", cache_dtype="bfloat16", block_size=block_size)
    full = len(prompt) // block_size

    def hash_all() -> None:
        KeyChain(root, block_size).extend(prompt, full)

    cache = CacheManager(CacheConfig(num_blocks=2 * full + 2, block_size=block_size, cache_dtype="bfloat16"))
    _fill(cache, "first", prompt)
    counter = itertools.count()
    hashed = _times(hash_all, repeats)
    added = _times(lambda: cache.add(f"again {next(counter)}", prompt), repeats)
    return [
        _row("key hashing", "ns per token", hashed, 1e9 / len(prompt), limit=100),
        _row(f"add with a cached prefix of {len(prompt) // 1024}k tokens", "ms", added, 1e3, limit=15),
    ]


def _audit_rows(num_blocks: int, block_size: int, repeats: int) -> list[AllocatorRow]:
    source = random.Random(2)
    cache = CacheManager(CacheConfig(num_blocks=num_blocks + 1, block_size=block_size))
    shares = min(10, num_blocks)
    for number in range(shares):
        _fill(cache, str(number), _tokens(source, num_blocks // shares * block_size))
    name, times = f"audit of {num_blocks:,} blocks", _times(lambda: cache.audit(rehash=False), repeats)
    return [
        _row(name, "ms", times, 1e3, limit=10),
        _row(f"{name}, keys hashed again", "ms", _times(cache.audit, repeats), 1e3),
    ]


def _vllm_pool(batch: int, repeats: int) -> float | None:
    try:
        pool_class = importlib.import_module("vllm.v1.core.block_pool").BlockPool
    except ImportError:
        return None
    options = {"num_gpu_blocks": 4 * batch, "enable_caching": False, "hash_block_size": 16}
    accepted = inspect.signature(pool_class).parameters
    pool = pool_class(**{name: value for name, value in options.items() if name in accepted})
    return statistics.median(_times(lambda: pool.free_blocks(pool.get_new_blocks(batch)), repeats)) * 1e6


def _fill(cache: CacheManager, seq_id: str, prompt: Sequence[int]) -> None:
    cache.add(seq_id, prompt)
    cache.retire(cache.step([(seq_id, len(prompt))]).step_id)


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(_VOCABULARY) for _ in range(count)]


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return times


def _row(
    name: str, unit: str, seconds: list[float], scale: float, *, limit: float | None = None, peer: float | None = None
) -> AllocatorRow:
    return AllocatorRow(name, unit, statistics.median(seconds) * scale, min(seconds) * scale, limit, peer)


BENCHMARK = Benchmark("allocator", __doc__, run)
