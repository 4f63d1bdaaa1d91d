"""One launch of a kernel as a JAX primitive, which is lowered to jaxlib's launcher with no more than it needs.

XLA initialises the launcher at every execution of a program, also when it replays a CUDA graph, and the launcher then
copies, hashes and compares the whole attribute of each call (jaxlib/gpu/triton_kernels.cc, GetOrCreateKernelCall). With
the code in it that is 4 to 60 kilobytes a launch, so a program names code that its process has loaded before. A program
stored by `jax.export` runs in other processes and contains the code itself.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.config import persistent_cache_min_compile_time_secs
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jattn.bridge.calls import pinned

_LOG = logging.getLogger(__name__)

#: The custom call that every launch becomes. `jax.export` must be told that it may appear:
#: `disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(TARGET)]`.
TARGET = "triton_kernel_call_ffi"


@dataclass(frozen=True, slots=True)
class KernelCode:
    """A launch as jaxlib's launcher takes it.

    Attributes:
        whole: the attribute with the code.
        named: the attribute with the name of code that `loader` has loaded; None for another process's device.
        loader: loads that code when it is compiled; never run.
    """

    whole: bytes
    named: bytes | None = None
    loader: bytes | None = None


def launch_kernel(
    code: KernelCode, operands: Sequence[jax.Array], results: Sequence[jax.ShapeDtypeStruct], aliases: Mapping[int, int]
) -> list[jax.Array]:
    """Adds a launch to the program that is being traced, or runs it when nothing is; see `native.call_operation`.

    Args:
        code: the launch.
        operands: its inputs.
        results: its results.
        aliases: numbers of results by those of the operands that they take the place of.
    """
    shapes = tuple((result.shape, result.dtype) for result in results)
    kept = pinned(operands, {*aliases, *_unaligned_slices(operands)})
    found = _launch.bind(*kept, code=code, results=shapes, aliases=tuple(aliases.items()))
    return pinned(found, {*aliases.values(), *_unaligned_slices(results)})


def _unaligned_slices(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> Iterator[int]:
    """Yields the numbers of arrays that, if they were slices, could begin between two multiples of 16 bytes.

    XLA folds such a slice into the call if its length is a multiple of 256 bytes (IsAlignedSlice of
    dynamic_slice_fusion_rewriter_v2.cc), and the launcher then refuses its address: kernels are compiled for aligned
    ones. A slice along the first axis begins at a multiple of a row's bytes. The few rows of integers may be cut along
    the next axis too, as `block_tables[:1, 1:33]`; reshaped slices are not seen.
    """
    for number, array in enumerate(arrays):
        shape, dtype = array.shape, jnp.dtype(array.dtype)
        if jnp.issubdtype(dtype, jnp.integer):
            shape = tuple(itertools.dropwhile(lambda size: size == 1, shape))
        if math.prod(shape[1:]) * dtype.itemsize % 16:
            yield number


_launch = Primitive("jattn_launch")
_launch.multiple_results = True


@_launch.def_abstract_eval
def _results(*_: Any, results: Sequence[Any], **__: Any) -> list[Any]:
    whole = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    return [ShapedArray(shape, dtype, sharding=whole) for shape, dtype in results]


@_launch.def_impl
def _run(*operands: jax.Array, **launched: Any) -> list[jax.Array]:
    # There is no other way to run a kernel, so `jax.disable_jit` must not ask this rule again.
    with jax.disable_jit(False):
        return _in_a_program(*operands, launched=tuple(launched.items()))


@functools.partial(jax.jit, static_argnames="launched")
def _in_a_program(*operands: jax.Array, launched: tuple[tuple[str, Any], ...]) -> list[jax.Array]:
    return _launch.bind(*operands, **dict(launched))


def _lower(context: Any, *operands: Any, code: KernelCode, aliases: Any, **_: Any) -> Any:
    named = None if context.module_context.lowering_parameters.for_export else code.named
    opaque = named if named is not None and _is_loaded(code.loader) else code.whole
    return jax.ffi.ffi_lowering(TARGET, operand_output_aliases=dict(aliases))(context, *operands, opaque=opaque)


mlir.register_lowering(_launch, _lower)


@functools.cache
def _is_loaded(loader: bytes) -> bool:
    # In a thread of its own: meshes, devices and options of the program that is being lowered are not this one's.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_load, loader).result()


def _load(loader: bytes) -> bool:
    """Compiles a program whose custom call loads a kernel; jaxlib keeps it for as long as the process lives."""
    result = jax.ShapeDtypeStruct((1,), "uint8")
    # An unused attribute: the same program from JAX's compilation cache would not load the code. The code is not stored
    # there either, because other processes would not find it.
    program = jax.jit(lambda: jax.ffi.ffi_call(TARGET, result)(opaque=loader, once=uuid.uuid4().hex))
    try:
        devices = jax.local_devices(backend="cuda")
        if len({getattr(device, "compute_capability", None) for device in devices}) > 1:
            # Machine code is one kind's; the others make theirs of the code that a call carries.
            return False
        with persistent_cache_min_compile_time_secs(math.inf), jax.default_device(devices[0]):
            program.lower().compile()
    except RuntimeError as error:
        # The device is missing, jaxlib takes no machine code, or there is no memory: each call carries its code.
        _LOG.debug("kernels are launched with their code, as it could not be loaded: %s", error)
        return False
    return True
