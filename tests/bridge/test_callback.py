"""The torch callback: XLA's own memory, in place, exactly as often as the program says, and honest about errors."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax import lax

from jattn.bridge import call_torch, errors, typed_errors
from jattn.bridge import callback as callback_module
from torch_core.base.errors import PoolLost

CACHE_SHAPE = (64, 32)
CACHE_BYTES = 64 * 32 * 4
STEPS = 100


class Writer:
    """Adds a number to row 0 of its cache in place, and keeps the addresses it saw."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def write(self, cache: torch.Tensor, amount: torch.Tensor) -> None:
        self.addresses.append(cache.data_ptr())
        cache[0] += amount

    def __call__(self, cache: jax.Array, amount: jax.Array) -> jax.Array:
        return call_torch(self.write, [cache, amount], [struct(cache)], aliases={0: 0})[0]


def struct(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def double(source: torch.Tensor, target: torch.Tensor) -> None:
    torch.mul(source, 2, out=target)


def doubled(array: jax.Array, function: Callable[..., None] = double, **options: Any) -> jax.Array:
    return call_torch(function, [array], [struct(array)], **options)[0]


# Each program updates `layers` caches `writes` times; row 0 of each grows by `writes`.
def once(writer: Writer, caches: list[jax.Array]) -> list[jax.Array]:
    return [writer(cache, jnp.float32(1)) for cache in caches]


def in_scan(writer: Writer, caches: list[jax.Array]) -> list[jax.Array]:
    return lax.scan(lambda carry, one: (once(writer, carry), None), caches, jnp.ones(3))[0]


def in_while_loop(writer: Writer, caches: list[jax.Array]) -> list[jax.Array]:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, once(writer, c[1])), (0, caches))[1]


def in_cond(writer: Writer, caches: list[jax.Array]) -> list[jax.Array]:
    full = caches[0][1, 0] < 1
    return lax.cond(full, functools.partial(once, writer), lambda same: same, caches)


def in_checkpoint(writer: Writer, caches: list[jax.Array]) -> list[jax.Array]:
    return jax.checkpoint(functools.partial(once, writer))(caches)


def in_nested_jit(writer: Writer, caches: list[jax.Array]) -> list[jax.Array]:
    return jax.jit(functools.partial(once, writer))(caches)


