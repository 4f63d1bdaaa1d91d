"""The size of a pool, before anything is allocated."""

from __future__ import annotations

import weakref

import jax
import jax.numpy as jnp
import pytest

from jattn.pool import KVPool, PoolPlan, kv_pool, plan_pool
from jattn.pool.plan import check_room
from torch_core.base.errors import InvalidInput, OutOfMemory, Unsupported
from torch_core.base.specs import KVCacheSpec

SPEC = KVCacheSpec(num_kv_heads=2, head_size=32, block_size=16, dtype="float32")
LAYER_BLOCK = 2 * 16 * 2 * 32 * 4


def test_the_plan_is_the_largest_pool_within_the_budget() -> None:
    plan = plan_pool(SPEC, num_layers=3, num_bytes=10 * 3 * LAYER_BLOCK + 5)

    assert (plan.num_blocks, plan.num_tokens, plan.num_bytes) == (10, 144, 30 * LAYER_BLOCK)
    assert str(plan) == "10 blocks of 16 tokens in 3 layers: room for 144 tokens, 0.000 GiB"


def test_layers_of_other_sizes_count_in_the_budget() -> None:
    small = KVCacheSpec(num_kv_heads=1, head_size=32, block_size=16, dtype="float32")

    plan = plan_pool(SPEC, num_layers=3, num_bytes=35 * LAYER_BLOCK, further=[small])

    assert (plan.num_blocks, plan.num_bytes) == (10, 35 * LAYER_BLOCK)
    assert "in 4 layers" in str(plan)


def test_the_room_of_several_groups_is_counted_exactly() -> None:
    # A group whose blocks hold six times the tokens takes a sixth of the blocks: 35 blocks are 30 and 5.
    plan = PoolPlan(spec=SPEC, num_layers=1, num_blocks=36, group_block_sizes=(16, 96))

    assert plan.num_tokens == 30 * 16


def test_a_block_of_several_ranks_holds_the_tokens_of_all() -> None:
    plan = PoolPlan(spec=SPEC, num_layers=1, num_blocks=10, context_parallel_size=2)

    assert plan.num_tokens == 9 * 32


class Device:
    """A device that reports its memory, as CUDA devices do."""

    def __init__(self, stats: dict[str, int] | None) -> None:
        self._stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats

    def __str__(self) -> str:
        return "device 0"


def test_a_fraction_is_taken_of_the_memory_that_is_free() -> None:
    device = Device({"bytes_limit": 100 * LAYER_BLOCK, "bytes_in_use": 20 * LAYER_BLOCK})

    assert plan_pool(SPEC, num_layers=1, memory_fraction=0.5, device=device).num_blocks == 40


def test_a_device_that_does_not_report_its_memory_needs_a_budget_in_bytes() -> None:
    with pytest.raises(Unsupported) as error:
        plan_pool(SPEC, num_layers=1, memory_fraction=0.5, device=Device(None))

    assert str(error.value) == (
        "device device 0 does not report its memory; give num_bytes instead of memory_fraction."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give exactly one of num_bytes and memory_fraction."),
        ({"num_bytes": 1, "memory_fraction": 0.5}, "give exactly one of num_bytes and memory_fraction."),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5; it must be above 0 and at most 1."),
        ({"num_bytes": 1 << 20, "num_layers": 0}, "num_layers is 0; it must be an int of at least 1."),
        (
            {"num_bytes": 3 * LAYER_BLOCK, "min_tokens": 48},
            (
                f"the budget of {3 * LAYER_BLOCK:,} bytes holds 3 blocks; a sequence of 48 tokens needs 3 and the null "
                f"block ({4 * LAYER_BLOCK:,} bytes). Raise the budget (of an engine, kv_cache_bytes), or let sequences "
                "be shorter (min_tokens; of an engine, max_model_len)."
            ),
        ),
    ],
)
def test_a_budget_that_cannot_work_is_refused(arguments, message) -> None:
    with pytest.raises(InvalidInput) as error:
        plan_pool(SPEC, **{"num_layers": 1, **arguments})

    assert str(error.value) == message


def test_a_pool_that_does_not_fit_is_refused_with_what_is_needed_and_free() -> None:
    device = Device({"bytes_limit": 100 * LAYER_BLOCK, "bytes_in_use": 20 * LAYER_BLOCK})

    with pytest.raises(InvalidInput) as error:
        KVPool(SPEC, num_layers=1, num_blocks=81, device=device)

    assert str(error.value) == (
        f"{81 * LAYER_BLOCK:,} bytes are needed and {80 * LAYER_BLOCK:,} are free on device 0; this process's JAX "
        "arrays hold 0 there. Close or drop what is not needed any more, or ask for fewer blocks."
    )
    check_room(80 * LAYER_BLOCK, device)


def test_an_allocation_that_fails_although_there_seemed_to_be_room_is_the_same_error(monkeypatch) -> None:
    monkeypatch.setattr(kv_pool, "check_room", lambda num_bytes, device: None)
    # 512 TiB, more than there are addresses.
    spec = KVCacheSpec(num_kv_heads=128, head_size=512, block_size=256, dtype="float32")
    with pytest.raises(OutOfMemory, match="the device has no room for its 2 arrays"):
        KVPool(spec, num_layers=2, num_blocks=1 << 22)


def test_the_refusal_names_the_arrays_that_hold_the_memory(monkeypatch) -> None:
    held = jnp.zeros((7, 1234), jnp.float32)
    monkeypatch.setattr(jax, "live_arrays", lambda: [held])

    with pytest.raises(InvalidInput, match=rf"{held.nbytes:,} in arrays of float32\[7, 1234\]"):
        check_room(1 << 60, jax.devices()[0])


def test_what_only_a_reference_cycle_holds_is_collected_before_a_refusal() -> None:
    class Holding(Device):
        """Reports an array as in use while somebody holds it."""

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 10, "bytes_in_use": 8 if holder() is not None else 0}

    class Node:
        own: object

    node = Node()
    node.own = node
    holder = weakref.ref(node)
    del node

    check_room(9, Holding(None))
