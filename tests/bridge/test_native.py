"""What the native bridge hands to XLA for CUDA; a recorder stands in for jaxlib's launcher."""

from __future__ import annotations

import dataclasses
import json
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.bridge import native
from jattn.bridge.kernel_cache import KernelCache
from tests.support.sample_kernels import double_and_add, product
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import Descriptor, DeviceLimits

LIMITS = DeviceLimits()


class _RecordedCall:
    def __init__(self, kernel: tuple, x: int, y: int, z: int, parameters: list) -> None:
        name, num_warps, num_ctas, shared, ptx, ttir, arch = kernel
        self._record = {
            "name": name,
            "launch": [num_warps, num_ctas, shared, arch],
            "target": ".target sm_90a" in ptx,
            "ttir": ttir,
            "grid": [x, y, z],
            "parameters": parameters,
        }

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        return json.dumps(self._record).encode()


@pytest.fixture
def launcher(monkeypatch):
    fake = types.SimpleNamespace(
        TritonKernel=lambda *arguments: arguments,
        TritonKernelCall=_RecordedCall,
        create_array_parameter=lambda zeroed, alignment: ["array", zeroed, alignment],
        create_scalar_parameter=lambda value, kind: [kind, value],
    )
    native._code.cache_clear()
    monkeypatch.setattr(native, "_launcher", lambda: fake)
    yield fake
    native._code.cache_clear()


@pytest.fixture(scope="module")
def cache():
    return KernelCache(None)


def _step(cache, limits=LIMITS):
    def step(x, total):
        results = native.call_operation(double_and_add(), {"x": x, "total": total}, limits=limits, cache=cache)
        return results["copy"], results["total"]

    return step


def _lowered(function, *arguments, **jit_options):
    return jax.jit(function, **jit_options).trace(*arguments).lower(lowering_platforms=("cuda",))


ARRAYS = (jax.ShapeDtypeStruct((16,), jnp.float32),) * 2


def test_each_launch_is_one_custom_call_with_the_in_place_operand_aliased(launcher, cache):
    text = _lowered(_step(cache), *ARRAYS).as_text()
    calls = [line for line in text.splitlines() if f"@{native.TARGET}" in line]
    assert len(calls) == 2
    first, second = calls
    assert "output_operand_alias" not in first
    assert "(tensor<16xf32>) -> tensor<16xf32>" in first
    # Operands: doubled, total. Results: copy, which the kernel's last parameter writes, then total, aliased.
    assert "output_tuple_indices = [1], operand_index = 1" in second
    assert "(tensor<16xf32>, tensor<16xf32>) -> (tensor<16xf32>, tensor<16xf32>)" in second


def test_the_opaque_attribute_holds_kernel_grid_and_scalars(launcher, cache):
    plan = double_and_add(40)
    launch = plan.launches[0]
    specs = tuple((name, plan.specs[name]) for name in launch.buffers)
    record = json.loads(zlib.decompress(native._code(launch, specs, LIMITS, cache).whole))
    assert record == {
        "name": "double_kernel",
        "launch": [4, 1, 0, 90],
        "target": True,
        "ttir": "",
        "grid": [3, 1, 1],
        "parameters": [["array", 0, 16], ["fp32", 1.5], ["i32", 40], ["array", 0, 16]],
    }


def test_a_donated_in_place_operand_reaches_the_compiler_as_an_alias(launcher, cache):
    step = _step(cache)
    text = _lowered(lambda x, total: step(x, total)[1], *ARRAYS, donate_argnums=1).as_text()
    assert "tf.aliasing_output = 0" in text


@pytest.mark.parametrize("form", ["scan", "while_loop", "cond", "checkpoint", "nested jit"])
def test_an_operation_can_stand_in_control_flow(launcher, cache, form):
    step = _step(cache)

    def program(x, total):
        if form == "scan":
            return jax.lax.scan(lambda carry, _: (step(x, carry)[1], None), total, None, length=3)[0]
        if form == "while_loop":
            return jax.lax.while_loop(lambda carry: carry[0] < 9, lambda carry: step(x, carry)[1], total)
        if form == "cond":
            return jax.lax.cond(x[0] > 0, lambda: step(x, total)[1], lambda: total)
        if form == "checkpoint":
            return jax.checkpoint(step)(x, total)[1]
        return jax.jit(step)(x, total)[1]

    assert _lowered(program, *ARRAYS).as_text().count(f"@{native.TARGET}") == 2


def test_shapes_can_be_evaluated_without_a_launch(launcher, cache):
    copy, total = jax.eval_shape(_step(cache), *ARRAYS)
    assert copy.shape == total.shape == (16,)


def test_under_shard_map_the_call_sees_the_shards(launcher, cache):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(_step(cache), mesh=mesh, in_specs=spec, out_specs=spec)
    assert _lowered(mapped, *ARRAYS).as_text().count(f"@{native.TARGET}") == 2


def test_a_program_with_native_calls_can_be_exported(launcher, cache):
    allowed = [jax.export.DisabledSafetyCheck.custom_call(native.TARGET)]
    exported = jax.export.export(jax.jit(_step(cache)), platforms=["cuda"], disabled_checks=allowed)(*ARRAYS)
    assert native.TARGET in exported.mlir_module()


def test_the_result_is_deterministic_so_that_compilation_caches_hit(launcher, cache):
    first = _lowered(_step(cache), *ARRAYS).as_text()
    native._code.cache_clear()
    assert _lowered(_step(KernelCache(None)), *ARRAYS).as_text() == first