PROGRAMS = {
    "once": (once, 1, 1),
    "unrolled over 8 layers": (once, 8, 1),
    "scan": (in_scan, 2, 3),
    "while_loop": (in_while_loop, 2, 3),
    "cond": (in_cond, 2, 1),
    "checkpoint": (in_checkpoint, 2, 1),
    "nested jit": (in_nested_jit, 2, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_donated_cache_stays_at_its_address_before_inside_and_after_100_steps(name: str) -> None:
    program, layers, _ = PROGRAMS[name]
    writer = Writer()
    step = jax.jit(functools.partial(program, writer), donate_argnums=0)
    caches = [jnp.zeros(CACHE_SHAPE) for _ in range(layers)]
    before = [cache.unsafe_buffer_pointer() for cache in caches]
    for _ in range(STEPS):
        caches = step(caches)
    jax.block_until_ready(caches)
    assert [cache.unsafe_buffer_pointer() for cache in caches] == before
    assert set(writer.addresses) == set(before)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_callback_runs_exactly_as_often_as_the_program_says(name: str) -> None:
    program, layers, writes = PROGRAMS[name]
    writer = Writer()
    step = jax.jit(functools.partial(program, writer), donate_argnums=0)
    caches = step(step([jnp.zeros(CACHE_SHAPE) for _ in range(layers)]))
    assert [cache[0, 0].item() for cache in caches] == [2 * writes] * layers
    assert len(writer.addresses) == 2 * writes * layers


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiled_program_needs_no_temporary_of_the_size_of_a_cache(name: str) -> None:
    program, layers, _ = PROGRAMS[name]
    step = jax.jit(functools.partial(program, Writer()), donate_argnums=0)
    caches = [jax.ShapeDtypeStruct(CACHE_SHAPE, jnp.float32)] * layers
    compiled = step.lower(caches).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < CACHE_BYTES / 2
    assert memory.alias_size_in_bytes == layers * CACHE_BYTES


def test_an_output_that_aliases_nothing_is_memory_of_its_own() -> None:
    array = jnp.arange(4.0)
    assert jax.jit(doubled)(array).tolist() == [0, 2, 4, 6]
    assert array.tolist() == [0, 1, 2, 3]


def test_inputs_reach_the_function_without_a_copy() -> None:
    seen = []

    def look(source: torch.Tensor, target: torch.Tensor) -> None:
        seen.append(source.data_ptr())
        target.zero_()

    array = jnp.arange(16.0)
    jax.block_until_ready(jax.jit(lambda x: doubled(x, look))(array))
    assert seen == [array.unsafe_buffer_pointer()]


def test_aliased_and_own_outputs_come_in_the_order_of_outputs() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, own: torch.Tensor) -> None:
        b += 10
        torch.add(a, b, out=own)

    def program(a: jax.Array, b: jax.Array) -> list[jax.Array]:
        return call_torch(function, [a, b], [struct(a), struct(b)], aliases={1: 1})

    own, b = jax.jit(program)(jnp.array([1.0]), jnp.array([2.0]))
    assert (own.item(), b.item()) == (13, 12)


def test_without_donation_the_callers_array_is_untouched() -> None:
    writer, cache = Writer(), jnp.zeros(CACHE_SHAPE)
    assert jax.jit(writer)(cache, jnp.float32(5))[0, 0] == 5
    assert cache[0, 0] == 0


def test_an_old_value_read_after_the_write_is_still_the_old_value() -> None:
    writer = Writer()

    def program(cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = writer(cache, jnp.float32(1))
        return cache.sum() + 0 * new[0, 0], new

    old, new = jax.jit(program, donate_argnums=0)(jnp.zeros(CACHE_SHAPE))
    assert (old.item(), new[0, 0].item()) == (0, 1)


def test_two_writes_with_different_data_both_happen_in_order() -> None:
    def overwrite(cache: torch.Tensor, amount: torch.Tensor) -> None:
        cache[0] = cache[0] * 10 + amount

    def program(cache: jax.Array) -> jax.Array:
        for amount in (1.0, 2.0, 3.0):
            (cache,) = call_torch(overwrite, [cache, jnp.float32(amount)], [struct(cache)], aliases={0: 0})
        return cache

    assert jax.jit(program, donate_argnums=0)(jnp.zeros(CACHE_SHAPE))[0, 0] == 123


def test_two_identical_writes_in_a_row_are_not_merged() -> None:
    writer = Writer()

    def program(cache: jax.Array) -> jax.Array:
        return writer(writer(cache, jnp.float32(1)), jnp.float32(1))

    assert jax.jit(program, donate_argnums=0)(jnp.zeros(CACHE_SHAPE))[0, 0] == 2
    assert len(writer.addresses) == 2


def test_a_result_that_several_read_is_computed_once() -> None:
    calls = []

    def count(source: torch.Tensor, target: torch.Tensor) -> None:
        calls.append(1)
        double(source, target)

    def program(array: jax.Array) -> tuple[jax.Array, ...]:
        result = doubled(array, count)
        return result + 1, result.sum(), result

    jax.block_until_ready(jax.jit(program)(jnp.ones(8)))
    assert len(calls) == 1


def test_a_result_that_nobody_reads_is_not_computed() -> None:
    calls = []

    def program(array: jax.Array) -> jax.Array:
        doubled(array, lambda *tensors: calls.append(1))
        return array + 1

    jax.block_until_ready(jax.jit(program)(jnp.ones(8)))
    assert calls == []


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_empty_and_scalar_buffers_cross(shape: tuple[int, ...]) -> None:
    assert jax.jit(doubled)(jnp.ones(shape)).tolist() == (2 * jnp.ones(shape)).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "int8", "bool"])
