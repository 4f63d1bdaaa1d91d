"""Tiles of keys and values in shared memory into which one copy brings a whole block of a paged cache.

The copy engine swizzles 128 bytes together, 64 elements: half of a row of a head, or less. A tile of a matrix has these
parts one after the other, each with all rows of the tile, so that every block would take a copy for each part. Here 8
rows lie together with all of their parts, `[rows // 8, parts, 8, 64]`: a block's rows lie together too. The matrix
units take either; they are told the distance from 8 rows to the next 8, and from part to part.

An array that the copy engine sees with 4 axes, as `attention.copies` makes it for such blocks, has such tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_core.device.gluon_names import async_load, reinterpret_shape


@gluon.jit
def load_box(array, row, column, barrier, tile, first, ROWS: gl.constexpr):
    """Starts the copy of ROWS rows of an array into the rows of a tile from `first` on; then `barrier` completes."""
    if len(array.shape) == 2:
        async_load(array, [row, column], barrier, tile.slice(first, ROWS))
    else:
        # Both are multiples; a box outside the array begins below 0.
        async_load(array, [row >> 3, column >> 6, 0, 0], barrier, as_boxes(tile, ROWS).index(first // ROWS))


@gluon.jit
def as_boxes(tile, ROWS: gl.constexpr):
    """A tile as the boxes of ROWS rows that copies bring, `[boxes, ROWS // 8, parts, 8, 64]`."""
    shape: gl.constexpr = [tile.shape[0] // ROWS, ROWS // 8, tile.shape[1] // 64, 8, 64]
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return reinterpret_shape(tile, tile.dtype, shape, layout)


@gluon.constexpr_function
def tile_layout(axes, rows, columns):
    """The layout of tiles of an array that the copy engine sees with this number of axes."""
    if axes == 2:
        return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # The (row, column) offset that each bit of an element's memory address adds; the swizzle adds 8 columns to a row.
    swizzled = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    parts = [[0, 64 << i] for i in range((columns // 64).bit_length() - 1)]
    eights = [[8 << i, 0] for i in range((rows // 8).bit_length() - 1)]
    return gl.SharedLinearLayout(swizzled + parts + eights, [], 1024)
