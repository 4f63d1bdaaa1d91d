"""How the copy engine of a Hopper device sees the arrays of an attention call: as rows of matrices, box by box."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triton.experimental.gluon.language import NVMMASharedLayout

from torch_core.attention.call import AttentionCall
from torch_core.plan.plan import ArraySpec, Descriptor
from torch_core.specs import DTYPE_BYTES

__all__ = ["Matrix", "array_matrix", "copy_box", "copy_descriptor", "heads_together", "is_served"]

# The copy engine's swizzle repeats every 8 rows, and one copy moves at most 256.
_MIN_BOX = 8
_MAX_BOX = 256
# Coordinates of the copy engine are 32-bit.
_MAX_ROWS = 2**31 - 2 * _MAX_BOX
_ARCH = 90
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


def copy_box(call: AttentionCall, block_n: int) -> int:
    """Returns the keys that one copy into a tile of `block_n` keys moves."""
    return math.gcd(call.block_size, block_n) if call.paged else block_n


def _is_copied(stride: int, dtype: str) -> bool:
    """Whether the copy engine, and stores of 16 bytes, can follow a stride."""
    return stride * DTYPE_BYTES[dtype] % 16 == 0


def array_matrix(call: AttentionCall, name: str, block_n: int) -> Matrix | None:
    """Returns a call's "query", "key" or "value" as a matrix that the copy engine can follow; None if there is none."""
    spec = {"query": call.query, "key": call.key, "value": call.value}[name]
    *outer, head_stride, _ = spec.element_strides
    heads, head_size = spec.shape[-2:]
    stride = outer[-1]
    width = (heads - 1) * head_stride + head_size
    if not spec.aligned or 0 in spec.shape or not 0 < width <= max(stride, width if spec.shape[0] == 1 else 0):
        return None
    if not _is_copied(stride, spec.dtype) or not _is_copied(head_stride, spec.dtype):
        return None
    if name == "query" or not call.paged:
        return Matrix((spec.shape[0], width), stride, 0, head_stride)
    block_stride = outer[0]
    box = copy_box(call, block_n)
    if box < _MIN_BOX:
        return None
    offset = call.value_offset if name == "value" else 0
    last_row = (spec.shape[0] - 1) * block_stride // stride + call.block_size
    rows = last_row + call.value_offset // stride
    if block_stride % stride or block_stride <= 0 or offset % stride or rows > _MAX_ROWS:
        return None
    return Matrix((rows, width), stride, block_stride // stride, head_stride, offset // stride)


def heads_together(call: AttentionCall, kv_heads: int) -> int:
    """Returns the query heads of the most key/value heads, up to `kv_heads`, whose number divides all of them."""
    divisor = max(i for i in range(1, min(call.num_kv_heads, kv_heads) + 1) if call.num_kv_heads % i == 0)
    return call.group * divisor


def copy_descriptor(buffer: str, matrix: Matrix, box: tuple[int, int], dtype: str) -> Descriptor:
    """Returns the descriptor of an array whose boxes of rows and columns land in swizzled shared memory."""
    size = DTYPE_BYTES[dtype]
    width = min(_SWIZZLE, box[1] * size)
    layout = NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * size, rank=2)
    return Descriptor(buffer, matrix.shape, (matrix.stride, 1), box, layout)


def is_served(call: AttentionCall) -> bool:
    """Whether a Hopper device can copy a call's operands by boxes, and every row's mask is a pair of bounds."""
    return (
        call.limits.arch == _ARCH
        and call.plain
        and call.value.shape[-1] == call.key.shape[-1]
        and call.seq_causal is None
        and call.spec.attention_chunk is None
        and not isinstance(call.out_scale, ArraySpec)
        and call.spec.scale > 0
        and call.out.aligned
        and all(_is_copied(stride, call.out.dtype) for stride in call.out.element_strides[:2])
    )
