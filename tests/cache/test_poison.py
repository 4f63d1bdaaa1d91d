"""Random traces through the real CPU kernels: every block that is free holds NaN, and no output may change for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.cache.driver import Driver
from tests.cache.model import BrokenPromiseError, Flight, Model
from torch_core.base.specs import AttentionSpec
from torch_core.cache import CacheConfig
from torch_core.ops import copy_blocks, paged_attention, write_kv_cache

HEAD_SIZE = 8
MOVES = 300


class TensorModel(Model):
    """A model whose device is a real cache array of one layer, with keys and values that depend on the whole prefix."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(256, 2, HEAD_SIZE, generator=generator)
        self.kv = torch.full((config.num_blocks, 2, config.block_size, 1, HEAD_SIZE), torch.nan)
        self.host_kv: dict[int, torch.Tensor] = {}
        self.outputs = 0
        window, chunk = self.windows[0]
        self.spec = AttentionSpec(
            scale=HEAD_SIZE**-0.5, window_left=None if window is None else window - 1, attention_chunk=chunk
        )

    def poison(self) -> None:
        """Fills every block that nobody may read, the null block included, with NaN."""
        self.kv[[0, *self.cache._state.pool.free]] = torch.nan

    def _run(self, flight: Flight) -> None:
        super()._run(flight)
        for swap in flight.step.swaps:
            if swap.to_host:
                self.host_kv[swap.host_block] = self.kv[swap.device_block].clone()
            else:
                self.kv[swap.device_block] = self.host_kv[swap.host_block]
        if flight.step.copies:
            copy_blocks(self.kv, torch.tensor([copy[:2] for copy in flight.step.copies], dtype=torch.int32))
        if flight.step.rows:
            self._attend(flight)

    def _attend(self, flight: Flight) -> None:
        size, rows = self.config.block_size, flight.step.rows
        written = torch.stack([self._entry(content) for _, _, content in flight.writes])
        slots = torch.tensor([block * size + offset for block, offset, _ in flight.writes], dtype=torch.int32)
        write_kv_cache(written[:, 0:1], written[:, 1:2], self.kv, slots)
        tables = torch.zeros(len(rows), max(len(row.block_ids) for row in rows), dtype=torch.int32)
        for index, row in enumerate(rows):
            tables[index, : len(row.block_ids)] = torch.tensor(row.block_ids)
        counts = torch.tensor([0, *(row.num_new_tokens for row in rows)])
        lengths = torch.tensor([row.num_computed_tokens + row.num_new_tokens for row in rows], dtype=torch.int32)
        query = torch.randn(int(counts.sum()), 1, HEAD_SIZE, generator=torch.Generator().manual_seed(1))
        starts = counts.cumsum(0).to(torch.int32)
        out = paged_attention(query, self.kv, tables, lengths, starts, spec=self.spec, max_query_len=int(counts.max()))
        for (_, _, content), got, asked in zip(flight.writes, out, query, strict=True):
            expected = self._dense(content, asked)
            if not torch.allclose(got, expected, atol=1e-5):
                raise BrokenPromiseError(f"a token's output is {got}; {expected} is right")
            self.outputs += 1

    def _entry(self, content: Any) -> torch.Tensor:
        _, salt, tokens = content
        weights = 0.5 ** torch.arange(len(tokens) - 1, -1, -1)
        mixed = (self.embedding[list(tokens)] * weights[:, None, None]).sum(0)
        return mixed + self.embedding[200 + len(salt or b"")]

    def _dense(self, content: Any, query: torch.Tensor) -> torch.Tensor:
        group, salt, tokens = content
        position = len(tokens) - 1
        visible = range(self._first_visible(0, position), position + 1)
        entries = torch.stack([self._entry((group, salt, tokens[: p + 1])) for p in visible])
        weights = torch.softmax(entries[:, 0] @ query[0] * self.spec.scale, 0)
        return (weights @ entries[:, 1])[None]


@pytest.mark.parametrize("window", [None, 3, 4])
@pytest.mark.parametrize("trace", range(3))
def test_poisoned_free_blocks_never_reach_an_output(window, trace, seed):
    source = random.Random(seed).random
    config = CacheConfig(num_blocks=9, block_size=2, sliding_window=window, num_host_blocks=5)
    model = TensorModel(config)
    driver = Driver(model)
    for _ in range(MOVES):
        driver.move(lambda most: int(source() * (most + 1)))
        model.poison()
    model.drain()
    assert model.outputs > 10


def test_the_poison_is_found_when_blocks_return_too_early(monkeypatch):
    def release_at_once(self, sequence):
        table, sequence.table = sequence.table, None
        if table is not None:
            self.release_table(table)

    monkeypatch.setattr("torch_core.cache.state.CacheState.detach_table", release_at_once)
    model = TensorModel(CacheConfig(num_blocks=9, block_size=2))
    model.add("a", [1, 2, 3], None)
    model.step([("a", [1, 2])])
    model.retire(0)
    model.step([("a", [3])])
    model.leave("a", cancel=True)
    model.cache._state.pool.free.extend(model.cache._state.pool.cached)
    model.poison()
    with pytest.raises(BrokenPromiseError, match="a token's output is"):
        model.retire(1)
