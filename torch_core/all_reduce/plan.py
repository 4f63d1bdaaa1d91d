"""The plans of sums and exchanges over devices, and what each of them needs for it."""

from __future__ import annotations

from torch_core.all_reduce.kernel import all_reduce_kernel, exchange_kernel
from torch_core.errors import InvalidInput
from torch_core.plan.operands import ceil_div, named_launch
from torch_core.plan.plan import OperationPlan, Pointer, Scalar
from torch_core.specs import DTYPE_BYTES, ArraySpec

__all__ = ["exchanges", "peers_size", "plan_all_reduce", "plan_exchange", "sums", "workspace_words"]

_DTYPES = ("bfloat16", "float16", "float32")
# A warp's words are neighbours, so that each of its stores to another device is full: one word for each thread.
_BLOCK, _WARPS = 256, 8
_MAX_BLOCKS = 1024
# A look takes about a microsecond. A device may load its kernels, or compile them, while another waits for it.
_MAX_POLLS = 1 << 26


def sums(x: ArraySpec, world: int) -> bool:
    """Returns whether the kernel sums such an array over so many devices, and is the fastest to do it."""
    return x.dtype in _DTYPES and exchanges(_num_bytes(x), world)


def exchanges(num_bytes: int, world: int) -> bool:
    """Returns whether the kernel exchanges parts of so many bytes between so many devices, and is the fastest."""
    return num_bytes % 4 == 0 and 0 < num_bytes <= _max_bytes(world)


def workspace_words(world: int) -> int:
    """Returns the 64-bit words of zeros that each device keeps: the blocks' counts, and two slots for every rank."""
    return _MAX_BLOCKS // 2 + 2 * world * _MAX_BLOCKS * _BLOCK


def peers_size(world: int) -> int:
    """Returns the 32-bit words of a device's table, which are 64-bit ones: rank, its workspace's address, and all."""
    return 4 + 2 * world


def plan_all_reduce(x: ArraySpec, world: int) -> OperationPlan:
    """Plans the sum of x over devices; buffers are "x", "peers" and "out".

    Args:
        x: each device's part, contiguous.
        world: devices.

    Raises:
        InvalidInput: a dtype or a size that the kernel does not take.
    """
    if not sums(x, world):
        raise InvalidInput(
            f"all_reduce: x is {x.dtype}{list(x.shape)}; over {world} devices it must be of {', '.join(_DTYPES)}, and "
            f"of whole 32-bit words, {_max_bytes(world)} bytes at most. Sum it with jax.lax.psum."
        )
    return _plan("all_reduce", all_reduce_kernel, x, x, _num_bytes(x) // 4, world)


def plan_exchange(x: ArraySpec, world: int) -> OperationPlan:
    """Plans the exchange of parts between devices; buffers are "x", "peers" and "out", int32[world, words].

    Args:
        x: int32[world, words], a part for every device, or int32[1, words], one for all.
        world: devices.

    Raises:
        InvalidInput: a part that the kernel does not take.
    """
    parts, words = x.shape
    if x.dtype != "int32" or parts not in (1, world) or not exchanges(4 * words, world):
        raise InvalidInput(
            f"exchange: x is {x.dtype}{list(x.shape)}; over {world} devices it must be int32, one part or {world}, of "
            f"{_max_bytes(world)} bytes at most. Move it with jax.lax.all_gather or all_to_all."
        )
    stride = {"part_stride": Scalar(words if parts > 1 else 0, "i32", specialize=False)}
    return _plan("exchange", exchange_kernel, x, ArraySpec((world, words), "int32"), words, world, stride)


def _plan(
    name: str,
    kernel: object,
    x: ArraySpec,
    out: ArraySpec,
    num_words: int,
    world: int,
    further: dict[str, Scalar] | None = None,
) -> OperationPlan:
    arguments = {
        **{name: Pointer(name) for name in ("x", "peers", "out")},
        "num_words": Scalar(num_words, "i32", specialize=False),
        **(further or {}),
    }
    constants = {"WORLD": world, "BLOCK": _BLOCK, "MAX_BLOCKS": _MAX_BLOCKS, "MAX_POLLS": _MAX_POLLS}
    options = {"writes": ("out",), "num_warps": _WARPS, "num_stages": 1, "hot": True}
    launch = named_launch(kernel, (ceil_div(num_words, _BLOCK),), arguments, constants, **options)
    inputs = {"x": x, "peers": ArraySpec((peers_size(world),), "int32")}
    return OperationPlan.of(name, inputs, (launch,), {"out": ArraySpec(out.shape, out.dtype)})


def _num_bytes(x: ArraySpec) -> int:
    return x.size * DTYPE_BYTES[x.dtype]


def _max_bytes(world: int) -> int:
    # Each device sends it to all the others.
    return _MAX_BLOCKS * _BLOCK * 4 // (world - 1) if world > 1 else 0
