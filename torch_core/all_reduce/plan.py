"""The plans of sums and exchanges over devices, and the memory that each device needs for them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_core.all_reduce.kernel import (
    all_reduce_kernel,
    all_reduce_norm_kernel,
    all_reduce_norm_shares_kernel,
    all_reduce_shares_kernel,
    exchange_kernel,
    merge_over_devices_kernel,
)
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import DTYPE_BYTES, ArraySpec
from torch_core.launch.operands import ceil_div, named_launch, power_of_two
from torch_core.launch.plan import ABSENT, Argument, OperationPlan, Pointer, Scalar

_DTYPES = ("bfloat16", "float16", "float32")
# Bytes of an array that is summed; a device keeps four times as many for it.
_MAX_SUM = 8 << 20
# Bytes that a device need not send in two shots, above which they are faster than one: their second wait takes as long.
# With four devices these are one and a half times the array's, with eight five times, and with two none. On four H100s
# one shot is faster with 128 KB (9.6 and 10.1 us with a norm), two with 256 KB (10.9 and 9.6).
_SECOND_SHOT = 320 << 10
# Words of a share of a sum in two shots, and the most of a row's share: a half of a block, and of two blocks.
_SHARE, _MAX_SHARE = 512, 1024
# Bytes that a device sends to all others together in an exchange.
_MAX_BYTES = 1 << 20
_WARPS = 8
# A thread moves 16 bytes at once.
_WARP_WORDS = 128
_OPTIONS: dict[str, Any] = {"writes": ("out",), "num_warps": _WARPS, "num_stages": 1, "hot": True}
# Of a row's words in registers, of each rank and of three arrays besides: above, a thread of 16 warps spills 72 bytes
# or more (sm_90, by compiling; at the limit up to 40, if a row is no whole 32 words).
_MAX_ROW_WORDS = 44 << 10
# A look takes about a microsecond. A device may load its kernels, or compile them, while another waits for it.
_MAX_POLLS = 1 << 26


class _Region(NamedTuple):
    """The part of a workspace that a kernel has: the numbers of its blocks' calls, then two slots."""

    block: int  # 32-bit words of a block.
    size: int  # 32-bit words in which one of them goes.
    max_blocks: int

    def words(self, world: int) -> int:
        """Returns its 32-bit words; each slot has the words of every rank."""
        return self.max_blocks + 2 * world * self.max_blocks * self.block * self.size


