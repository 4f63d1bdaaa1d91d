"""Each invariant of the audit has a state that breaks it: the audit must name the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torch_core.base.errors import CacheCorruption
from torch_core.cache import CacheConfig, CacheManager
from torch_core.cache.state import CacheState


@pytest.fixture
def cache() -> CacheManager:
    """'a' holds blocks 1, 2 and 3, the first two published; 'b' shares 1 and 2, and its step 1 with block 4 flies.

    Block 5 is cached, 6 to 9 are free; 'h' is in host slot 0 of 2.
    """
    cache = CacheManager(CacheConfig(num_blocks=10, block_size=2, num_host_blocks=2, verify_tokens=True))
    cache.add("a", [1, 2, 3, 4, 5])
    cache.retire(cache.step([("a", 5)]).step_id)
    cache.add("b", [1, 2, 3, 4, 6])
    cache.step([("b", 1)])
    cache.add("h", [8, 8])
    step = cache.step([("h", 2)])
    cache.retire(1)
    cache.retire(step.step_id)
    cache.retire(cache.swap_out("h").step_id)
    cache.step([("b", 1)])
    cache.audit()
    return cache


def table(state: CacheState, name: str = "a") -> Any:
    return state.sequences[name].table


def break_free_twice(state: CacheState) -> None:
    state.pool.free.append(7)


def break_free_and_cached(state: CacheState) -> None:
    state.pool.free.append(5)


def break_lost_block(state: CacheState) -> None:
    state.pool.free.remove(8)


def break_held_and_free(state: CacheState) -> None:
    state.pool.free.append(3)


def break_null_free(state: CacheState) -> None:
    state.pool.free.append(0)


def break_cached_without_key(state: CacheState) -> None:
    state.index.forget(5)


def break_null_key(state: CacheState) -> None:
    state.index.keys[0] = (0, b"x", None)


def break_ref(state: CacheState) -> None:
    state.pool.refs[1] = 1


def break_stranger(state: CacheState) -> None:
    table(state).blocks[0][2] = 99


def break_pin(state: CacheState) -> None:
    state.pool.pins[3] = 1


def break_host_slot(state: CacheState) -> None:
    state.host_free.append(0)


def break_index(state: CacheState) -> None:
    state.index.blocks[0].pop(state.index.keys[2][1])


def break_index_extra(state: CacheState) -> None:
    state.index.blocks[0][b"x"] = 6


def break_orphan(state: CacheState) -> None:
    block = state.index.blocks[0].pop(state.index.keys[1][1])
    state.index.keys.pop(block)


def break_lineage(state: CacheState) -> None:
    state.index.nodes.pop(2)


def break_chain(state: CacheState) -> None:
    state.sequences["a"].chains[0].digests[1] = bytes(32)


def break_retired(state: CacheState) -> None:
    table(state).retired = 99


def break_length(state: CacheState) -> None:
    table(state).scheduled = 7


def break_null_inside(state: CacheState) -> None:
    table(state).blocks[0][1] = 0


def break_held_twice(state: CacheState) -> None:
    table(state).blocks[0][2] = 2


def break_dropped(state: CacheState) -> None:
    table(state).blocks[0][0] = 0
    table(state).dropped[0] = 1


def break_published(state: CacheState) -> None:
    table(state).published[0] = 3


def break_shared_tail(state: CacheState) -> None:
    state.pool.refs[3] = 2
    table(state).limit = 6


BROKEN: list[tuple[Callable[[CacheState], None], str]] = [
    (break_free_twice, r"Blocks on the free list twice: 7\."),
    (break_free_and_cached, r"Blocks free and cached at once: 5\."),
    (break_lost_block, r"Blocks without a holder, yet neither free nor cached: 8\."),
    (break_held_and_free, r"Blocks held, yet free or cached: 3\."),
    (break_null_free, r"Blocks held, yet free or cached: 0\."),
    (break_cached_without_key, r"Blocks cached without a key: 5\."),
    (break_null_key, r"Blocks the null block or no block of the pool, yet they have a key: 0\."),
    (break_ref, r"Reference counts are wrong: block 1 has 1 for 2 holders\."),
    (break_stranger, r"Tables hold blocks outside the pool: 99\."),
    (break_pin, r"Pins do not match the copies of the steps in flight: blocks 3\."),
    (break_host_slot, r"Host slots are lost or in two places: 0\."),
    (break_index, r"Index and blocks disagree about the keys of blocks 2\."),
    (break_index_extra, r"Index and blocks disagree about the keys of blocks 6\."),
    (break_orphan, r"Keys without their parent's, which no lookup can reach: blocks 2\."),
    (break_lineage, r"Keys and lineages disagree: blocks 2\."),
    (break_chain, r"Sequence 'a' has keys that are not those of its tokens\."),
    (break_retired, r"Sequence 'a' has 99 tokens retired of 5\."),
    (break_length, r"Sequence 'a', group 'all', has 3 blocks for 7 tokens: 1, 2, 3\."),
    (break_null_inside, r"has the null block elsewhere than in its first 0 columns\."),
    (break_held_twice, r"holds a block twice: 2\."),
    (break_dropped, r"gave back 1 blocks, though token 0 is still needed\."),
    (break_published, r"published 3 blocks with 5 tokens written and known: 1, 2, 3\."),
    (break_shared_tail, r"may write into block 3, which is shared\."),
]


@pytest.mark.parametrize(("break_it", "message"), BROKEN, ids=[case[0].__name__ for case in BROKEN])
def test_the_audit_names_what_is_broken(cache, break_it, message):
    break_it(cache._state)
    with pytest.raises(CacheCorruption, match=message) as caught:
        cache.audit()
    assert caught.value.report


def test_a_key_that_is_not_that_of_its_tokens_is_found(cache):
    state = cache._state
    group, digest, parent = state.index.keys[2]
    state.index.blocks[group][b"other"] = state.index.blocks[group].pop(digest)
    state.index.keys[2] = (group, b"other", parent)
    with pytest.raises(CacheCorruption, match=r"holds blocks whose key is not that of their tokens: 2\."):
        cache.audit()


def test_long_lists_are_cut_short(cache):
    cache._state.pool.free.clear()
    cache._state.pool.cached.clear()
    cache._state.pool.refs[:] = [0] * 10
    with pytest.raises(CacheCorruption, match="neither free nor cached: 1, 2, 3, 4, 5, 6, 7, 8 and 1 more"):
        cache.audit()