def test_every_shared_dtype_arrives_as_itself(dtype: str) -> None:
    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.dtype is getattr(torch, dtype)
        target.copy_(source)

    array = jnp.array([0, 1, 1, 0]).astype(dtype)
    result = jax.jit(lambda x: doubled(x, copy))(array)
    assert result.dtype == array.dtype
    assert (result == array).all()


def test_the_function_may_be_collected_by_nobody_while_the_program_lives() -> None:
    program = jax.jit(lambda x: doubled(x, lambda source, target: double(source, target)))
    assert program(jnp.ones(2)).tolist() == [2, 2]
    assert program(jnp.ones(2)).tolist() == [2, 2]


def test_no_tensor_outlives_its_call() -> None:
    born: list[weakref.ref[torch.Tensor]] = []

    def remember(source: torch.Tensor, target: torch.Tensor) -> None:
        born.extend([weakref.ref(source), weakref.ref(target)])
        double(source, target)

    jax.block_until_ready(jax.jit(lambda x: doubled(x, remember))(jnp.ones(2)))
    assert [tensor() for tensor in born] == [None, None]


def test_no_tensor_outlives_a_failed_call_though_the_error_is_kept() -> None:
    born: list[weakref.ref[torch.Tensor]] = []

    def fail(source: torch.Tensor, target: torch.Tensor) -> None:
        born.extend([weakref.ref(source), weakref.ref(target)])
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad") as kept, typed_errors():
        jax.block_until_ready(jax.jit(lambda x: doubled(x, fail))(jnp.ones(2)))
    assert [tensor() for tensor in born] == [None, None]
    assert "in fail" in "".join(traceback.format_exception(kept.value))


def test_no_tensor_outlives_a_failed_call_in_the_errors_behind_its_error() -> None:
    born: list[weakref.ref[torch.Tensor]] = []

    def look_up(source: torch.Tensor) -> None:
        born.append(weakref.ref(source))
        raise KeyError("behind")

    def fail(source: torch.Tensor, target: torch.Tensor) -> None:
        try:
            look_up(source)
        except KeyError as error:
            raise ValueError("bad") from error

    with pytest.raises(jax.errors.JaxRuntimeError, match="bad"):
        jax.block_until_ready(jax.jit(lambda x: doubled(x, fail))(jnp.ones(2)))
    assert born[0]() is None


def failing(error: BaseException, *, after: int = 0) -> Callable[[jax.Array], jax.Array]:
    """A program that works so many times, then fails always."""
    left = [None] * after

    def fail(source: torch.Tensor, target: torch.Tensor) -> None:
        if not left:
            raise error
        left.pop()

    program = jax.jit(lambda x: doubled(x, fail))
    for _ in range(after):
        program(jnp.ones(2))
    return program


def untyped_failure(error: BaseException) -> Exception:
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(failing(error)(jnp.ones(2)))
    return caught.value


