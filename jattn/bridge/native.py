"""An OperationPlan as XLA custom calls: no Python, no copy and no allocation when it runs.

Every use of jaxlib's Triton launcher, which is not a public JAX API, is in this file and in `jattn.bridge.launch`. The
launcher is the FFI target `triton_kernel_call_ffi` that jaxlib registers; it takes code, grid and by-value arguments as
one opaque attribute, and XLA captures it in CUDA graphs. The way to build the attribute is the one of TransformerEngine
(transformer_engine/jax/triton_extensions).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import re
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jattn.bridge.calls import array_spec
from jattn.bridge.kernel_cache import KernelCache, KernelImage, TensorMap, default_directory
from jattn.bridge.launch import TARGET as TARGET
from jattn.bridge.launch import KernelCode, launch_kernel
from jattn.bridge.platforms import refused_on
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call
from torch_core.launch.plan import Descriptor, DeviceLimits, LaunchPlan, OperationPlan, Pointer, Scalar

_LOG = logging.getLogger(__name__)

# From this version on XLA may capture the target in CUDA graphs (jax pull request 37094).
_OLDEST_JAXLIB = (0, 10, 1)
_REMEDY = "use implementation='torch' or 'xla'"
# Shared memory of one block and multiprocessors, for a plugin that does not report them: CUDA programming guide.
_SHARED_MEMORY = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
_HOPPER = DeviceLimits()


_not_on_a_cpu = refused_on(
    "cpu",
    "kernels_are_launched",
    lambda: Unsupported(
        "implementation='triton', the default where JAX sees a CUDA device, launches kernels there, and these arrays "
        "are on a CPU. Move them (jax.device_put(x, jax.devices('cuda')[0])), or name implementation='xla'."
    ),
)


def run_native(call: Call[jax.Array]) -> dict[str, jax.Array]:
    """Runs a call by its plan's kernels as native custom calls: implementation="triton"; see `call_operation`."""
    # Imports Triton; this module must load without it.
    from torch_core.launch.planner import plan_call

    call = call.for_kernels(jnp)
    name, array = next(iter(call.arrays().items()))
    arrays = {**call.arrays(), name: _not_on_a_cpu(array)}
    return call_operation(plan_call(call.map(array_spec), device_limits()), arrays)


def call_operation(
    plan: OperationPlan,
    arrays: Mapping[str, jax.Array],
    *,
    limits: DeviceLimits | None = None,
    cache: KernelCache | None = None,
) -> dict[str, jax.Array]:
    """Adds the launches of a plan to the JAX program that is being traced, or runs them when nothing is.

    Works under jit, scan, while_loop, cond, checkpoint, shard_map (on each device's shards) and jax.export; it has no
    batching and no derivative. An in-place operand is aliased with the array that is returned under its name: it is
    written where it is if the caller donated it or never uses it again, and copied by XLA first otherwise.

    Args:
        plan: made for these shapes and dtypes, contiguous.
        arrays: the plan's inputs by name.
        limits: the device to compile for; the first CUDA device when None.
        cache: compiled kernels; the process-wide one in the user's cache directory when None.

    Returns:
        The plan's outputs and the new values of its in-place operands, by name.

    Raises:
        InvalidInput: an array is missing or has another shape or dtype than the plan was made for.
        Unsupported: triton, a CUDA build of jaxlib or a CUDA device is missing, jaxlib is too old, or a kernel does not
            fit the device; the message names an alternative.
    """
    values = {name: _checked(plan.name, name, arrays.get(name), spec) for name, spec in plan.inputs}
    own = limits is None
    limits = device_limits() if limits is None else limits
    cache = kernel_cache() if cache is None else cache
    for launch in plan.launches:
        code = _code(launch, tuple((name, plan.specs[name]) for name in launch.buffers), limits, cache)
        values.update(_call(launch, code if own else KernelCode(code.whole), plan.specs, values))
    return {name: values[name] for name in (*(name for name, _ in plan.outputs), *plan.in_place)}


