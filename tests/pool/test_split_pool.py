"""A pool that is split over its heads: every operation works on the shards, in place."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

from jattn.pool import HostBlocks, KVPool, kv_pool, programs
from tests.support.devices import CACHE, collectives, mesh, on_four_devices
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import KVCacheSpec
from torch_core.cache import BlockSwap

SPEC = KVCacheSpec(num_kv_heads=4, head_size=4, block_size=2, dtype="float32")

each_kind = pytest.mark.parametrize("kind", ["auto", "explicit"])


def split_pool(kind: str) -> KVPool:
    """Two layers of eight blocks; block b of head h in layer l holds b + 10 h + 100 l."""
    pool = KVPool(SPEC, num_layers=2, num_blocks=8, device=NamedSharding(mesh(kind), CACHE))
    views = pool.as_torch()
    for index, view in enumerate(views):
        layer, head = divmod(index, 4)
        view.add_(torch.arange(8).reshape(8, 1, 1, 1, 1) + 10 * head + 100 * layer)
    return pool


def marks(pool: KVPool, blocks: list[int]) -> list[list[int]]:
    """What the last head of each block holds, layer by layer."""
    return [layer[:, 1, -1, 3, -1].astype(int).tolist() for layer in pool.read_blocks(blocks)]


@each_kind
@on_four_devices
def test_a_torch_view_and_an_address_stand_for_each_shard(kind: str) -> None:
    pool = split_pool(kind)
    views = pool.as_torch()

    assert [view.shape for view in views] == [(8, 2, 2, 1, 4)] * 8
    assert [view.data_ptr() for view in views] == list(pool.addresses())
    with pytest.raises(InvalidInput, match="8 torch views"):
        pool.scrub_blocks([1])


@each_kind
@on_four_devices
def test_blocks_are_copied_scrubbed_and_written_in_place_on_every_shard(kind: str) -> None:
    pool = split_pool(kind)
    before = pool.addresses()

    pool.copy_blocks([(1, 2), (3, 4)])
    pool.scrub_blocks([5])
    pool.write_blocks([6, 7], pool.read_blocks([3, 1]))

    assert marks(pool, [1, 2, 3, 4, 5, 6, 7]) == [[31, 31, 33, 33, 0, 33, 31], [131, 131, 133, 133, 0, 133, 131]]
    assert pool.addresses() == before


@each_kind
@on_four_devices
def test_a_swapped_block_comes_back(kind: str) -> None:
    pool = split_pool(kind)
    host = HostBlocks(pool, 2)

    host.execute([BlockSwap(device_block=3, host_block=1, to_host=True)])
    pool.scrub_blocks([3])
    host.execute([BlockSwap(device_block=5, host_block=1, to_host=False)])

    assert marks(pool, [3, 5]) == [[0, 33], [0, 133]]


@each_kind
@on_four_devices
def test_a_step_keeps_the_split_or_is_refused(kind: str) -> None:
    pool = split_pool(kind)
    step = jax.jit(lambda caches: (None, [cache + 1 for cache in caches]), donate_argnums=0)
    before = pool.addresses()
    pool.run(step)
    assert pool.addresses() == before
    assert marks(pool, [1]) == [[32], [132]]

    whole = NamedSharding(mesh(kind), PartitionSpec())
    gather = jax.jit(lambda caches: (None, caches), donate_argnums=0, out_shardings=(None, whole))
    with pytest.raises(
        InvalidInput, match=r"must return 2 arrays of \(8, 2, 2, 4, 4\) float32 P.*\(None, None, None, 'tp'\)"
    ):
        pool.run(gather)


@each_kind
@on_four_devices
def test_moving_blocks_needs_no_collective(kind: str) -> None:
    pool = split_pool(kind)
    caches = pool.run(jax.jit(lambda caches: ([cache + 0 for cache in caches], caches), donate_argnums=0))
    pairs, ids = np.array([[1, 2]], np.int32), np.array([1], np.int32)

    assert collectives(programs.copy_blocks, tuple(caches), pairs) == []
    assert collectives(programs.scrub_blocks, tuple(caches), ids) == []
    assert collectives(programs.read_blocks, tuple(caches), ids) == []


@on_four_devices
def test_a_closed_pool_is_renewed_with_its_split() -> None:
    pool = split_pool("auto")
    pool.close()
    pool.renew()

    assert len(pool.addresses()) == 8
    assert marks(pool, [1]) == [[0], [0]]


def pool_of_parts(kind: str) -> KVPool:
    """Two layers of eight blocks, four on each half of the devices; block b holds b + 100 l."""
    sharding = NamedSharding(mesh(kind, dp=2, tp=2), PartitionSpec("dp", None, None, "tp"))
    pool = KVPool(SPEC, num_layers=2, num_blocks=8, device=sharding)
    blocks = np.arange(8, dtype=np.float32).reshape(8, 1, 1, 1, 1) * np.ones(SPEC.shape(1), np.float32)
    pool.write_blocks(list(range(8)), [blocks, blocks + 100])
    return pool


@each_kind
@on_four_devices
def test_split_blocks_are_copied_scrubbed_written_and_read_where_they_are(kind: str) -> None:
    pool = pool_of_parts(kind)
    before = pool.addresses()

    pool.copy_blocks([(1, 2), (5, 7)])
    pool.scrub_blocks([6, 3, 0])
    HostBlocks(pool, 1).execute([BlockSwap(5, 0, to_host=True), BlockSwap(1, 0, to_host=False)])

    assert marks(pool, list(range(8))) == [[0, 5, 1, 0, 4, 5, 0, 5], [0, 105, 101, 0, 104, 105, 0, 105]]
    assert pool.addresses() == before
    assert [view.shape for view in pool.as_torch()] == [(4, 2, 2, 2, 4)] * 8


@each_kind
@on_four_devices
def test_of_split_blocks_only_what_is_read_crosses_devices(kind: str) -> None:
    pool = pool_of_parts(kind)
    caches = pool.run(jax.jit(lambda caches: ([cache + 0 for cache in caches], caches), donate_argnums=0))
    sharding, ids = caches[0].sharding, np.array([1], np.int32)

    for program, what in ((programs.copy_blocks, np.array([[1, 2]], np.int32)), (programs.scrub_blocks, ids)):
        assert collectives(programs.on_parts(program, sharding), tuple(caches), what) == []
    found = collectives(programs.on_parts(programs.read_blocks, sharding), tuple(caches), ids)
    assert set(found) == {"all-reduce"}


@each_kind
@on_four_devices
def test_an_axis_of_one_device_splits_nothing(kind: str) -> None:
    sharding = NamedSharding(mesh(kind, dp=1, tp=4), PartitionSpec("dp", None, None, "tp"))
    pool = KVPool(SPEC, num_layers=1, num_blocks=8, device=sharding)

    pool.write_blocks([1], [np.ones(SPEC.shape(1), np.float32)])
    pool.copy_blocks([(1, 6)])
    pool.scrub_blocks([1])

    assert marks(pool, [1, 6]) == [[0, 1]]


@on_four_devices
def test_a_copy_from_device_to_device_is_refused() -> None:
    with pytest.raises(InvalidInput) as error:
        pool_of_parts("auto").copy_blocks([(1, 2), (3, 4)])
    assert str(error.value) == (
        "copies[1] is (3, 4), two blocks of different devices; a block is copied among the 4 of one. Read it and write "
        "it, or compute it again."
    )


@pytest.mark.parametrize(("axis", "heads"), [(1, 4), (2, 4), (3, 2), (5, 4)])
@on_four_devices
def test_other_splits_and_heads_that_do_not_divide_are_refused(axis: int, heads: int) -> None:
    spec = PartitionSpec(*[None] * axis, "tp")
    cache = KVCacheSpec(num_kv_heads=heads, head_size=4, block_size=2, dtype="float32")
    sharding = NamedSharding(mesh("auto"), spec)
    with pytest.raises(InvalidInput) as error:
        KVPool(cache, num_layers=1, num_blocks=8, device=sharding)
    assert str(error.value) == (
        f"device is {sharding}; a pool of 8 blocks and {heads} key/value heads takes a NamedSharding that splits axes "
        "0 and 3 alone, blocks and heads, into equal parts: NamedSharding(mesh, PartitionSpec('dp', None, None, 'tp'))."
    )


@on_four_devices
def test_the_room_of_each_device_is_asked_for_its_part() -> None:
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_pool, "check_room", lambda num_bytes, device: asked.append((num_bytes, device)))
        pool = split_pool("auto")

    assert {device for _, device in asked} == set(jax.devices())
    assert {num_bytes for num_bytes, _ in asked} == {pool.num_bytes // 4}
