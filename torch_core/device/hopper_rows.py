"""Mask, final scaling and padding in the multiplying warpgroups of both Hopper prefill kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_core.device.hopper_work import key_tiles
from torch_core.device.mask import LOG2E, visible_keys
from torch_core.device.softmax import LN2


class Output(NamedTuple):
    """The address of rows, and the values that finish them."""

    sinks: Any  # Logit of each head that joins the denominators, or None.
    out: Any  # The output, `[token, head, element]`.
    lse: Any  # Log-sum-exp of the rows, `[token, head]`, or None.
    factor: Any  # The scales of values and output that are numbers.


class Span(NamedTuple):
    """The tiles of keys of a work item, counted from key 0, and the bounds of each row."""

    start: Any  # start, end: tiles that any row of the work item sees.
    end: Any
    own_start: Any  # own_start, own_end: those of this warpgroup.
    own_end: Any
    body_start: Any  # body_start, body_end: those that every row of this warpgroup sees whole.
    body_end: Any
    first: Any  # The first key of each row, `[64]`; means something in a window only.
    last: Any  # The last key of each row, `[64]`.


@gluon.jit
def own_tiles(first_pos, tokens, first_key, num_keys, bounds, in_rows, OWN: gl.constexpr, SHAPE: gl.constexpr):
    """The Span of the warpgroup OWN, whose rows are numbered `in_rows`: 64 // PACK tokens with PACK heads each.

    The keys are those from `first_key`, the start of a tile, to `num_keys`; None for all from key 0.
    """
    PACK: gl.constexpr = SHAPE.PACK
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    TOKENS: gl.constexpr = 64 // PACK
    low, high = visible_keys(first_pos, first_pos + tokens - 1, num_keys, bounds, 0)
    if first_key is not None:
        low = gl.maximum(low, first_key)
    start, end = key_tiles(low, high, SHAPE)
    own_first = first_pos + OWN * TOKENS
    own_last = first_pos + gl.minimum(tokens, OWN * TOKENS + TOKENS) - 1
    own_low, own_high = visible_keys(own_first, own_last, num_keys, bounds, 0)
    if first_key is not None:
        own_low = gl.maximum(own_low, first_key)
    own_end = gl.minimum(gl.maximum((own_high + BLOCK_N - 1) // BLOCK_N, start + 1), end)
    if PACK > 1:
        # Short queries often leave a warpgroup without a row: it looks at one tile and lets the others pass.
        own_end = gl.where(tokens > OWN * TOKENS, own_end, start + 1)
    own_start = start
    full_high = num_keys
    if bounds.window_right is not None:
        full_high = gl.maximum(gl.minimum(full_high, own_first + bounds.window_right + 1), 0)
    body_end = gl.minimum(gl.maximum(full_high // BLOCK_N, own_start), own_end - 1)
    body_start = own_start
    positions = own_first + in_rows // PACK
    last = positions * 0 + num_keys - 1
    if bounds.window_right is not None:
        last = gl.minimum(positions + bounds.window_right, num_keys - 1)
    first = last
    if bounds.window_left is not None:
        own_start = gl.minimum(own_low // BLOCK_N, own_end - 1)
        full_low = gl.maximum(own_last - bounds.window_left, 0)
        body_end = gl.maximum(body_end, own_start)
        body_start = gl.minimum(gl.maximum((full_low + BLOCK_N - 1) // BLOCK_N, own_start), body_end)
        first = positions - bounds.window_left
    return Span(start, end, own_start, own_end, body_start, body_end, first, last)


@gluon.jit
def mask_scores(s, first, last, LEFT: gl.constexpr):
    """Raw scores, -inf in the columns outside [first, last] of a row."""
    columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    keep = columns[None, :] <= last[:, None]
    if LEFT:
        keep = keep & (columns[None, :] >= first[:, None])
    return gl.where(keep, s, float("-inf"))


@gluon.jit
def finish_rows(row_sum, shift, empty, head, in_rows, output, PACK: gl.constexpr):
    """Ends a softmax whose weights were exp2(score - shift); rows that saw no key are `empty`, their shift is 0.

    A sink is a logit without a value: it joins the denominator only. Returns (the factor of the accumulated rows,
    shift, denominator).
    """
    keep = gl.where(empty, 0.0, 1.0)
    if output.sinks is not None:
        sinks = output.sinks + head
        if PACK > 1:
            sinks += in_rows % PACK
        sink = gl.load(sinks).to(gl.float32) * LOG2E
        top = gl.maximum(shift, sink)
        keep = keep * gl.exp2(shift - top)
        row_sum = row_sum * keep + gl.exp2(sink - top)
        shift = top
    total = gl.where(empty, 1.0, row_sum)
    return gl.div_rn(keep, total), shift, total


@gluon.jit
def store_lse(output, shift, total, empty, first_row, tokens, head, in_rows, OWN: gl.constexpr, SHAPE: gl.constexpr):
    """Stores the log-sum-exp of the rows that `finish_rows` finished, a natural logarithm, if the call asks for it."""
    if output.lse is not None:
        row_lse = gl.where(empty, float("-inf"), (shift + gl.log2(total)) * LN2)
        rows = OWN * 64 + in_rows
        row_tokens = (first_row + rows // SHAPE.PACK).to(gl.int64)
        pointers = output.lse + row_tokens * SHAPE.NUM_HEADS + head + rows % SHAPE.PACK
        gl.store(pointers, row_lse, mask=rows < tokens * SHAPE.PACK)


@gluon.jit
def store_partial(acc, row_sum, row_max, split, first, tokens, head, OWN: gl.constexpr, SHAPE: gl.constexpr):
    """Stores the running softmax of rows over a chunk of keys, in float32, as `attention_split_kernel` does."""
    PACK: gl.constexpr = SHAPE.PACK
    O_LAYOUT: gl.constexpr = acc.type.layout
    rows = OWN * 64 + gl.arange(0, 64, layout=row_sum.type.layout)
    slots = (first + rows // PACK * split.max_chunks).to(gl.int64) * SHAPE.NUM_HEADS + head + rows % PACK
    live = rows < tokens * PACK
    gl.store(split.maximum + slots, row_max, mask=live)
    gl.store(split.total + slots, row_sum, mask=live)
    columns = gl.arange(0, SHAPE.HEAD_SIZE, layout=gl.SliceLayout(0, O_LAYOUT))
    slots = gl.convert_layout(slots, gl.SliceLayout(1, O_LAYOUT))
    live = gl.convert_layout(live, gl.SliceLayout(1, O_LAYOUT))
    gl.store(split.out + slots[:, None] * SHAPE.HEAD_SIZE + columns[None, :], acc, mask=live[:, None])


@gluon.jit
def zero_padding(output, batch, num_tokens, SHAPE: gl.constexpr):
    """Writes the result of padding rows: zeros, and a log-sum-exp of -inf."""
    NUM_HEADS: gl.constexpr = SHAPE.NUM_HEADS
    LANES: gl.constexpr = SHAPE.HEAD_SIZE // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    columns = gl.arange(0, SHAPE.HEAD_SIZE, layout=gl.SliceLayout(0, layout))
    zeros = gl.zeros([32, SHAPE.HEAD_SIZE], gl.float32, layout).to(output.out.dtype.element_ty)
    start = gl.load(batch.query_start_loc + batch.num_seqs)
    for base in range(start * NUM_HEADS + gl.program_id(0) * 32, num_tokens * NUM_HEADS, gl.num_programs(0) * 32):
        rows = base + gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
        tokens = (rows // NUM_HEADS).to(gl.int64)
        heads = rows % NUM_HEADS
        live = rows < num_tokens * NUM_HEADS
        pointers = output.out + tokens * SHAPE.OUT_STRIDES[0] + heads * SHAPE.OUT_STRIDES[1]
        gl.store(pointers[:, None] + columns[None, :], zeros, mask=live[:, None])
        if output.lse is not None:
            empty = gl.full([32], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
            gl.store(output.lse + tokens * NUM_HEADS + heads, empty, mask=live)
