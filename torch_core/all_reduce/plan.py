"""The plans of sums and exchanges over devices, and what each of them needs for it."""

from __future__ import annotations

from typing import NamedTuple

from torch_core.all_reduce.kernel import all_reduce_kernel, exchange_kernel
from torch_core.errors import InvalidInput
from torch_core.plan.operands import ceil_div, named_launch
from torch_core.plan.plan import OperationPlan, Pointer, Scalar
from torch_core.specs import DTYPE_BYTES, ArraySpec

__all__ = ["exchanges", "peers_size", "plan_all_reduce", "plan_exchange", "sums", "workspace_words"]

_DTYPES = ("bfloat16", "float16", "float32")
# Bytes that a device sends to all others together.
_MAX_BYTES = 1 << 20
_WARPS = 8
# A look takes about a microsecond. A device may load its kernels, or compile them, while another waits for it.
_MAX_POLLS = 1 << 26


class _Region(NamedTuple):
    """The part of a workspace that a kernel has: the numbers of its blocks' calls, then two slots.

    Attributes:
        block: 32-bit words of a block.
        size: 32-bit words in which one of them goes.
    """

    block: int
    size: int

    @property
    def max_blocks(self) -> int:
        return _MAX_BYTES // 4 // self.block

    def words(self, world: int) -> int:
        """Returns its 32-bit words; each slot has the words of every rank."""
        return self.max_blocks + 2 * world * self.max_blocks * self.block * self.size


# Threads move 16 bytes at once: four words that are summed; one that is exchanged, whose full stores are a warp's.
_SUMS, _EXCHANGES = _REGIONS = (_Region(1024, 1), _Region(256, 2))


def sums(x: ArraySpec, world: int) -> bool:
    """Returns whether the kernel sums such an array over so many devices, and is the fastest to do it."""
    return x.dtype in _DTYPES and exchanges(_num_bytes(x), world)


def exchanges(num_bytes: int, world: int) -> bool:
    """Returns whether the kernel exchanges parts of so many bytes between so many devices, and is the fastest."""
    return num_bytes % 4 == 0 and 0 < num_bytes <= _max_bytes(world)


def workspace_words(world: int) -> int:
    """Returns the 32-bit words of zeros that each device keeps: the regions of sums and of exchanges."""
    return sum(region.words(world) for region in _REGIONS)


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
    return _plan("all_reduce", all_reduce_kernel, x, x, _num_bytes(x) // 4, world, _SUMS)


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
    out = ArraySpec((world, words), "int32")
    return _plan("exchange", exchange_kernel, x, out, words, world, _EXCHANGES, stride)


def _plan(
    name: str,
    kernel: object,
    x: ArraySpec,
    out: ArraySpec,
    num_words: int,
    world: int,
    region: _Region,
    further: dict[str, Scalar] | None = None,
) -> OperationPlan:
    arguments = {
        **{name: Pointer(name) for name in ("x", "peers", "out")},
        # Of a multiple of 16 the compiler makes wide loads and stores, where a thread has several words.
        "num_words": Scalar(num_words, "i32", specialize=region is _SUMS),
        **(further or {}),
    }
    constants = {
        "WORLD": world,
        "BLOCK": region.block,
        "MAX_BLOCKS": region.max_blocks,
        "MAX_POLLS": _MAX_POLLS,
        "REGION": sum(before.words(world) for before in _REGIONS[: _REGIONS.index(region)]),
    }
    options = {"writes": ("out",), "num_warps": _WARPS, "num_stages": 1, "hot": True}
    launch = named_launch(kernel, (ceil_div(num_words, region.block),), arguments, constants, **options)
    inputs = {"x": x, "peers": ArraySpec((peers_size(world),), "int32")}
    return OperationPlan.of(name, inputs, (launch,), {"out": ArraySpec(out.shape, out.dtype)})


def _num_bytes(x: ArraySpec) -> int:
    return x.size * DTYPE_BYTES[x.dtype]


def _max_bytes(world: int) -> int:
    return _MAX_BYTES // (world - 1) if world > 1 else 0
