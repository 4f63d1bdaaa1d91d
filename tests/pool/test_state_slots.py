"""State arrays beside blocks: donated with them, copied, scrubbed and swapped as the allocator's steps say."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jattn.pool import HostBlocks, KVPool, kv_pool
from tests.support.devices import mesh, on_four_devices
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import KVCacheSpec, StateCacheSpec
from torch_core.cache import CacheConfig, CacheManager, StateConfig

BLOCKS = KVCacheSpec(num_kv_heads=1, head_size=4, block_size=2, dtype="float32")
STATES = StateCacheSpec(shapes=((2, 3), (1, 2, 2)), dtypes=("bfloat16", "float32"))


def make(**options) -> KVPool:
    return KVPool(BLOCKS, num_layers=2, num_blocks=4, states=[STATES] * 2, num_slots=6, **options)


def filled() -> KVPool:
    """Returns a pool whose slots, and blocks, hold their own numbers."""
    pool = make()
    for read, write, count in (
        (pool.read_states, pool.write_states, pool.num_slots),
        (pool.read_blocks, pool.write_blocks, pool.num_blocks),
    ):
        ids = list(range(count))
        write(
            ids,
            [
                np.full_like(each, 1) * np.reshape(ids, (-1, *[1] * (each.ndim - 1))).astype(each.dtype)
                for each in read(ids)
            ],
        )
    return pool


def values(pool: KVPool) -> tuple[list[float], list[float]]:
    """Returns the number in each slot and in each block; all elements of one are equal."""
    found = []
    for arrays in (pool.read_states(range(pool.num_slots)), pool.read_blocks(range(pool.num_blocks))):
        flat = np.concatenate([np.asarray(each, np.float32).reshape(len(each), -1) for each in arrays], 1)
        assert (flat == flat[:, :1]).all()
        found.append(flat[:, 0].tolist())
    return found[0], found[1]


def test_a_step_is_given_the_states_after_the_blocks_and_returns_both():
    pool = make()
    step = jax.jit(lambda arrays: ([each.shape[0] for each in arrays], [each + 1 for each in arrays]), donate_argnums=0)
    assert [int(size) for size in pool.run(step)] == [4, 4, 6, 6, 6, 6]
    assert values(pool) == ([1.0] * 6, [1.0] * 4)
    assert pool.num_bytes == 2 * 4 * BLOCKS.bytes_per_block + 2 * 6 * STATES.bytes_per_slot


def test_blocks_and_slots_are_moved_under_a_guard_of_transfers():
    with jax.transfer_guard("disallow"):
        pool = filled()
        pool.copy_blocks([(1, 2)])
        pool.scrub_blocks([1])
        pool.copy_states([(3, 4)])
        pool.scrub_states([3])
        found = values(pool)

    assert found == ([0, 1, 2, 0, 3, 5], [0, 0, 1, 3])


def test_slots_are_copied_and_scrubbed_and_blocks_stay():
    pool = filled()
    pool.copy_states([(1, 2), (2, 5)])
    pool.scrub_states([3])
    assert values(pool) == ([0, 1, 1, 0, 4, 2], [0, 1, 2, 3])
    pool.copy_blocks([(1, 2)])
    pool.scrub_blocks([3])
    assert values(pool) == ([0, 1, 1, 0, 4, 2], [0, 1, 1, 0])


def test_many_slots_are_copied_in_parts_unless_one_is_read_and_written(monkeypatch):
    monkeypatch.setattr(kv_pool, "_STATES_AT_ONCE", 1)
    pool = filled()
    pool.copy_states([(1, 3), (2, 5)])
    assert values(pool)[0] == [0, 1, 2, 1, 4, 2]
    pool.copy_states([(4, 1), (1, 2)])
    assert values(pool)[0] == [0, 4, 1, 1, 4, 2]


def test_the_allocators_steps_move_states_to_the_host_and_back():
    pool = filled()
    host = HostBlocks(pool, 4, 2)
    cache = CacheManager(
        CacheConfig(num_blocks=4, block_size=2, num_host_blocks=4, states=StateConfig(num_slots=6, num_host_slots=2))
    )
    cache.add("a", [1])
    step = cache.step([("a", 1)])
    pool.prepare(step, host)
    cache.retire(step.step_id)
    cache.append_tokens("a", [1])
    slot = step.rows[0].state_slot
    pool.prepare(cache.swap_out("a"), host)
    pool.scrub_states([slot])
    back = cache.swap_in("a")
    pool.prepare(back, host)
    assert values(pool)[0][back.state_swaps[0].device_slot] == slot


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda pool: pool.copy_states([(1, 6)]), "valid ids are 0 to 5"),
        (lambda pool: pool.copy_states([(1, 3), (2, 3)]), "both write slot 3"),
        (lambda pool: pool.scrub_states([-1]), "slots.0."),
        (lambda pool: pool.write_states([1], pool.read_blocks([1])), "contents"),
    ],
)
def test_wrong_slots_are_refused_and_nothing_changes(call, words):
    pool = filled()
    with pytest.raises(InvalidInput, match=words):
        call(pool)
    assert values(pool)[0] == [0, 1, 2, 3, 4, 5]


def test_states_that_cannot_be_are_refused():
    with pytest.raises(InvalidInput, match="num_slots"):
        KVPool(BLOCKS, num_layers=1, num_blocks=4, states=[STATES])
    with pytest.raises(InvalidInput, match=r"spec is StateCacheSpec.*it must be a KVCacheSpec or a LatentCacheSpec"):
        KVPool(STATES, num_layers=1, num_blocks=4)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"states\[0\]"):
        KVPool(BLOCKS, num_layers=1, num_blocks=4, states=[BLOCKS], num_slots=4)  # type: ignore[list-item]
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("tp",)), PartitionSpec("tp"))
    with pytest.raises(Unsupported, match="does not split its blocks"):
        make(device=sharding)
    with pytest.raises(InvalidInput, match="state_axis is 'dp'; the mesh has tp"):
        make(device=NamedSharding(sharding.mesh, PartitionSpec()), state_axis="dp")


@on_four_devices
def test_slots_that_are_split_over_devices_are_copied_swapped_and_scrubbed():
    spec = StateCacheSpec(shapes=((2, 4), (8, 2, 2)), dtypes=("bfloat16", "float32"), split_axes=(1, 0))
    sharding = NamedSharding(mesh("auto"), PartitionSpec())
    pool = KVPool(BLOCKS, num_layers=1, num_blocks=4, states=[spec], num_slots=6, state_axis="tp", device=sharding)
    assert [tuple(each.spec) for each in pool.shardings if each] == [(), (None, None, "tp"), (None, "tp")]
    pool.write_states([1, 2], [np.full_like(each, 3) for each in pool.read_states([1, 2])])
    pool.copy_states([(1, 5)])
    pool.scrub_states([2])
    assert values(pool)[0] == [0, 3, 0, 0, 0, 3]
    indivisible = StateCacheSpec(shapes=((2, 6),), dtypes=("float32",), split_axes=(1,))
    with pytest.raises(InvalidInput, match=r"states have an array of \(2, 6\); 4 devices split axis 1"):
        KVPool(BLOCKS, num_layers=1, num_blocks=4, states=[indivisible], num_slots=6, state_axis="tp", device=sharding)
