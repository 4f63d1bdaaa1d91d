"""The pool: donated every step, at one address, and honest when a step or a caller goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn.bridge import call_torch, to_torch
from jattn.pool import KVPool
from torch_core.base.errors import InvalidInput, PoolLost, Unsupported
from torch_core.base.specs import KVCacheSpec

SPEC = KVCacheSpec(num_kv_heads=2, head_size=4, block_size=4, dtype="float32")
SHAPE = (8, 2, 4, 2, 4)


def make_pool(num_layers: int = 2, **changes: Any) -> KVPool:
    return KVPool(SPEC, num_layers=num_layers, **{"num_blocks": 8, **changes})


def add_in_place(cache: torch.Tensor, amount: torch.Tensor) -> None:
    cache += amount


def add(cache: jax.Array, amount: jax.Array, function: Callable[..., None] = add_in_place) -> jax.Array:
    return call_torch(function, [cache, amount], [jax.ShapeDtypeStruct(cache.shape, cache.dtype)], aliases={0: 0})[0]


def donated(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, donate_argnums=0)


@donated
def add_step(caches: tuple[jax.Array, ...], amount: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    return amount * 2, [add(cache, amount) for cache in caches]


@donated
def read_step(caches: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return jnp.stack([cache.sum() for cache in caches]), caches


def failing_step(error: BaseException, *, times: int = 1, after: int = 0) -> Callable[..., Any]:
    """A step whose callback works so many times, fails so many times, then works again."""
    left: list[BaseException | None] = [error] * times + [None] * after

    def fail(cache: torch.Tensor, amount: torch.Tensor) -> None:
        problem = left.pop() if left else None
        if problem is not None:
            raise problem
        add_in_place(cache, amount)

    # Not the argument itself, which would be there before the step has run.
    return donated(lambda caches, amount: (amount * 1, [add(cache, amount, fail) for cache in caches]))


def waited(pool: KVPool, step: Callable[..., Any], *args: Any) -> Any:
    """Runs a step and waits for it, as whoever wants to hear of a failure must: a GPU is still at work then."""
    with pool.guard():
        return jax.block_until_ready(pool.run(step, *args))


def values(pool: KVPool) -> list[float]:
    """The one value that fills each layer; fails when a layer holds two."""
    return [float(np.unique(view.cpu().numpy()).item()) for view in pool.as_torch()]


def test_a_new_pool_is_zero_and_tells_its_sizes() -> None:
    pool = make_pool(num_layers=3)
    assert (pool.spec, pool.num_layers, pool.num_blocks, pool.generation) == (SPEC, 3, 8, 1)
    assert pool.num_bytes == 3 * 4 * int(np.prod(SHAPE))
    assert [tuple(view.shape) for view in pool.as_torch()] == [SHAPE] * 3
    assert values(pool) == [0, 0, 0]


def test_layers_of_other_sizes_lie_behind_the_first_ones_in_blocks_of_as_many_tokens() -> None:
    pool = make_pool(further=[KVCacheSpec(num_kv_heads=1, head_size=8, block_size=4, dtype="float16")])
    assert pool.num_bytes == 2 * 4 * int(np.prod(SHAPE)) + 2 * 8 * 2 * 4 * 8
    assert pool.num_layers == 3
    assert pool.run(add_step, 3.0) == 6
    assert values(pool) == [3, 3, 3]
    with pytest.raises(InvalidInput) as error:
        pool.run(donated(lambda caches: (0, caches[:2])))
    assert "it must return 2 arrays of (8, 2, 4, 2, 4) float32 and 1 arrays of (8, 2, 4, 1, 8) float16" in str(
        error.value
    )
    with pytest.raises(InvalidInput) as error:
        make_pool(further=[KVCacheSpec(num_kv_heads=2, head_size=4, block_size=8, dtype="float32")])
    assert str(error.value) == "further[0] has block_size 8 and spec 4; they must be equal."


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_cache_dtype_can_be_pooled_viewed_and_copied(dtype: str) -> None:
    pool = KVPool(KVCacheSpec(num_kv_heads=1, head_size=4, block_size=4, dtype=dtype), num_layers=1, num_blocks=4)
    pool.as_torch()[0][1].fill_(1)
    pool.copy_blocks([(1, 3)])
    (view,) = pool.as_torch()
    assert view.dtype is getattr(torch, dtype)
    assert [view[block].float().unique().item() for block in range(4)] == [0, 1, 0, 1]


def test_run_gives_back_the_result_and_keeps_the_caches() -> None:
    pool = make_pool()
    assert pool.run(add_step, 3.0) == 6
    assert values(pool) == [3, 3]


def test_addresses_are_constant_over_100_steps() -> None:
    pool = make_pool()
    before = pool.addresses()
    for _ in range(100):
        pool.run(add_step, 1.0)
    assert pool.addresses() == before
    assert len(set(before)) == 2
    assert values(pool) == [100, 100]


def test_a_step_without_donation_is_refused_and_the_pool_still_works() -> None:
    pool = make_pool()
    pool.run(add_step, 1.0)
    with pytest.raises(InvalidInput) as error:
        pool.run(jax.jit(lambda caches: (0, [add(cache, jnp.float32(5)) for cache in caches])))
    assert str(error.value) == (
        "the step did not consume kv_caches[0], so XLA copied it: jit the step with donate_argnums=0, and drop every "
        "torch or numpy view of the arrays first. The pool still holds what it held."
    )
    assert values(pool) == [1, 1]
    pool.run(add_step, 1.0)
    assert (values(pool), pool.generation) == ([2, 2], 1)


@pytest.mark.parametrize("count", [1, 2])
def test_live_torch_views_are_refused_before_the_step_runs(count: int) -> None:
    pool = make_pool()
    views = pool.as_torch()[:count]
    with pytest.raises(InvalidInput) as error:
        pool.run(add_step, 1.0)
    assert str(error.value) == (
        f"{count} torch views from as_torch() are alive; XLA would copy the pool instead of updating it in place. "
        "Delete them (and what was sliced from them) before the next step."
    )
    del views
    pool.run(add_step, 1.0)
    assert values(pool) == [1, 1]


def test_a_slice_of_a_dropped_view_counts_as_a_view() -> None:
    pool = make_pool()
    part = pool.as_torch()[1][3]
    with pytest.raises(InvalidInput, match=r"^1 torch views from as_torch\(\) are alive; "):
        pool.run(add_step, 1.0)
    del part
    pool.run(add_step, 1.0)
    assert values(pool) == [1, 1]


def test_a_view_that_cannot_be_tracked_is_found_out_and_the_pool_stays_whole() -> None:
    pool = make_pool()
    untracked = pool.as_torch()[1].detach()
    # A CPU copies what it cannot donate, a GPU refuses the step.
    on_cpu = jax.default_backend() == "cpu"
    found = r"^the step did not consume kv_caches\[1\]" if on_cpu else "^an array of kv_caches has a view that as_torch"
    fate = "what the step returned" if on_cpu else "still holds what it held"
    with pytest.raises(InvalidInput, match=rf"{found}.*drop every torch or numpy view .* {fate}\.$"):
        pool.run(add_step, 1.0)
    del untracked
    assert values(pool) == [on_cpu, on_cpu]
    pool.run(add_step, 1.0)
    assert (values(pool), pool.generation) == ([on_cpu + 1, on_cpu + 1], 1)


def test_what_torch_writes_through_a_view_is_what_the_next_step_reads() -> None:
    pool = make_pool()
    views = pool.as_torch()
    for layer in range(2):
        views[layer][3, 0, 1] = layer + 1
    del views
    assert pool.run(read_step).tolist() == [8, 16]


def test_views_have_the_pools_addresses() -> None:
    pool = make_pool()
    assert tuple(view.data_ptr() for view in pool.as_torch()) == pool.addresses()


def drop_a_layer(caches: tuple[jax.Array, ...]) -> tuple[int, Any]:
    return 0, [caches[0] + 1]


def halve_the_blocks(caches: tuple[jax.Array, ...]) -> tuple[int, Any]:
    return 0, [cache[:4] for cache in caches]


def return_one_array(caches: tuple[jax.Array, ...]) -> tuple[int, Any]:
    return 0, caches[0]


def change_the_dtype(caches: tuple[jax.Array, ...]) -> tuple[int, Any]:
    return 0, [cache.astype(jnp.bfloat16) for cache in caches]


@pytest.mark.parametrize(
    ("step", "returned"),
    [
        (drop_a_layer, "[((8, 2, 4, 2, 4), 'float32')]"),
        (return_one_array, "[((8, 2, 4, 2, 4), 'float32')]"),
        (halve_the_blocks, "[((4, 2, 4, 2, 4), 'float32'), ((4, 2, 4, 2, 4), 'float32')]"),
        (change_the_dtype, "[((8, 2, 4, 2, 4), 'bfloat16'), ((8, 2, 4, 2, 4), 'bfloat16')]"),
    ],
)
def test_a_step_that_returns_other_caches_is_refused_and_the_pool_keeps_its_contents(
    step: Callable[..., Any], returned: str
) -> None:
    pool = make_pool()
    pool.run(add_step, 1.0)
    with pytest.raises(InvalidInput) as error:
        pool.run(jax.jit(step))
    assert str(error.value) == (
        f"the step returned kv_caches of {returned}; it must return 2 arrays of (8, 2, 4, 2, 4) float32. The pool "
        "still holds what it held."
    )
    assert values(pool) == [1, 1]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donated_step_that_returns_other_caches_costs_the_contents_not_the_pool() -> None:
    pool = make_pool()
    with pytest.raises(
        InvalidInput, match=r" The pool was allocated anew, generation 2: compute every sequence again\.$"
    ):
        pool.run(donated(drop_a_layer))
    pool.run(add_step, 1.0)
    assert (values(pool), pool.generation) == ([1, 1], 2)


NUMPY = np.zeros(SHAPE, np.float32)


@pytest.mark.parametrize("caches", [None, 5, {"a": 1}, [[1]], [NUMPY, NUMPY], NUMPY], ids=type)
def test_a_step_whose_caches_are_no_arrays_is_refused_and_the_pool_keeps_its_contents(caches: object) -> None:
    pool = make_pool()
    with pytest.raises(InvalidInput, match=r"^the step returned a tuple instead of \(result, kv_caches\)"):
        pool.run(lambda _: (1, caches))
    assert pool.generation == 1


def test_a_numpy_array_among_the_caches_is_refused_and_the_pool_keeps_its_contents() -> None:
    pool = make_pool()
    with pytest.raises(InvalidInput, match=r"^the step returned a tuple instead of \(result, kv_caches\)"):
        pool.run(lambda caches: (1, [caches[0], NUMPY]))
    assert pool.generation == 1


def test_a_donated_step_without_a_result_costs_the_contents_not_the_pool() -> None:
    pool = make_pool(num_layers=3)
    with pytest.raises(
        InvalidInput, match=r"^the step returned a list instead of \(result, kv_caches\); it must return 3"
    ):
        pool.run(donated(lambda caches: [cache + 1 for cache in caches]))
    pool.run(add_step, 1.0)
    assert (values(pool), pool.generation) == ([1, 1, 1], 2)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_callback_that_fails_after_donation_loses_the_pool_and_says_so(steps: int) -> None:
    pool = make_pool()
    cause = KeyError("block 7")
    step = failing_step(cause, after=2 * steps)
    for _ in range(steps):
        pool.run(step, 1.0)
    with pytest.raises(PoolLost) as lost:
        waited(pool, step, 1.0)
    assert str(lost.value) == (
        "a step failed after it had consumed the KV pool of generation 1 (KeyError: 'block 7'). The pool is now "
        "generation 2 and empty: compute every sequence again."
    )
    assert lost.value.__cause__ is cause
    assert lost.value.generation == 1


def test_after_a_loss_the_pool_is_empty_of_a_higher_generation_and_the_step_works() -> None:
    pool = make_pool()
    pool.run(add_step, 5.0)
    step = failing_step(KeyError("block 7"))
    with pytest.raises(PoolLost):
        waited(pool, step, 1.0)
    assert (pool.generation, values(pool)) == (2, [0, 0])
    assert pool.run(step, 1.0) == 1
    assert values(pool) == [1, 1]


def test_every_loss_raises_the_generation_by_one() -> None:
    pool = make_pool()
    step = failing_step(KeyError("again"), times=3)
    generations = []
    for _ in range(3):
        with pytest.raises(PoolLost) as lost:
            waited(pool, step, 1.0)
        generations.append(lost.value.generation)
    assert (generations, pool.generation) == ([1, 2, 3], 4)


@pytest.mark.parametrize("steps", [0, 3])
def test_an_interrupt_inside_a_callback_stays_an_interrupt_and_the_pool_works_afterwards(steps: int) -> None:
    pool = make_pool()
    step = failing_step(KeyboardInterrupt(), after=2 * steps)
    for _ in range(steps):
        pool.run(step, 1.0)
    with pytest.raises(KeyboardInterrupt):
        waited(pool, step, 1.0)
    pool.run(add_step, 1.0)
    assert (pool.generation, values(pool)) == (2, [1, 1])


def test_an_error_at_trace_time_leaves_the_pool_alone() -> None:
    pool = make_pool()
    pool.run(add_step, 1.0)

    def refuse(caches: tuple[jax.Array, ...]) -> Any:
        raise InvalidInput("query has 2 dimensions")

    with pytest.raises(InvalidInput, match="query has 2 dimensions"):
        pool.run(donated(refuse))
    assert (pool.generation, values(pool)) == (1, [1, 1])


def test_a_failing_callback_in_a_step_without_donation_leaves_the_pool_alone() -> None:
    pool = make_pool()
    pool.run(add_step, 1.0)

    def fail(cache: torch.Tensor, amount: torch.Tensor) -> None:
        raise KeyError("block 7")

    # A CPU has run the callback when the missing donation is noticed.
    on_cpu = jax.default_backend() == "cpu"
    with pytest.raises(
        KeyError if on_cpu else InvalidInput, match="block 7" if on_cpu else "^the step did not consume"
    ):
        pool.run(jax.jit(lambda caches: (0, [add(cache, jnp.float32(1), fail) for cache in caches])))
    assert (pool.generation, values(pool)) == (1, [1, 1])


def test_a_guard_around_run_reports_the_loss_once() -> None:
    pool = make_pool()
    with pytest.raises(PoolLost, match="generation 1"), pool.guard():
        jax.block_until_ready(pool.run(failing_step(KeyError("block 7")), 1.0))
    assert pool.generation == 2


def test_a_guard_leaves_errors_alone_that_cost_nothing() -> None:
    pool = make_pool()
    with pytest.raises(ZeroDivisionError), pool.guard():
        raise ZeroDivisionError
    assert pool.generation == 1


def test_a_guard_does_not_allocate_a_closed_pool_anew() -> None:
    pool = make_pool()
    pool.close()
    with pytest.raises(InvalidInput, match="the pool holds no memory"), pool.guard():
        pool.run(add_step, 1.0)
    assert (pool.generation, pool.addresses()) == (1, ())


def test_copy_blocks_copies_keys_and_values_in_every_layer() -> None:
    pool = make_pool()
    rng = np.random.default_rng(0)
    before = [rng.normal(size=SHAPE).astype(np.float32) for _ in range(2)]
    views = pool.as_torch()
    for layer in range(2):
        views[layer].copy_(torch.from_numpy(before[layer]))
    del views
    pool.copy_blocks([(1, 5), (2, 6), (1, 7)])
    for view, array in zip(pool.as_torch(), before, strict=True):
        assert np.array_equal(view.cpu().numpy(), array[[0, 1, 2, 3, 4, 1, 2, 1]])


def test_copy_blocks_reads_every_source_before_it_writes() -> None:
    pool = make_pool(num_layers=1)
    pool.as_torch()[0].copy_(torch.arange(8.0)[:, None, None, None, None].expand(SHAPE))
    pool.copy_blocks([(1, 2), (2, 3)])
    assert pool.as_torch()[0][:, 0, 0, 0, 0].tolist() == [0, 1, 1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_copy_blocks_takes_any_number_of_copies_at_constant_addresses(count: int) -> None:
    pool = make_pool(num_layers=1)
    before = pool.addresses()
    pool.as_torch()[0][1] = 1
    pool.copy_blocks([(1, 2 + index) for index in range(count)])
    assert pool.addresses() == before
    assert pool.as_torch()[0][:, 0, 0, 0, 0].tolist() == [0, 1] + [1] * count + [0] * (6 - count)


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([(1, 2), (8, 3)], "copies[1] is (8, 3); valid ids are 0 to 7."),
        ([(-1, 2)], "copies[0] is (-1, 2); valid ids are 0 to 7."),
        ([(1, 2), (2, 99)], "copies[1] is (2, 99); valid ids are 0 to 7."),
    ],
)
def test_copy_blocks_refuses_ids_that_are_not_in_the_pool_and_copies_nothing(
    copies: list[tuple[int, int]], message: str
) -> None:
    pool = make_pool()
    pool.as_torch()[0][1] = 1
    with pytest.raises(InvalidInput) as error:
        pool.copy_blocks(copies)
    assert str(error.value) == message
    assert pool.run(read_step).tolist() == [64, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be an int of at least 1."),
        ({"num_layers": True}, "num_layers is True; it must be an int of at least 1."),
        ({"num_blocks": 1}, "num_blocks is 1; it must be an int of at least 2."),
        ({"num_blocks": 8.0}, "num_blocks is 8.0; it must be an int of at least 2."),
        ({"further": [None]}, "spec is None; it must be a KVCacheSpec or a LatentCacheSpec."),
    ],
)
def test_sizes_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        make_pool(**changes)
    assert str(error.value) == message


def test_the_pool_can_be_placed_on_a_device() -> None:
    (device,) = jax.devices("cpu")[:1]
    pool = make_pool(device=device)
    assert pool.run(read_step).devices() == {device}


@pytest.mark.parametrize("device", ["cpu", jax.sharding.PartitionSpec("tp")])
def test_what_is_no_place_for_a_pool_is_refused(device: Any) -> None:
    with pytest.raises(InvalidInput) as error:
        KVPool(SPEC, num_layers=1, num_blocks=4, device=device)
    assert str(error.value) == (
        f"device is {device!r}; it must be one of jax.devices(), a NamedSharding(mesh, PartitionSpec(None, None, None, "
        "'tp')) for a mesh, or None."
    )


def test_a_foreign_view_of_an_array_is_refused_by_name_when_the_step_runs() -> None:
    pool = make_pool()
    kept = []

    def leak(caches: tuple[jax.Array, ...]) -> tuple[int, tuple[jax.Array, ...]]:
        kept.extend(to_torch(cache) for cache in caches)
        return add_step(caches, 1.0)

    with pytest.raises(
        InvalidInput, match=r"^(the step did not consume kv_caches\[0\], so XLA copied it|an array of kv_c)"
    ):
        pool.run(leak)
    kept.clear()
    assert values(pool) == [0, 0]


# A program's first run raises the one, JAX's fast dispatch of later runs the other.
@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_view_that_a_gpu_does_not_donate_is_refused_by_name(kind: type[Exception]) -> None:
    pool = make_pool()
    said = "INVALID_ARGUMENT: Invalid buffer passed to Execute(): Donation requested for buffer with external reference"

    def refuse(caches: tuple[jax.Array, ...]) -> Any:
        raise kind(said)

    with pytest.raises(InvalidInput) as error:
        pool.run(refuse)
    assert str(error.value) == (
        "an array of kv_caches has a view that as_torch() did not give, so XLA cannot update it in place: drop every "
        "torch or numpy view of the arrays first. The pool still holds what it held."
    )
    assert pool.generation == 1


def test_another_value_error_of_a_step_stays_what_it_is() -> None:
    def refuse(caches: tuple[jax.Array, ...]) -> Any:
        raise ValueError("a sum of axes")

    with pytest.raises(ValueError, match=r"^a sum of axes$"):
        make_pool().run(refuse)


def test_unknown_dtypes_are_refused_by_the_spec() -> None:
    with pytest.raises(Unsupported, match=r"^dtype is 'float64'; a KV cache can be one of "):
        KVCacheSpec(num_kv_heads=1, head_size=4, block_size=4, dtype="float64")