def why_not() -> str | None:
    """Returns why no native call can be built here, or None if one can; asks for no device."""
    try:
        _launcher()
    except Unsupported as error:
        return str(error)
    return None


@functools.cache
def device_limits() -> DeviceLimits:
    """Returns the limits of the first CUDA device that JAX sees; the others are taken to be of the same kind.

    Raises:
        Unsupported: JAX sees no CUDA device.
    """
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError as error:
        raise Unsupported(f"native kernels need a CUDA device and JAX sees none; {_REMEDY}.") from error
    major, minor = str(getattr(device, "compute_capability", "0.0")).split(".")
    arch = int(major) * 10 + int(minor)
    shared_memory = getattr(device, "shared_memory_per_block_optin", None) or _SHARED_MEMORY.get(arch)
    if shared_memory is None:
        raise Unsupported(f"compute capability {major}.{minor} is not one that the kernels were built for; {_REMEDY}.")
    num_sms = getattr(device, "core_count", None) or _HOPPER.num_sms
    return DeviceLimits(arch=arch, num_sms=int(num_sms), shared_memory=int(shared_memory))


@functools.cache
def kernel_cache() -> KernelCache:
    """Returns the process-wide kernel cache; in memory only if the user's directory cannot be written or is unsafe."""
    try:
        return KernelCache(default_directory())
    except (OSError, RuntimeError) as error:
        _LOG.warning("every process compiles its kernels anew: %s", error)
        return KernelCache(None)