# Threads move 16 bytes at once: four words that are summed; one that is exchanged, whose full stores are a warp's.
_SUM_BLOCK = 1024
_EXCHANGES = _Region(256, 2, _MAX_BYTES // 4 // 256)


def sums(x: ArraySpec, world: int) -> bool:
    """Returns whether a kernel can sum such an array over `world` devices, and is the fastest way."""
    return bool(_ways(x, world))


def sums_and_norms(x: ArraySpec, weight: ArraySpec, world: int) -> bool:
    """Returns whether a kernel can sum, add and normalise rows x over `world` devices, and is the fastest way."""
    return bool(_norm_ways(x, weight, world))


def exchanges(num_bytes: int, world: int) -> bool:
    """Returns whether the kernel can exchange parts of this many bytes between the devices, and is the fastest way."""
    return num_bytes % 4 == 0 and 0 < num_bytes <= _max_bytes(world)


def merges(x: ArraySpec, num_heads: int, world: int) -> bool:
    """Returns whether the kernel can merge attention x, [num_tokens, heads, head_size], into `num_heads` heads."""
    words, last = divmod(x.shape[-1] * DTYPE_BYTES[x.dtype], 4)
    rows = x.shape[0] * num_heads
    return (
        x.dtype in _DTYPES
        and x.shape[1] in (num_heads, world * num_heads)
        and last == 0
        and words < _EXCHANGES.block
        and rows <= _EXCHANGES.max_blocks
        and exchanges(4 * rows * (words + 1), world)
    )


def workspace_words(world: int) -> int:
    """Returns the 32-bit words of zeros that each device keeps: the regions of sums and of exchanges."""
    return _sum_region(world).words(world) + _EXCHANGES.words(world)


def peers_size(world: int) -> int:
    """Returns the 32-bit words of a device's table, which are 64-bit ones: rank, its workspace's address, and all."""
    return 4 + 2 * world


def plan_all_reduce(x: ArraySpec, world: int, shots: int | None = None) -> OperationPlan:
    """Plans the sum over `world` devices of their contiguous parts x; buffers are "x", "peers" and "out".

    With one of `shots` each device sends its part to all; with two it sends the others their shares, and then the sum
    of its own. Both have the same bits. None is the faster.
    """
    ways = _ways(x, world)
    if not ways:
        raise InvalidInput(
            f"all_reduce: x is {x.dtype}{list(x.shape)}; over {world} devices it must be of {', '.join(_DTYPES)}, and "
            f"of whole 32-bit words, {_max_sum(world)} bytes at most. Sum it with jax.lax.psum."
        )
    words, region = _words(x), _sum_region(world)
    # Of a multiple of 16 the compiler makes wide loads and stores, where a thread has several words.
    arguments = {**{name: Pointer(name) for name in ("x", "peers", "out")}, "num_words": Scalar(words, "i32")}
    if _chosen(shots, ways) == 1:
        grid = (ceil_div(words, region.block),)
        launch = named_launch(all_reduce_kernel, grid, arguments, _constants(region, world), **_OPTIONS)
    else:
        constants = _constants(region, world) | _share_constants(_SHARE)
        options = {**_OPTIONS, "num_warps": _warps(_SHARE)}
        grid = (ceil_div(words, world * _SHARE),)
        launch = named_launch(all_reduce_shares_kernel, grid, arguments, constants, **options)
    return OperationPlan.of("all_reduce", _inputs(world, x=x), (launch,), {"out": ArraySpec(x.shape, x.dtype)})


def plan_all_reduce_norm(
    x: ArraySpec,
    weight: ArraySpec,
    world: int,
    *,
    epsilon: float,
    round_first: bool,
    add_one: bool,
    shots: int | None = None,
) -> OperationPlan:
    """Plans residual + the sum of x over devices, and that row by row over its root mean square, times a weight.

    Buffers are "x", "residual", "weight", "peers", "out" and "normed". x, [..., width], is contiguous; residual, out
    and normed are like it. `epsilon` is added to the mean square. With `round_first` the norm is rounded before it is
    multiplied by the weight, too; with `add_one` it is multiplied by 1 + weight. For `shots` see `plan_all_reduce`.
    """
    ways = _norm_ways(x, weight, world)
    if not ways:
        raise InvalidInput(
            f"all_reduce_norm: x is {x.dtype}{list(x.shape)} and weight {weight.dtype}{list(weight.shape)}; over "
            f"{world} devices both must be of the same dtype, bfloat16 or float16, with a weight for each element of a "
            f"row, and rows, of an even width up to {max(_max_width(world), 2 * world * _MAX_SHARE)}, take "
            f"{_max_sum(world)} bytes at most, each in steps of {4 * _SUM_BLOCK}. Sum x by plan_all_reduce, then add "
            "and divide."
        )
    width, region = x.shape[-1], _sum_region(world)
    arguments = {
        **{name: Pointer(name) for name in ("x", "residual", "weight", "peers", "out", "normed")},
        "num_words": Scalar(width // 2, "i32"),
        "epsilon": Scalar(epsilon, "fp32"),
    }
    constants = {**_constants(region, world), "ROUND_FIRST": round_first, "ADD_ONE": add_one}
    if _chosen(shots, ways) == 1:
        blocks = ceil_div(width, 2 * region.block)
        padded = power_of_two(blocks)
        kernel, num_warps, limit = all_reduce_norm_kernel, min(_WARPS * padded, 16), {}
        constants |= {"ROW_BLOCKS": blocks, "ALL_BLOCKS": padded}
    else:
        kernel, share = all_reduce_norm_shares_kernel, _row_share(width, world)
        constants |= _share_constants(share)
        # Without a limit ptxas takes 80 registers in the hope of more programs, and spills.
        num_warps, limit = _warps(share), {"maxnreg": 128}
    options = {**_OPTIONS, "writes": ("out", "normed"), "num_warps": num_warps, **limit}
    launch = named_launch(kernel, (x.size // width,), arguments, constants, **options)
    like = ArraySpec(x.shape, x.dtype)
    inputs = _inputs(world, x=x, residual=like, weight=weight)
    return OperationPlan.of("all_reduce_norm", inputs, (launch,), {"out": like, "normed": like})


def plan_exchange(x: ArraySpec, world: int) -> OperationPlan:
    """Plans the exchange of parts between devices; buffers are "x", "peers" and "out", int32[world, words].

    x is int32[world, words], a part for every device, or int32[1, words], one for all.
    """
    parts, words = x.shape
    if x.dtype != "int32" or parts not in (1, world) or not exchanges(4 * words, world):
        raise InvalidInput(
            f"exchange: x is {x.dtype}{list(x.shape)}; over {world} devices it must be int32, one part or {world}, of "
            f"{_max_bytes(world)} bytes at most. Move it with jax.lax.all_gather or all_to_all."
        )
    arguments = {
        **{name: Pointer(name) for name in ("x", "peers", "out")},
        "num_words": Scalar(words, "i32", specialize=False),
        "part_stride": Scalar(words if parts > 1 else 0, "i32", specialize=False),
    }
    launch = named_launch(
        exchange_kernel, (ceil_div(words, _EXCHANGES.block),), arguments, _constants(_EXCHANGES, world), **_OPTIONS
    )
    return OperationPlan.of("exchange", _inputs(world, x=x), (launch,), {"out": ArraySpec((world, words), "int32")})


def plan_merge(x: ArraySpec, sinks: ArraySpec | None, num_heads: int, out_dtype: str, world: int) -> OperationPlan:
    """Plans the merge of attention to the keys of each device; buffers "x", "x_lse", "sinks", "peers", "out" and "lse".

    x is [num_tokens, heads, head_size] and x_lse float32[num_tokens, heads], natural logarithms, -inf for a row that
    saw nothing. The results have `num_heads` heads: all heads of x, or, of `world` times as many, this device's, in
    the order of ranks. `sinks`, [num_heads], is a logit without a value in every softmax. out is of `out_dtype`.
    """
    if not merges(x, num_heads, world) or out_dtype not in (x.dtype, "float32"):
        raise InvalidInput(
            f"merge_over_devices: x is {x.dtype}{list(x.shape)}, for {num_heads} heads of {out_dtype}; over {world} "
            f"devices it must be of {', '.join(_DTYPES)}, the result of the same or of float32, with at most "
            f"{_EXCHANGES.max_blocks} rows of {4 * _EXCHANGES.block - 4} bytes and {_max_bytes(world)} bytes in all. "
            "Merge it with jax.lax.all_gather."
        )
    num_tokens, heads, head_size = x.shape
    words = head_size * DTYPE_BYTES[x.dtype] // 4
    padded = max(32, power_of_two(words + 1))
    given = {"x": x, "x_lse": ArraySpec((num_tokens, heads), "float32"), **({} if sinks is None else {"sinks": sinks})}
    arguments: dict[str, Argument] = {
        "sinks": ABSENT,
        **{name: Pointer(name) for name in (*given, "peers", "out", "lse")},
        "num_heads": Scalar(num_heads, "i32", specialize=False),
        "token_rows": Scalar(heads, "i32", specialize=False),
        "rank_rows": Scalar(0 if heads == num_heads else num_heads, "i32", specialize=False),
    }
    constants = {**_constants(_EXCHANGES, world), "NUM_WORDS": words, "ALL_WORDS": padded}
    # Few words for a thread, and, up to 128 of them, sums within one warp.
    options = {**_OPTIONS, "writes": ("out", "lse"), "num_warps": max(1, padded // 128)}
    launch = named_launch(merge_over_devices_kernel, (num_tokens * num_heads,), arguments, constants, **options)
    rows = (num_tokens, num_heads)
    outputs = {"out": ArraySpec((*rows, head_size), out_dtype), "lse": ArraySpec(rows, "float32")}
    return OperationPlan.of("merge_over_devices", _inputs(world, **given), (launch,), outputs)


def _inputs(world: int, **arrays: ArraySpec) -> dict[str, ArraySpec]:
    return {**arrays, "peers": ArraySpec((peers_size(world),), "int32")}


def _ways(x: ArraySpec, world: int) -> tuple[int, ...]:
    """Returns the numbers of shots in which a kernel can sum x, the fastest first."""
    words = _words(x)
    if x.dtype not in _DTYPES or x.size * DTYPE_BYTES[x.dtype] % 4 or not 0 < 4 * words <= _max_sum(world):
        return ()
    region = _sum_region(world)
    one, two = ceil_div(words, region.block), ceil_div(words, world * _SHARE) * _share_blocks(_SHARE)
    return _fastest_first(x, world, {1: one <= region.max_blocks, 2: two <= region.max_blocks})


def _norm_ways(x: ArraySpec, weight: ArraySpec, world: int) -> tuple[int, ...]:
    if not x.shape or not _ways(x, world):
        return ()
    width = x.shape[-1]
    if not x.dtype == weight.dtype != "float32" or weight.shape != (width,) or width % 2:
        return ()
    region, rows, share = _sum_region(world), x.size // width, _row_share(width, world)
    one = width <= _max_width(world) and rows * ceil_div(width, 2 * region.block) <= region.max_blocks
    two = share <= _MAX_SHARE and rows * _share_blocks(share) <= region.max_blocks
    return _fastest_first(x, world, {1: one, 2: two})


def _fastest_first(x: ArraySpec, world: int, fits: dict[int, bool]) -> tuple[int, ...]:
    """Returns which of one and two shots fit; the rule of vLLM's sums, for any number of devices."""
    saved = 4 * _words(x) * (world - 1) * (world - 2) // world
    return tuple(shots for shots in ((1, 2) if saved <= _SECOND_SHOT else (2, 1)) if fits[shots])


def _chosen(shots: int | None, ways: tuple[int, ...]) -> int:
    if shots is not None and shots not in ways:
        raise InvalidInput("shots", value=shots, wanted=f"such an array can be summed in {' or '.join(map(str, ways))}")
    return ways[0] if shots is None else shots


def _row_share(width: int, world: int) -> int:
    """Returns the words of a row that each device adds, in steps of 16 bytes."""
    return 4 * ceil_div(width // 2, 4 * world)


def _share_constants(share: int) -> dict[str, int]:
    return {"SHARE": share, "COLUMNS": power_of_two(share), "BLOCKS": _share_blocks(share)}


def _share_blocks(share: int) -> int:
    return 1 if 2 * power_of_two(share) <= _SUM_BLOCK else 2


def _warps(share: int) -> int:
    return max(1, power_of_two(share) // _WARP_WORDS)


def _words(x: ArraySpec) -> int:
    return x.size * DTYPE_BYTES[x.dtype] // 4


def _sum_region(world: int) -> _Region:
    """Returns the region of sums: its blocks hold the largest in two shots, which with two devices is one in one."""
    # Slots lie behind a counter of each block, and a thread moves 16 bytes at once.
    return _Region(_SUM_BLOCK, 1, max(4, _MAX_SUM // (2 * _SUM_BLOCK * world) // 4 * 4))


def _max_sum(world: int) -> int:
    return _sum_region(world).max_blocks * 2 * _SUM_BLOCK * world if world > 1 else 0


def _constants(region: _Region, world: int) -> dict[str, int]:
    return {
        "WORLD": world,
        "BLOCK": region.block,
        "MAX_BLOCKS": region.max_blocks,
        "MAX_POLLS": _MAX_POLLS,
        "REGION": _sum_region(world).words(world) if region is _EXCHANGES else 0,
    }


def _max_width(world: int) -> int:
    blocks = _MAX_ROW_WORDS // ((world + 3) * _SUM_BLOCK)
    # The largest power of two: a program has the registers of as many blocks, whether its row needs them or not.
    return 2 * _SUM_BLOCK * (power_of_two(blocks + 1) // 2)


def _max_bytes(world: int) -> int:
    return _MAX_BYTES // (world - 1) if world > 1 else 0
