"""Scrubbing: every block that lost its content is named by the next step, once, before anybody gets it again."""

from __future__ import annotations

import pytest

from tests.cache.model import BrokenPromiseError, Model
from torch_core.base.errors import CacheCorruption, InvalidInput
from torch_core.cache import CacheConfig, CacheManager
from torch_core.cache.pool import BlockPool


def make(**options) -> CacheManager:
    return CacheManager(CacheConfig(**{"num_blocks": 6, "block_size": 4, "scrub_on_free": True, **options}))


def run(cache: CacheManager, seq_id: str, tokens: list[int]):
    hit = cache.add(seq_id, tokens)
    step = cache.step([(seq_id, len(tokens) - hit)])
    cache.retire(step.step_id)
    return step


def test_a_step_names_the_blocks_that_were_freed_since_the_last_one():
    cache = make(enable_prefix_caching=False)
    assert run(cache, "a", [1] * 9).blocks_to_scrub == ()
    cache.finish("a")
    assert run(cache, "b", [2]).blocks_to_scrub == (3, 2, 1)
    cache.append_tokens("b", [3])
    assert cache.step([("b", 1)]).blocks_to_scrub == ()


def test_a_block_that_a_step_in_flight_uses_is_named_after_that_step_retired():
    cache = make(enable_prefix_caching=False)
    cache.add("a", [1] * 4)
    step = cache.step([("a", 4)])
    cache.finish("a")
    cache.add("b", [2])
    assert cache.step([("b", 1)]).blocks_to_scrub == ()
    cache.retire(step.step_id)
    cache.append_tokens("b", [3])
    assert cache.step([("b", 1)]).blocks_to_scrub == (1,)


def test_a_cached_block_keeps_its_content_until_it_is_evicted():
    cache = make()
    run(cache, "a", [1] * 20)
    cache.finish("a")
    assert (cache.stats().cached, cache.stats().free) == (5, 0)
    step = run(cache, "b", [2] * 5)
    assert step.blocks_to_scrub == step.rows[0].block_ids == (5, 4)


def test_what_slides_out_of_a_window_is_named():
    cache = make(sliding_window=4, enable_prefix_caching=False)
    run(cache, "a", [1] * 12)
    cache.append_tokens("a", [2])
    assert cache.step([("a", 1)]).blocks_to_scrub == (1, 2)


def test_surplus_slots_are_named():
    cache = make()
    run(cache, "a", [1] * 3)
    cache.append_tokens("a", [2])
    step = cache.step([("a", 9)])
    cache.retire(step.step_id, {"a": 1})
    assert cache.scrub().blocks_to_scrub == (3, 2)


def test_swaps_name_blocks_too():
    cache = make(num_host_blocks=4, enable_prefix_caching=False)
    run(cache, "a", [1] * 5)
    cache.retire(cache.swap_out("a").step_id)
    back = cache.swap_in("a")
    assert sorted(back.blocks_to_scrub) == [1, 2]


def test_an_idle_engine_scrubs_without_a_row():
    cache = make(enable_prefix_caching=False)
    run(cache, "a", [1] * 5)
    cache.finish("a")
    step = cache.scrub()
    assert (step.rows, step.blocks_to_scrub) == ((), (2, 1))
    cache.retire(step.step_id)
    assert cache.scrub().blocks_to_scrub == ()


def test_after_a_reset_all_that_ever_held_something_is_named():
    cache = make()
    run(cache, "a", [1] * 9)
    cache.reset()
    cache.audit()
    assert sorted(cache.scrub().blocks_to_scrub) == [1, 2, 3]


def test_without_the_option_nothing_is_noted():
    cache = make(scrub_on_free=False, enable_prefix_caching=False)
    run(cache, "a", [1] * 9)
    cache.finish("a")
    assert run(cache, "b", [2]).blocks_to_scrub == ()
    with pytest.raises(InvalidInput, match=r"scrub_on_free is False: the cache does not note freed blocks\. Set it in"):
        cache.scrub()


@pytest.mark.parametrize("blocks", [[1], [4, 4]])
def test_the_audit_finds_a_block_that_must_not_be_scrubbed(blocks):
    cache = make()
    run(cache, "a", [1] * 5)
    cache._state.pool.dirty = blocks
    with pytest.raises(CacheCorruption, match=rf"Blocks to scrub that are not free, or named twice: {blocks[0]}\."):
        cache.audit()


def _forget_on_free(patch) -> None:
    def faulty(self, blocks):
        dirty, self.dirty = self.dirty, None
        original(self, blocks)
        self.dirty = dirty

    original = BlockPool.release
    patch.setattr(BlockPool, "release", faulty)


def _forget_on_evict(patch) -> None:
    def faulty(self):
        dirty, self.dirty = self.dirty, None
        try:
            return original(self)
        finally:
            self.dirty = dirty

    original = BlockPool._evict
    patch.setattr(BlockPool, "_evict", faulty)


def take_turns(model: Model) -> None:
    for name, token in (("a", 1), ("b", 2)):
        model.add(name, [token] * 5, None)
        model.step([(name, [token] * 5)])
        model.retire(next(reversed(model.flights)))
        model.leave(name, cancel=False)
    model.drain()


def small_model() -> Model:
    return Model(CacheConfig(num_blocks=4, block_size=2, scrub_on_free=True))


def test_nobody_gets_old_content():
    take_turns(small_model())


@pytest.mark.parametrize("plant", [_forget_on_free, _forget_on_evict])
def test_a_planted_fault_of_the_scrub_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(BrokenPromiseError, match="reached step 1 with old content"):
        take_turns(small_model())
