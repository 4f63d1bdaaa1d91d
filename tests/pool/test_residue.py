"""What a request leaves behind never reaches another one: random traces through the ops, with and without scrubbing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import ops
from jattn.pool import HostBlocks, KVPool
from torch_core.base.errors import InvalidInput, OutOfBlocks
from torch_core.base.specs import KVCacheSpec
from torch_core.cache import CacheConfig, CacheManager, CommittedStep
from torch_core.metadata import build_common_metadata, metadata_layout

BLOCK_SIZE, HEAD_SIZE, NUM_BLOCKS = 4, 8, 12
MOST_ROWS, MOST_TOKENS, WIDTH = 3, 16, 8
SALTS = (b"first tenant", b"second tenant")
STEPS = 40


class ResidueError(AssertionError):
    """A request got a block with what another one left in it."""


@dataclass
class Request:
    """A request and what only it may see."""

    salt: bytes
    tokens: list[int]
    computed: int = 0
    outputs: list[np.ndarray] = field(default_factory=list)


def fill_with_nan(kv_caches, blocks):
    return None, tuple(cache.at[blocks].set(jnp.nan) for cache in kv_caches)


def step_program(kv_caches, query, key, value, tables, seq_lens, starts, slots):
    (cache,) = kv_caches
    cache = ops.write_kv_cache(key, value, cache, slots)
    out = ops.paged_attention(query, cache, tables, seq_lens, starts, scale=1.0, max_query_len=MOST_TOKENS)
    return out, (cache,)


class Tenants:
    """Requests of two tenants over one pool, their steps run by the ops."""

    def __init__(self, *, scrub: bool) -> None:
        self.scrub = scrub
        config = CacheConfig(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            scrub_on_free=scrub,
            num_host_blocks=6,
            max_blocks_per_seq=WIDTH,
        )
        self.cache = CacheManager(config)
        spec = KVCacheSpec(num_kv_heads=1, head_size=HEAD_SIZE, block_size=BLOCK_SIZE, dtype="float32")
        self.pool = KVPool(spec, num_layers=1, num_blocks=NUM_BLOCKS)
        self.host = HostBlocks(self.pool, 6)
        self.program = jax.jit(step_program, donate_argnums=0)
        self.poison = jax.jit(fill_with_nan, donate_argnums=0)
        self.requests: dict[str, Request] = {}
        self.made = 0
        # The tenants' contents differ by orders of magnitude, so that a stray read is a gross error.
        generator = np.random.default_rng(0)
        self.contents = {
            salt: generator.normal(size=(2, 8, 64, HEAD_SIZE)).astype(np.float32) * scale
            for salt, scale in zip(SALTS, (1, 1000), strict=True)
        }

    def entry(self, request: Request, position: int) -> np.ndarray:
        """The key and value of a token: they depend on the tenant, the token and the position."""
        return self.contents[request.salt][:, request.tokens[position], position]

    def add(self, source: random.Random) -> None:
        self.made += 1
        request = Request(source.choice(SALTS), [source.randrange(2) for _ in range(source.randint(1, 14))])
        request.computed = self.cache.add(f"r{self.made}", request.tokens, salt=request.salt)
        self.requests[f"r{self.made}"] = request

    def step(self, source: random.Random) -> None:
        work = []
        for name, request in self.requests.items():
            if request.computed == len(request.tokens):
                request.tokens.append(source.randrange(2))
                self.cache.append_tokens(name, request.tokens[-1:])
            work.append((name, min(len(request.tokens) - request.computed, MOST_TOKENS // MOST_ROWS)))
        if not work:
            return
        try:
            step = self.cache.step(work)
        except OutOfBlocks:
            self.leave(source)
            return
        self.run(step)
        self.cache.retire(step.step_id)

    def run(self, step: CommittedStep) -> None:
        self.pool.prepare(step, self.host)
        if self.scrub:
            self.check_fresh_blocks(step)
        requests = [self.requests[row.seq_id] for row in step.rows]
        where = [
            (request, position)
            for request, row in zip(requests, step.rows, strict=True)
            for position in range(row.num_computed_tokens, row.num_computed_tokens + row.num_new_tokens)
        ]
        new = np.zeros((3, MOST_TOKENS, 1, HEAD_SIZE), np.float32)
        new[0] = np.random.default_rng(step.step_id).normal(size=new[0].shape)
        for index, (request, position) in enumerate(where):
            new[1:, index, 0] = self.entry(request, position)
        layout = metadata_layout(num_seqs=MOST_ROWS, num_tokens=MOST_TOKENS, max_blocks=WIDTH)
        common = build_common_metadata(
            step.rows,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            num_seqs=MOST_ROWS,
            num_tokens=MOST_TOKENS,
            max_blocks=WIDTH,
            layout=layout,
        )
        arrays = (common.block_tables, common.seq_lens, common.query_start_loc, common.slot_mapping)
        out = np.asarray(self.pool.run(self.program, *new, *arrays))
        for index, (request, position) in enumerate(where):
            entries = np.stack([self.entry(request, p) for p in range(position + 1)])
            scores = entries[:, 0] @ new[0, index, 0]
            weights = np.exp(scores - scores.max())
            expected = weights @ entries[:, 1] / weights.sum()
            np.testing.assert_allclose(out[index, 0], expected, rtol=2e-3, atol=2e-3 * np.abs(entries[:, 1]).max())
            request.computed = position + 1
        if not self.scrub:
            free = [0, *self.cache._state.pool.free]
            self.pool.run(self.poison, np.array(free + [0] * (NUM_BLOCKS - len(free)), np.int32))

    def check_fresh_blocks(self, step: CommittedStep) -> None:
        """A block that no earlier token of its sequence is in holds zeros, whoever had it before."""
        contents = self.pool.read_blocks(list(range(NUM_BLOCKS)))[0]
        for row in step.rows:
            for block in row.block_ids[-(-row.num_computed_tokens // BLOCK_SIZE) :]:
                if contents[block].any():
                    raise ResidueError(f"block {block} reached {row.seq_id} with old content")

    def leave(self, source: random.Random) -> None:
        name = source.choice(list(self.requests))
        del self.requests[name]
        (self.cache.cancel if source.random() < 0.5 else self.cache.finish)(name)

    def preempt(self, source: random.Random) -> None:
        name = source.choice(list(self.requests))
        self.cache.preempt(name)
        self.requests[name].computed = self.cache.resume(name)

    def swap(self, source: random.Random) -> None:
        name = source.choice(list(self.requests))
        try:
            for verb in (self.cache.swap_out, self.cache.swap_in):
                step = verb(name)
                self.pool.prepare(step, self.host)
                self.cache.retire(step.step_id)
        except OutOfBlocks:
            # Blocks that it shared come back as blocks of its own, so it may need more than it gave.
            self.cache.cancel(name)
            del self.requests[name]


def run_a_trace(tenants: Tenants, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(STEPS):
        if len(tenants.requests) < MOST_ROWS:
            tenants.add(source)
        elif source.random() < 0.4:
            source.choice([tenants.leave, tenants.preempt, tenants.swap])(source)
        tenants.step(source)


@pytest.mark.parametrize("scrub", [False, True])
def test_freed_content_never_reaches_another_request(scrub, seed):
    tenants = Tenants(scrub=scrub)
    run_a_trace(tenants, seed)
    for name in list(tenants.requests):
        tenants.cache.finish(name)
    stats = tenants.cache.stats()
    assert stats.used == stats.deferred == 0
    assert min(stats.hit_tokens, stats.evictions, stats.swapped_in) > 0
    if scrub:
        tenants.pool.prepare(tenants.cache.scrub())
        free = tenants.cache._state.pool.free
        assert not tenants.pool.read_blocks(free)[0].any()


def test_a_scrub_that_is_left_out_is_found(monkeypatch, seed):
    monkeypatch.setattr(KVPool, "scrub_blocks", lambda self, blocks: None)
    with pytest.raises(ResidueError, match="with old content"):
        run_a_trace(Tenants(scrub=True), seed)


def test_a_step_that_swaps_needs_host_blocks():
    tenants = Tenants(scrub=False)
    tenants.cache.add("a", [1, 2])
    tenants.cache.retire(tenants.cache.step([("a", 2)]).step_id)
    with pytest.raises(InvalidInput, match="the step has 1 swaps; give the HostBlocks that hold them as host"):
        tenants.pool.prepare(tenants.cache.swap_out("a"))
