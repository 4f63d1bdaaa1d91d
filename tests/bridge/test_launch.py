"""What of a kernel stands in a program: the name of code that the process has loaded, or the code."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.bridge import launch
from jattn.bridge.launch import TARGET, KernelCode, launch_kernel
from tests.support.compilation_cache import programs_kept_in

CODE = KernelCode(whole=b"whole", named=b"named", loader=b"loader")
CODE_OF_ANOTHER_DEVICE = KernelCode(whole=b"whole")
SHAPE = jax.ShapeDtypeStruct((2, 4), jnp.float32)


def _program(code, shape=SHAPE):
    return jax.jit(lambda x, y: launch_kernel(code, [x, y], [shape, shape], {1: 1}))


def _lowered(code, shape=SHAPE) -> str:
    return _program(code, shape).trace(shape, shape).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture(params=[True, False], ids=["loads", "does not load"])
def loads(request, monkeypatch):
    monkeypatch.setattr(launch, "_is_loaded", lambda loader: request.param)
    return request.param


def test_a_program_names_code_that_its_process_could_load_and_carries_other_code(loads):
    text = _lowered(CODE)
    assert ('opaque = "named"' in text) is loads
    assert ('opaque = "whole"' in text) is not loads


def test_code_for_another_device_is_carried(loads):
    assert 'opaque = "whole"' in _lowered(CODE_OF_ANOTHER_DEVICE)


def test_an_exported_program_carries_its_code(loads):
    program = _program(CODE)
    program.trace(SHAPE, SHAPE).lower(lowering_platforms=("cuda",))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]
    exported = jax.export.export(program, platforms=["cuda"], disabled_checks=allowed)(SHAPE, SHAPE)
    assert 'opaque = "whole"' in exported.mlir_module()


def test_operands_that_results_take_the_place_of_are_aliased(loads):
    assert "output_tuple_indices = [1], operand_index = 1" in _lowered(CODE)


def test_only_what_is_updated_in_place_is_kept_from_slices_around_the_call(loads):
    lines = [line.strip() for line in _lowered(CODE).splitlines()]
    call = next(index for index, line in enumerate(lines) if TARGET in line)
    (before,) = [line for line in lines[:call] if "optimization_barrier" in line]
    (after,) = [line for line in lines[call:] if "optimization_barrier" in line]
    assert before.split(" = ")[1].startswith("stablehlo.optimization_barrier %arg1")
    name, operands = lines[call].split(":2 = ")[0], lines[call].split("(")[1].split(")")[0].split(", ")
    assert operands == ["%arg0", before.split(" = ")[0]]
    assert f"optimization_barrier {name}#1" in after


@pytest.mark.parametrize(
    ("shape", "dtype", "begins_unaligned"),
    [
        ((64,), jnp.int32, True),
        ((64, 6), jnp.int32, True),
        ((64, 8), jnp.int32, False),
        ((1, 64), jnp.int32, True),
        ((1, 1, 64), jnp.float32, False),
        ((32, 3885), jnp.float32, True),
        ((32, 8, 64), jnp.bfloat16, False),
        ((64, 1), jnp.bfloat16, True),
        ((16, 16), jnp.float8_e4m3fn, False),
    ],
)
def test_operands_and_results_that_could_be_unaligned_slices_are_kept_from_slices(shape, dtype, begins_unaligned):
    text = _lowered(CODE_OF_ANOTHER_DEVICE, jax.ShapeDtypeStruct(shape, dtype))
    assert text.count("stablehlo.optimization_barrier") == (4 if begins_unaligned else 2)


def test_a_jaxlib_that_does_not_load_machine_code_is_asked_once(monkeypatch):
    asked = []

    def refuse(*_, **__):
        asked.append(1)
        raise jax.errors.JaxRuntimeError("no such field")

    monkeypatch.setattr(jax, "local_devices", lambda backend: jax.devices("cpu"))
    monkeypatch.setattr(jax.ffi, "ffi_call", refuse)
    launch._is_loaded.cache_clear()
    assert [launch._is_loaded(b"code"), launch._is_loaded(b"code"), len(asked)] == [False, False, 1]
    launch._is_loaded.cache_clear()


def test_code_is_not_loaded_where_devices_are_of_several_kinds(monkeypatch):
    kinds = [SimpleNamespace(compute_capability=kind) for kind in ("8.6", "9.0")]
    monkeypatch.setattr(jax, "local_devices", lambda backend: kinds)
    assert not launch._load(b"code")


def test_what_loads_code_is_not_kept_in_the_compilation_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "local_devices", lambda backend: jax.devices("cpu"))
    monkeypatch.setattr(jax.ffi, "ffi_call", lambda *_: lambda **__: jnp.zeros(1))
    with programs_kept_in(tmp_path):
        jax.jit(lambda x: x + 1)(1.0)
        kept = sorted(tmp_path.iterdir())
        assert launch._load(b"code")
    assert kept
    assert sorted(tmp_path.iterdir()) == kept


def test_a_kernel_that_runs_by_itself_is_a_program_without_jit_too(monkeypatch):
    monkeypatch.setattr(launch.jax.ffi, "ffi_lowering", lambda *_, **__: lambda _, x, **__: [x])
    monkeypatch.setattr(launch, "_is_loaded", lambda loader: False)
    with jax.disable_jit():
        np.testing.assert_array_equal(launch_kernel(CODE, [jnp.ones(SHAPE.shape)], [SHAPE], {})[0], 1)


@pytest.mark.gpu
def test_a_program_on_a_device_names_its_kernels_and_an_exported_one_carries_them():
    from jattn.bridge import native
    from tests.support.sample_kernels import double_and_add

    def step(x, total):
        return native.call_operation(double_and_add(), {"x": x, "total": total})["total"]

    program, x = jax.jit(step), jnp.arange(16.0)
    lowered = program.lower(x, x)
    np.testing.assert_array_equal(lowered.compile()(x, jnp.ones(16)), 1 + 3 * np.arange(16.0))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]
    exported = jax.export.export(program, disabled_checks=allowed)(x, x)
    np.testing.assert_array_equal(exported.call(x, jnp.ones(16)), 1 + 3 * np.arange(16.0))
    assert len(lowered.as_text()) < len(exported.mlir_module()) - 1000
