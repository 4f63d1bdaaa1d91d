"""The arrays of an attention call as the copy engine of a Hopper device sees them: matrices, copied box by box."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triton.experimental.gluon.language import NVMMASharedLayout

from torch_core.attention.call import AttentionCall, TableCall
from torch_core.attention.operands import output
from torch_core.base.specs import DTYPE_BYTES, HOPPER_ARCH, ArraySpec
from torch_core.launch.plan import Descriptor, DeviceLimits

# The copy engine's swizzle repeats every 8 rows, and one copy moves at most 256.
_MIN_BOX = 8
_MAX_BOX = 256
# Coordinates of the copy engine are 32-bit.
_MAX_ROWS = 2**31 - 2 * _MAX_BOX
# Bytes of a row of shared memory that are swizzled together, at most.
_SWIZZLE = 128


@dataclass(frozen=True, slots=True)
class Matrix:
    """An array as rows of the copy engine: token by token, heads side by side.

    Attributes:
        shape: rows and columns.
        stride: elements from one row to the next.
        block_rows: rows from one block of a paged cache to the next; 0 for other arrays.
        head_stride: columns from one head to the next.
        value_row: row of the first value in a combined cache.
    """

    shape: tuple[int, int]
    stride: int
    block_rows: int
    head_stride: int
    value_row: int = 0


def is_copied(call: AttentionCall[ArraySpec], limits: DeviceLimits, *, rest_size: int = 0) -> bool:
    """Whether a Hopper device can copy a call's operands by boxes, and every row's mask is a pair of bounds.

    Args:
        call: the call.
        limits: the device.
        rest_size: elements that queries and keys have more than values.
    """
    out = output(call)
    return (
        limits.arch == HOPPER_ARCH
        and call.spec.sets_only("scale", "causal", "window_left", "window_right", "use_alibi_sqrt")
        and call.value_head_size == call.head_size - rest_size
        and call.spec.scale > 0
        and out.aligned
        and all(_fits(stride, out.dtype) for stride in out.element_strides[:2])
    )


def copy_box(call: AttentionCall[ArraySpec], block_n: int) -> int:
    """Returns the keys that one copy into a tile of `block_n` keys moves."""
    return math.gcd(call.block_size, block_n) if call.reads_cache else block_n


def array_matrix(call: AttentionCall[ArraySpec], name: str, block_n: int) -> Matrix | None:
    """Returns a call's "query", "key" or "value" as a matrix that the copy engine can follow; None if there is none."""
    spec = {"query": call.query, "key": call.keys(), "value": call.values()}[name]
    if name == "query" or not isinstance(call, TableCall):
        return dense_matrix(spec)
    return _block_matrix(call, spec, block_n, call.value_offset if name == "value" else 0)


def byte_matrix(call: TableCall[ArraySpec], cache: ArraySpec, block_n: int) -> Matrix | None:
    """Returns a cache of packed rows as a matrix of bytes that the copy engine can follow; None if there is none."""
    *outer, inner = cache.element_strides
    size = cache.shape[2]
    rows = ArraySpec((*cache.shape[:2], 1, size), cache.dtype, (*outer, size, inner), cache.aligned)
    return _block_matrix(call, rows, block_n, 0)


def _block_matrix(call: TableCall[ArraySpec], spec: ArraySpec, block_n: int, offset: int) -> Matrix | None:
    matrix = dense_matrix(spec)
    if matrix is None or copy_box(call, block_n) < _MIN_BOX:
        return None
    block_stride, stride = spec.element_strides[0], matrix.stride
    last_row = (spec.shape[0] - 1) * block_stride // stride + call.block_size
    rows = last_row + call.value_offset // stride
    if block_stride % stride or block_stride <= 0 or offset % stride or rows > _MAX_ROWS:
        return None
    return Matrix((rows, matrix.shape[1]), stride, block_stride // stride, matrix.head_stride, offset // stride)


def dense_matrix(spec: ArraySpec) -> Matrix | None:
    """Returns an array of rows of heads as a matrix that the copy engine can follow; None if there is none."""
    *outer, head_stride, _ = spec.element_strides
    heads, head_size = spec.shape[-2:]
    stride = outer[-1]
    width = (heads - 1) * head_stride + head_size
    if not spec.aligned or 0 in spec.shape or not 0 < width <= max(stride, width if spec.shape[0] == 1 else 0):
        return None
    if not _fits(stride, spec.dtype) or not _fits(head_stride, spec.dtype):
        return None
    return Matrix((spec.shape[0], width), stride, 0, head_stride)


def copy_descriptor(buffer: str, matrix: Matrix, box: tuple[int, int], dtype: str) -> Descriptor:
    """Returns the descriptor of an array whose boxes of rows and columns land in swizzled shared memory."""
    size = DTYPE_BYTES[dtype]
    width = min(_SWIZZLE, box[1] * size)
    layout = NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * size, rank=2)
    return Descriptor(buffer, matrix.shape, (matrix.stride, 1), box, layout)


def query_descriptor(
    call: AttentionCall[ArraySpec], query: Matrix, box: tuple[int, int], pack: int
) -> Descriptor | None:
    """Returns the descriptor of a call's query whose boxes of rows are tokens, or `pack` heads of fewer tokens each.

    None if the copy engine cannot follow it: it wants the stride of each axis to be a multiple of the next one's.
    """
    dtype = call.query.dtype
    if pack == 1:
        return copy_descriptor("query", query, box, dtype)
    if query.head_stride <= 0 or query.stride % query.head_stride:
        return None
    rows, width = box
    bits = 8 * DTYPE_BYTES[dtype]
    layout = NVMMASharedLayout(swizzle_byte_width=min(_SWIZZLE, width * bits // 8), element_bitwidth=bits, rank=3)
    strides = (query.stride, query.head_stride, 1)
    return Descriptor("query", call.query.shape, strides, (rows // pack, pack, width), layout)


def box_descriptor(
    call: AttentionCall[ArraySpec], buffer: str, matrix: Matrix, box: tuple[int, int], dtype: str
) -> Descriptor:
    """Returns the descriptor of keys or values; one whose boxes are whole blocks, see `device.hopper_tiles`, if it may.

    Rows of a box are then a multiple of 8 from the first one, and heads as many parts of 128 bytes.
    """
    rows, part = 8, _SWIZZLE // DTYPE_BYTES[dtype]
    numbers = (*matrix.shape, matrix.block_rows, matrix.value_row, matrix.head_stride)
    sides = (rows, part, rows, rows, part)
    whole = box[1] == call.head_size > part and DTYPE_BYTES[dtype] == 2
    if not isinstance(call, TableCall) or not whole or any(n % m for n, m in zip(numbers, sides, strict=True)):
        return copy_descriptor(buffer, matrix, box, dtype)
    layout = NVMMASharedLayout(swizzle_byte_width=_SWIZZLE, element_bitwidth=16, rank=4)
    shape = (matrix.shape[0] // rows, matrix.shape[1] // part, rows, part)
    strides = (rows * matrix.stride, part, matrix.stride, 1)
    return Descriptor(buffer, shape, strides, (box[0] // rows, box[1] // part, rows, part), layout)


def _fits(stride: int, dtype: str) -> bool:
    """Whether the copy engine, and stores of 16 bytes, can follow a stride."""
    return stride * DTYPE_BYTES[dtype] % 16 == 0
