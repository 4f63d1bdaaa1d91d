"""Whole blocks between device and host, scrubbing, and pools that torch allocated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn.pool import HostBlocks, KVPool
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import KVCacheSpec, LatentCacheSpec
from torch_core.cache import BlockSwap, CacheConfig, CacheManager

SPEC = KVCacheSpec(num_kv_heads=1, head_size=4, block_size=2, dtype="float32")


LATENTS = LatentCacheSpec(kv_lora_rank=3, rope_dim=1, block_size=2, dtype="float32")
PACKED = LatentCacheSpec(kv_lora_rank=128, rope_dim=2, block_size=2, dtype="uint8")


@pytest.fixture(
    params=[[SPEC, SPEC], [LATENTS, LATENTS], [PACKED, PACKED], [SPEC, LATENTS]],
    ids=["keys and values", "latents", "packed latents", "of two sizes"],
)
def pool(request: pytest.FixtureRequest) -> KVPool:
    first, *further = request.param
    pool = KVPool(first, num_layers=1, num_blocks=8, further=further)
    for layer, view in enumerate(pool.as_torch()):
        view.add_(torch.arange(8, device=view.device).reshape(8, *(1,) * (view.ndim - 1)) + 100 * layer)
    return pool


def marks(pool: KVPool) -> list[list[float]]:
    """The value that fills each block, layer by layer."""
    contents = pool.read_blocks(list(range(pool.num_blocks)))
    flat = [layer.reshape(len(layer), -1) for layer in contents]
    assert all(np.all(layer == layer[:, :1]) for layer in flat)
    return [layer[:, 0].tolist() for layer in flat]


def test_scrubbed_blocks_are_zero_and_their_neighbours_untouched(pool) -> None:
    pool.scrub_blocks([3, 5, 6])

    assert [layer[1:] for layer in marks(pool)] == [[1, 2, 0, 4, 0, 0, 7], [101, 102, 0, 104, 0, 0, 107]]


def test_copied_blocks_are_what_their_sources_were(pool) -> None:
    before = pool.addresses()

    pool.copy_blocks([(2, 5), (5, 6), (2, 7)])

    assert [layer[1:] for layer in marks(pool)] == [[1, 2, 3, 4, 2, 5, 2], [101, 102, 103, 104, 102, 105, 102]]
    assert pool.addresses() == before


def test_blocks_written_back_are_what_was_read(pool) -> None:
    before = pool.addresses()
    contents = pool.read_blocks([2, 7, 4])

    pool.write_blocks([1, 3, 5], contents)

    assert marks(pool)[0][1:] == [2, 2, 7, 4, 4, 6, 7]
    assert marks(pool)[1][1:] == [102, 102, 107, 104, 104, 106, 107]
    assert pool.addresses() == before


def test_of_no_blocks_there_is_nothing_to_do(pool) -> None:
    contents = pool.read_blocks([])

    assert [layer.shape for layer in contents] == [spec.shape(0) for spec in pool.specs]
    pool.write_blocks([], contents)
    pool.copy_blocks([])
    pool.scrub_blocks([])

    assert [layer[1:] for layer in marks(pool)] == [[1, 2, 3, 4, 5, 6, 7], [101, 102, 103, 104, 105, 106, 107]]


def test_a_swapped_sequence_comes_back_with_its_contents(pool) -> None:
    manager = CacheManager(CacheConfig(num_blocks=8, block_size=2, num_host_blocks=4))
    host = HostBlocks(pool, 4)
    manager.add("a", [1, 2, 3, 4, 5])
    committed = manager.step([("a", 5)])
    before = [marks(pool)[0][block] for block in committed.rows[0].block_ids]
    manager.retire(committed.step_id)

    out = manager.swap_out("a")
    host.execute(out.swaps)
    manager.retire(out.step_id)
    pool.scrub_blocks(committed.rows[0].block_ids)
    back = manager.swap_in("a")
    host.execute(back.swaps)
    manager.retire(back.step_id)
    manager.append_tokens("a", [6])
    row = manager.step([("a", 1)]).rows[0]

    assert [marks(pool)[0][block] for block in row.block_ids[:3]] == before


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        (BlockSwap(8, 0, True), "device_block of swaps[0] is 8; valid ids are 0 to 7."),
        (BlockSwap(1, 4, False), "host_block of swaps[0] is 4; valid ids are 0 to 3."),
    ],
)
def test_a_swap_out_of_range_is_refused(pool, swap, message) -> None:
    with pytest.raises(InvalidInput) as error:
        HostBlocks(pool, 4).execute([swap])

    assert str(error.value) == message


def test_a_block_outside_the_pool_is_refused_and_nothing_changes(pool) -> None:
    before = marks(pool)

    for act in (pool.scrub_blocks, pool.read_blocks, lambda ids: pool.write_blocks(ids, [])):
        with pytest.raises(InvalidInput, match=r"blocks\[1\] is 8; valid ids are 0 to 7"):
            act([1, 8])

    assert marks(pool) == before


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([1, 2**32 + 2], "blocks[1] is 4294967298; valid ids are 0 to 7."),
        ([2**40], "blocks[0] is 1099511627776; valid ids are 0 to 7."),
        ([1.5], "blocks is [1.5]; it must be a flat sequence of block ids, which are ints."),
        (["1"], "blocks is ['1']; it must be a flat sequence of block ids, which are ints."),
        ([True], "blocks is [True]; it must be a flat sequence of block ids, which are ints."),
        ([2**70], "blocks is [1180591620717411303424]; it must be a flat sequence of block ids, which are ints."),
        ([[1, 2]], "blocks is [[1, 2]]; it must be a flat sequence of block ids, which are ints."),
        ([[1], [2, 3]], "blocks is [[1], [2, 3]]; it must be a flat sequence of block ids, which are ints."),
        (1, "blocks is 1; it must be a flat sequence of block ids, which are ints."),
        ({1}, "blocks is {1}; it must be a flat sequence of block ids, which are ints."),
    ],
)
def test_what_is_no_id_of_a_block_is_refused_and_not_cut_to_one(pool, blocks, message) -> None:
    before = marks(pool)

    for act in (pool.scrub_blocks, pool.read_blocks, lambda ids: pool.write_blocks(ids, [])):
        with pytest.raises(InvalidInput) as error:
            act(blocks)
        assert str(error.value) == message

    assert marks(pool) == before


def test_a_block_that_is_written_twice_is_refused_but_for_the_null_block(pool) -> None:
    before, contents = marks(pool), pool.read_blocks([4, 5])

    with pytest.raises(InvalidInput, match=r"^blocks\[0\] and blocks\[1\] both write block 2; name each block once\.$"):
        pool.write_blocks([2, 2], contents)
    with pytest.raises(InvalidInput, match=r"^copies\[1\] and copies\[2\] both write block 3; name each block once\.$"):
        pool.copy_blocks([(1, 2), (4, 3), (5, 3)])

    assert marks(pool) == before
    pool.write_blocks([0, 0], contents)


def test_ids_may_be_any_integers_of_numpy_or_jax_and_none(pool) -> None:
    for ids in (np.array([3, 5]), np.array([3, 5], np.uint8), jnp.array([3, 5]), range(3, 6, 2)):
        first = pool.read_blocks(ids)[0]
        assert first.reshape(2, -1)[:, 0].tolist() == [3, 5]
    pool.copy_blocks(np.array([[2, 5]]))
    assert marks(pool)[0][5] == 2
    assert [len(layer) for layer in pool.read_blocks([])] == [0, 0]
    pool.scrub_blocks(())
    pool.copy_blocks(np.zeros((0, 2), np.int64))
    pool.write_blocks([], pool.read_blocks([]))


def test_a_closed_pool_has_no_blocks_and_says_so(pool) -> None:
    contents = pool.read_blocks([1])
    pool.close()

    for act in (
        lambda: pool.read_blocks([1]),
        lambda: pool.write_blocks([1], contents),
        lambda: pool.scrub_blocks([1]),
        lambda: pool.copy_blocks([(1, 2)]),
        pool.as_torch,
    ):
        with pytest.raises(InvalidInput, match=r"^the pool holds no memory: it was closed\. renew\(\) allocates it"):
            act()


def test_contents_of_another_shape_are_refused(pool) -> None:
    with pytest.raises(InvalidInput, match=r" arrays of \(1, 2, .*\) (float32|uint8).* are required"):
        pool.write_blocks([1], [np.zeros((1, 2, 2, 1, 3), np.float32)] * 2)


def test_host_memory_tells_its_size(pool) -> None:
    assert HostBlocks(pool, 3).num_bytes == 3 * sum(spec.bytes_per_block for spec in pool.specs)


def test_host_memory_needs_a_positive_size(pool) -> None:
    with pytest.raises(InvalidInput, match="num_host_blocks is 0; it must be an int of at least 1"):
        HostBlocks(pool, 0)


def test_a_pool_whose_last_step_failed_on_the_device_is_lost(pool, monkeypatch) -> None:
    def fail(arrays: object) -> None:
        raise jax.errors.JaxRuntimeError("an illegal address")

    assert not pool.is_lost()
    monkeypatch.setattr(jax, "block_until_ready", fail)
    assert pool.is_lost()


def test_warming_up_changes_no_block(pool) -> None:
    pool.scrub_blocks([0])
    before = marks(pool)

    pool.warmup(copies=5, scrubs=6, swaps=3)

    assert marks(pool) == before


def test_what_was_warmed_up_compiles_no_more() -> None:
    # Of a size that no other test has compiled for.
    pool, events = KVPool(SPEC, num_layers=1, num_blocks=13), list[str]()
    pool.warmup(copies=5, scrubs=6, swaps=3)

    jax.monitoring.register_event_duration_secs_listener(listen := lambda event, *_, **__: events.append(event))
    pool.copy_blocks([(1, 2), (3, 4), (5, 6)])
    pool.scrub_blocks([1, 2, 3, 4, 5])
    pool.write_blocks([1, 2, 3], pool.read_blocks([4, 5, 6]))
    jax.monitoring.unregister_event_duration_listener(listen)

    assert not [event for event in events if "backend_compile" in event]