def _call(
    launch: LaunchPlan, code: KernelCode, specs: Mapping[str, ArraySpec], values: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    # The kernel takes the custom call's operands and then its results, in order. Results that alias an operand come
    # last: the kernel writes them through the operand and has no parameter left for them.
    operands = [name for name in launch.buffers if name in values]
    created = [name for name in launch.buffers if name not in values]
    aliased = [name for name in launch.writes if name in values]
    results = created + aliased
    found = launch_kernel(
        code,
        [values[name] for name in operands],
        [jax.ShapeDtypeStruct(specs[name].shape, specs[name].dtype) for name in results],
        {operands.index(name): results.index(name) for name in aliased},
    )
    return dict(zip(results, found, strict=True))


@functools.lru_cache(maxsize=4096)
def _code(
    launch: LaunchPlan, specs: tuple[tuple[str, ArraySpec], ...], limits: DeviceLimits, cache: KernelCache
) -> KernelCode:
    launcher = _launcher()
    # Needs triton, which _launcher has found.
    from torch_core.launch.compile import check_fits, kernel_variant

    variant = kernel_variant(launch, dict(specs))
    image = cache.get(variant, limits.arch)
    check_fits(launch.name, image.shared_memory, limits)
    constants = {index for index, _ in variant.constants}
    arguments = dict(launch.arguments)
    maps = iter(image.tensor_maps)
    parameters: list[Any] = []
    for index, name in enumerate(launch.kernel.arg_names):
        if index in constants:
            continue
        argument = arguments[name]
        if isinstance(argument, Pointer):
            aligned = index in variant.divisible
            parameters.append(launcher.create_array_parameter(0, 16 if aligned else 1))
        elif isinstance(argument, Descriptor):
            parameters += _descriptor_parameters(launcher, argument, next(maps))
        elif isinstance(argument, Scalar):
            value = float(argument.value) if argument.type == "fp32" else int(argument.value)
            parameters.append(launcher.create_scalar_parameter(value, argument.type))
    name = f"// {hashlib.sha256(image.cubin).hexdigest()}"
    named = _serialised(launcher, image, name, launch.grid, parameters, limits.arch)
    return KernelCode(
        whole=zlib.compress(_serialised(launcher, image, image.ptx, launch.grid, parameters, limits.arch)),
        named=zlib.compress(named),
        loader=zlib.compress(named + _machine_code(image)),
    )


def _serialised(
    launcher: Any, image: KernelImage, ptx: str, grid: tuple[int, ...], parameters: list[Any], arch: int
) -> bytes:
    # Without TTIR, which the launcher never reads.
    kernel = launcher.TritonKernel(image.name, image.num_warps, 1, image.shared_memory, ptx, "", arch)
    x, y, z = grid + (1,) * (3 - len(grid))
    return launcher.TritonKernelCall(kernel, x, y, z, parameters).to_proto(image.name, b"")


def _machine_code(image: KernelImage) -> bytes:
    """Returns the bytes that, appended to a serialised call, give its kernel machine code (jaxlib/gpu/triton.proto).

    The launcher then takes its PTX for a name and looks no code up by another.
    """
    module = _field(1, image.cubin) + _field(2, image.name.encode()) + b"\x18" + _varint(image.shared_memory)
    return _field(1, _field(1, _field(11, module)))


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    low = number & 127
    return bytes([low]) if number < 128 else bytes([low | 128]) + _varint(number >> 7)


def _descriptor_parameters(launcher: Any, descriptor: Descriptor, tensor_map: TensorMap) -> list[Any]:
    create = getattr(launcher, "create_tma_descriptor_parameter", None)
    if create is None:
        raise Unsupported(
            f"jaxlib {_jaxlib_version()} cannot make TMA descriptors, which this kernel needs; update to "
            f"jax[cuda13]>=0.11.2, or {_REMEDY}."
        )
    shape, strides = list(descriptor.shape), list(descriptor.strides)
    # Triton's ABI of a descriptor: the 128-byte map, then its shape as i32, then its strides as i64.
    return [
        create(tensor_map.element_type, tensor_map.swizzle, shape, strides, list(tensor_map.box), 0),
        *(launcher.create_scalar_parameter(size, "i32") for size in shape),
        *(launcher.create_scalar_parameter(stride, "i64") for stride in strides),
    ]


@functools.cache
def _launcher() -> Any:
    if importlib.util.find_spec("triton") is None:
        raise Unsupported(
            f"native kernels need triton, which is not installed: pip install 'jattn[cuda13]', or {_REMEDY}."
        )
    version = _jaxlib_version()
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _OLDEST_JAXLIB:
        oldest = ".".join(map(str, _OLDEST_JAXLIB))
        raise Unsupported(
            f"jaxlib {version} cannot capture Triton kernels in CUDA graphs; update to {oldest} or later, or {_REMEDY}."
        )
    from jaxlib import gpu_triton

    if not hasattr(gpu_triton, "TritonKernelCall"):
        raise Unsupported(
            f"jaxlib {version} has no CUDA plugin, which launches Triton kernels: pip install 'jax[cuda13]', or "
            f"{_REMEDY}."
        )
    return _Launcher(gpu_triton)


class _Launcher:
    # Looks a name up in jaxlib's wrapper and then in the plugin that it wraps.
    def __init__(self, module: Any) -> None:
        self._modules = (module, getattr(module, "_cuda_triton", None))

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)


def _jaxlib_version() -> str:
    return importlib.metadata.version("jaxlib")


def _checked(operation: str, name: str, array: jax.Array | None, spec: ArraySpec) -> jax.Array:
    if array is None:
        raise InvalidInput(f"{operation}: the input {name!r} is missing.")
    if spec.strides is not None:
        raise InvalidInput(
            f"{operation}: the plan has strides {spec.strides} for {name!r}; XLA's operands are contiguous."
        )
    found = array_spec(array)
    if found.shape != spec.shape or found.dtype != spec.dtype:
        raise InvalidInput(
            f"{operation}: {name!r} is {found.dtype}{list(found.shape)}; the plan was made for "
            f"{spec.dtype}{list(spec.shape)}."
        )
    return array