def test_a_descriptor_becomes_a_map_its_shape_and_its_strides(launcher):
    launcher.create_tma_descriptor_parameter = lambda *arguments: ["map", *arguments]
    descriptor = Descriptor("x", (1024, 128), (128, 1), (64, 128))
    parameters = native._descriptor_parameters(launcher, descriptor, native.TensorMap(9, 3, (64, 64)))
    assert parameters == [
        ["map", 9, 3, [1024, 128], [128, 1], [64, 64], 0],
        ["i32", 1024],
        ["i32", 128],
        ["i64", 128],
        ["i64", 1],
    ]


def test_a_descriptor_of_three_axes_keeps_their_order(launcher):
    launcher.create_tma_descriptor_parameter = lambda *arguments: ["map", *arguments]
    descriptor = Descriptor("x", (100, 8, 128), (1024, 128, 1), (16, 4, 128))
    parameters = native._descriptor_parameters(launcher, descriptor, native.TensorMap(9, 3, (16, 4, 64)))
    assert parameters[0] == ["map", 9, 3, [100, 8, 128], [1024, 128, 1], [16, 4, 64], 0]
    assert parameters[1:4] == [["i32", 100], ["i32", 8], ["i32", 128]]
    assert parameters[4:] == [["i64", 1024], ["i64", 128], ["i64", 1]]


def test_a_jaxlib_without_descriptors_is_named(launcher):
    descriptor = Descriptor("x", (4, 4), (4, 1), (4, 4))
    with pytest.raises(Unsupported, match=r"jaxlib .* cannot make TMA descriptors, .* jax\[cuda13\]>=0\.11\.2"):
        native._descriptor_parameters(launcher, descriptor, native.TensorMap(9, 3, (4, 4)))


def test_a_kernel_that_does_not_fit_the_device_is_refused(launcher, cache):
    limits = DeviceLimits(arch=90, num_sms=132, shared_memory=1024)
    with pytest.raises(
        Unsupported, match=r"kernel product_kernel needs .* gives a block 1024; use implementation='xla'"
    ):
        native.call_operation(product(), {"x": jnp.zeros((128, 128), jnp.bfloat16)}, limits=limits, cache=cache)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": jnp.zeros(16)}, "double_and_add: the input 'total' is missing"),
        ({"x": jnp.zeros(15), "total": jnp.zeros(16)}, r"'x' is float32\[15\]; the plan was made for float32\[16\]"),
        ({"x": jnp.zeros(16, jnp.int32), "total": jnp.zeros(16)}, r"'x' is int32\[16\]"),
    ],
)
def test_arrays_that_the_plan_was_not_made_for_are_refused(launcher, cache, arrays, message):
    with pytest.raises(InvalidInput, match=message):
        native.call_operation(double_and_add(), arrays, limits=LIMITS, cache=cache)


def test_a_strided_plan_is_refused(launcher, cache):
    plan = dataclasses.replace(product(), inputs=(("x", ArraySpec((128, 128), "bfloat16", (1, 128))),))
    with pytest.raises(InvalidInput, match="XLA's operands are contiguous"):
        native.call_operation(plan, {"x": jnp.zeros((128, 128), jnp.bfloat16)}, limits=LIMITS, cache=cache)


def test_a_spec_of_an_array_uses_the_names_of_the_specs():
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.int32, jnp.bool_):
        assert native.array_spec(jnp.zeros((2, 3), dtype)) == ArraySpec((2, 3), np.dtype(dtype).name)


@pytest.mark.parametrize("error", [PermissionError("read-only"), RuntimeError("no home")])
def test_without_a_writable_home_kernels_are_kept_in_memory(monkeypatch, error):
    def refuse():
        raise error

    monkeypatch.setattr(native, "default_directory", refuse)
    native.kernel_cache.cache_clear()
    assert native.kernel_cache()._directory is None
    native.kernel_cache.cache_clear()


def test_a_directory_that_others_may_write_is_named_and_kernels_are_kept_in_memory(monkeypatch, tmp_path, caplog):
    tmp_path.chmod(0o777)
    monkeypatch.setattr(native, "default_directory", lambda: tmp_path)
    native.kernel_cache.cache_clear()
    assert native.kernel_cache()._directory is None
    assert f"chmod go-w {tmp_path}" in caplog.text
    native.kernel_cache.cache_clear()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one here")
def test_without_a_cuda_device_the_limits_are_unknown():
    native.device_limits.cache_clear()
    with pytest.raises(Unsupported, match="need a CUDA device and JAX sees none; use implementation='torch' or 'xla'"):
        native.device_limits()


@pytest.fixture
def fresh_launcher():
    native._launcher.cache_clear()
    yield
    native._launcher.cache_clear()


def test_a_missing_triton_is_named(monkeypatch, fresh_launcher):
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"^native kernels need triton, which is not installed: pip") as refused:
        native._launcher()
    assert refused.value.argument is None


@pytest.mark.parametrize("version", ["0.10.0", "0.9.2.dev20260101"])
def test_an_old_jaxlib_is_named(monkeypatch, fresh_launcher, version):
    monkeypatch.setattr(native.importlib.metadata, "version", lambda name: version)
    assert f"jaxlib {version} cannot capture Triton kernels in CUDA graphs; update to 0.10.1" in (
        native.why_not() or ""
    )


def test_a_jaxlib_without_cuda_is_named(monkeypatch, fresh_launcher):
    import jaxlib.gpu_triton

    monkeypatch.delattr(jaxlib.gpu_triton, "TritonKernelCall", raising=False)
    assert "has no CUDA plugin, which launches Triton kernels: pip install 'jax[cuda13]'" in (native.why_not() or "")
