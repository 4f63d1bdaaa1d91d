"""Attention for long queries on Hopper: copies, products and softmax of a program overlap, in specialised warps."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.attention.kernels.hopper.loads import load_keys, load_queries_and_values
from torch_core.attention.kernels.hopper.rows import attend_rows
from torch_core.device.hopper_call import Batch, Call, Shape, Split
from torch_core.device.hopper_items import ITEMS, find_items
from torch_core.device.hopper_rows import Output, zero_padding
from torch_core.device.hopper_tiles import tile_layout
from torch_core.device.hopper_turns import make_ring, open_slot
from torch_core.device.hopper_work import count_items
from torch_core.device.mask import Bounds


class _Rings(NamedTuple):
    """The shared memory of a program: its work, and rings of tiles."""

    items: Any  # Where the tile of each work item stands.
    query: Any  # query, key, value: tiles that the copy engine brings.
    key: Any
    value: Any
    query_rest: Any  # query_rest, key_rest: of the same slots, the elements of a head after HEAD_SIZE, or None.
    key_rest: Any
    raw: Any  # A barrier for values that are zeroed in part before their slot counts as full.


@gluon.jit
def hopper_prefill_kernel(
    query,
    key_cache,
    value_cache,
    query_rest,
    key_rest,
    block_tables,
    seq_lens,
    query_start_loc,
    key_start_loc,
    sinks,
    out,
    lse,
    partial_out,
    partial_max,
    partial_sum,
    num_tokens,
    num_seqs,
    table_stride,
    table_tokens,
    scale,
    out_factor,
    window_left,
    window_right,
    chunk,
    max_chunks,
    max_query,
    NUM_HEADS: gl.constexpr,
    HEADS_TOGETHER: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    REST_SIZE: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    PING_PONG: gl.constexpr,
    OVERLAP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BOX: gl.constexpr,
    PAGED: gl.constexpr,
    MIN_QUERY: gl.constexpr,
    QUERY_STRIDE: gl.constexpr,
    KEY_STRIDE: gl.constexpr,
    VALUE_STRIDE: gl.constexpr,
    VALUE_ROW: gl.constexpr,
    OUT_STRIDES: gl.constexpr,
):
    """A program of a persistent grid: two or three warpgroups of 64 query rows, two warps that load for them, and one
    that finds their work.

    A work item is a tile of 64 * WARPGROUPS query rows of a sequence: tokens of one head, or, where queries are short,
    PACK heads of one key/value head side by side (row = token * PACK + head), which share its keys; `work_item` says
    which ones a program takes. The warps that load fill rings of tiles in shared memory, also ahead into the next item;
    barriers in shared memory say which slots are full and which are free again. Values that no key of the sequence owns
    are zeroed there. The warpgroups multiply in turns, so that one does its softmax while another one multiplies
    (FlashAttention-3, arXiv 2407.08608); they go from the last key to the first, the tiles at the mask's edge apart
    from the others.

    The copy engine sees arrays as matrices: row `token` and column `head * stride` of query and dense keys; row
    `block * BLOCK_ROWS + token` (VALUE_ROW more for values of a combined cache) of a paged cache. With PACK, it sees
    the query as [token, head, element], and PACK heads of 64 // PACK tokens are the rows of a warpgroup.

    Heads of queries and keys may have REST_SIZE elements more than values; these have tiles and products of their own.

    With a `chunk`, an item is a tile over this number of keys. It leaves its running softmax in partial_out,
    partial_max and partial_sum, for `attention_combine_kernel` to finish the rows.
    """
    SHAPE: gl.constexpr = Shape(
        NUM_HEADS, GROUP, PACK, HEADS_TOGETHER, HEAD_SIZE, REST_SIZE, WARPGROUPS, PING_PONG, BLOCK_N, MIN_QUERY, PAGED,
        BLOCK_SIZE, BLOCK_ROWS, BOX, QUERY_STRIDE, KEY_STRIDE, VALUE_STRIDE, VALUE_ROW, OUT_STRIDES,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    q_tiles = gl.allocate_shared_memory(dtype, [QUERY_STAGES * WARPGROUPS, 64, HEAD_SIZE], layout)
    k_layout: gl.constexpr = tile_layout(len(key_cache.shape), BLOCK_N, HEAD_SIZE)
    v_layout: gl.constexpr = tile_layout(len(value_cache.shape), BLOCK_N, HEAD_SIZE)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], k_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], v_layout)
    q_rest = None
    k_rest = None
    if REST_SIZE > 0:
        q_rest = gl.allocate_shared_memory(dtype, [QUERY_STAGES * WARPGROUPS, 64, REST_SIZE], layout)
        k_rest = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, REST_SIZE], layout)
    items = make_ring(gl.allocate_shared_memory(gl.int32, [ITEMS, 8], words), ITEMS)
    queries = make_ring(q_tiles, QUERY_STAGES)
    keys = make_ring(k_tiles, STAGES)
    values = make_ring(v_tiles, STAGES)
    raw = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ITEMS):
        open_slot(items, i, WARPGROUPS + 2)
    for i in gl.static_range(QUERY_STAGES):
        open_slot(queries, i, WARPGROUPS)
    for i in gl.static_range(STAGES):
        open_slot(keys, i, WARPGROUPS)
        open_slot(values, i, WARPGROUPS)
    mbarrier.init(raw, count=1)
    rings = _Rings(items, queries, keys, values, q_rest, k_rest, raw)
    batch = Batch(query_start_loc, seq_lens, key_start_loc, num_seqs, block_tables, table_stride, table_tokens)
    output = Output(sinks, out, lse, out_factor)
    bounds = Bounds(window_left, window_right, None)
    split = None
    if chunk is not None:
        split = Split(chunk, max_chunks, max_query, partial_out, partial_max, partial_sum)
    num_items = count_items(batch, bounds, split, SHAPE)
    call = Call(query, key_cache, value_cache, query_rest, key_rest, scale, bounds, output, batch, num_items, split)
    # The language has no sums of tuples that hold None, or the lists would be one.
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (attend_rows, (0, call, rings, SHAPE, OVERLAP)),
                (attend_rows, (1, call, rings, SHAPE, OVERLAP)),
                (load_keys, (call, rings, SHAPE)),
                (load_queries_and_values, (call, rings, SHAPE)),
                (find_items, (call, rings, SHAPE)),
            ],
            [4, 1, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (attend_rows, (0, call, rings, SHAPE, OVERLAP)),
                (attend_rows, (1, call, rings, SHAPE, OVERLAP)),
                (attend_rows, (2, call, rings, SHAPE, OVERLAP)),
                (load_keys, (call, rings, SHAPE)),
                (load_queries_and_values, (call, rings, SHAPE)),
                (find_items, (call, rings, SHAPE)),
            ],
            [4, 4, 1, 1, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    zero_padding(output, batch, num_tokens, SHAPE)