@pytest.mark.parametrize(
    "error", [KeyError("block"), KeyboardInterrupt(), ValueError("a", 1), SystemExit(3)], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_typed_errors_raises_the_very_exception_that_the_function_raised(error: BaseException, after: int) -> None:
    # JAX raises a JaxRuntimeError from a program's first run and a plain ValueError from its fast dispatch after it.
    program = failing(error, after=after)
    with pytest.raises(type(error)) as caught, typed_errors():
        jax.block_until_ready(program(jnp.ones(2)))
    assert caught.value is error


def test_the_same_failure_seen_twice_is_typed_twice() -> None:
    failure = untyped_failure(KeyError("block"))
    for _ in range(2):
        with pytest.raises(KeyError), typed_errors():
            raise failure


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_nothing_that_a_failed_programs_callers_held_is_kept(looks: int) -> None:
    class Held:
        pass

    def fail(source: torch.Tensor, target: torch.Tensor) -> None:
        raise KeyError("block")

    def call() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(jax.errors.JaxRuntimeError) as failure:
            jax.block_until_ready(jax.jit(lambda x: doubled(x, fail))(jnp.ones(2)))
        for _ in range(looks):
            with contextlib.suppress(KeyError), typed_errors():
                raise failure.value
        return weakref.ref(held)

    held = call()
    # pytest.raises makes cycles of its own.
    gc.collect()
    assert held() is None


def test_an_error_that_cannot_be_copied_is_typed_at_the_first_look() -> None:
    failure = untyped_failure(PoolLost("planted", generation=3))
    with pytest.raises(PoolLost), typed_errors():
        raise failure
    with pytest.raises(jax.errors.JaxRuntimeError, match="PoolLost: planted"), typed_errors():
        raise failure


def test_without_typed_errors_the_failure_still_names_type_and_text() -> None:
    assert re.search(r"KeyError: 'block' \[jattn-callback-error-\d+\]", str(untyped_failure(KeyError("block"))))


@pytest.mark.usefixtures("on_cpu")
def test_outside_jit_the_functions_own_exception_comes_out() -> None:
    def fail(source: torch.Tensor, target: torch.Tensor) -> None:
        raise KeyError("block")

    with pytest.raises(KeyError, match="block"):
        doubled(jnp.ones(2), fail)


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError, ValueError])
def test_typed_errors_leaves_foreign_errors_alone(error: type[Exception]) -> None:
    foreign = error("INTERNAL: something else")
    with pytest.raises(error) as caught, typed_errors():
        raise foreign
    assert caught.value is foreign


def test_two_failures_do_not_get_mixed_up() -> None:
    first, second = untyped_failure(KeyError("first")), untyped_failure(ValueError("second"))
    with pytest.raises(ValueError, match="second"), typed_errors():
        raise second
    with pytest.raises(KeyError, match="first"), typed_errors():
        raise first


def test_a_program_works_after_it_failed() -> None:
    fail_next = [True]

    def sometimes(source: torch.Tensor, target: torch.Tensor) -> None:
        if fail_next.pop() if fail_next else False:
            raise KeyError("once")
        double(source, target)

    program = jax.jit(lambda x: doubled(x, sometimes))
    with pytest.raises(KeyError), typed_errors():
        jax.block_until_ready(program(jnp.ones(2)))
    assert program(jnp.ones(2)).tolist() == [2, 2]


def test_recorded_errors_are_bounded() -> None:
    program = failing(KeyError("again"))
    for _ in range(100):
        with pytest.raises(KeyError), typed_errors():
            jax.block_until_ready(program(jnp.ones(2)))
    assert len(errors._recorded._errors) == 64


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_count_is_set_for_the_call_and_restored_after_it(fails: bool) -> None:
    inside = []

    def function(source: torch.Tensor, target: torch.Tensor) -> None:
        inside.append(torch.get_num_threads())
        if fails:
            raise KeyError("bad")

    call = callback_module._TorchCallback(function, (), 2)
    array = jax.device_put(jnp.ones(2), jax.devices("cpu")[0])
    if fails:
        with pytest.raises(RuntimeError, match="KeyError"):
            call(None, [], array, array)
    else:
        call(None, [], array, array)
    assert inside == [2]
    assert torch.get_num_threads() == 3


def test_eight_threads_run_programs_at_once_with_equal_results() -> None:
    programs = [jax.jit(Writer(), donate_argnums=0) for _ in range(8)]
    totals: list[float | None] = [None] * 8

    def work(index: int) -> None:
        cache = jnp.zeros(CACHE_SHAPE)
        for _ in range(STEPS):
            cache = programs[index](cache, jnp.float32(index + 1))
        totals[index] = cache[0, 0].item()

    workers = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert totals == [STEPS * (index + 1) for index in range(8)]


def test_calls_outside_jit_with_equal_functions_compile_once(caplog: pytest.LogCaptureFixture) -> None:
    def compilations() -> int:
        caplog.clear()
        with jax.log_compiles(True):
            doubled(jnp.ones((3, 5)), num_threads=1)
        return sum("buffer_callback" in message for message in caplog.messages if message.startswith("Compiling"))

    assert compilations() == 1
    assert compilations() == 0
