"""The part that both Hopper kernels of latents have in common: the chunk of a program, its tiles, results, padding."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_core.device.hopper_rows import finish_rows
from torch_core.device.mask import Bounds
from torch_core.device.softmax import LN2
from torch_core.device.work import chunk_span, chunked_keys, equal_chunk, uneven_chunk

#: Tokens of one step.
BLOCK_N = gl.constexpr(64)
#: Elements of half a latent, and of a rotary key.
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
#: Of a packed row: all bytes, and the first one of its scales and of its rotary key.
PACKED_BYTES = gl.constexpr(656)
SCALE_OFFSET = gl.constexpr(512)
ROPE_OFFSET = gl.constexpr(528)
# Rows of padding that a program clears, and sequences that it looks at together.
_ROWS = gl.constexpr(64)
_SEQS = gl.constexpr(32)


class Sizes(NamedTuple):
    """Sizes of a call, known when compiling."""

    NUM_HEADS: Any  # Query heads.
    MAX_QUERY: Any  # Query tokens of a sequence, at most.
    CHUNK: Any  # CHUNK, LEAST, FEW: tokens of a chunk, see work.chunk_span.
    LEAST: Any
    FEW: Any
    SHARED: Any  # As in work.uneven_chunk, and room for all sequences; None if no batch has chunks for all of them.
    BLOCK_SIZE: Any  # Tokens of a block.
    BLOCK_ROWS: Any  # Rows from one block to the next, as the copy engine sees them.
    BLOCK_N: Any  # Tokens of one step.
    BOX: Any  # Tokens of one copy.
    PAGED: Any  # Latents lie in blocks.
    OUT_STRIDES: Any  # Elements from one token, and from one head, of the output to the next.


class Work(NamedTuple):
    """The chunk and the rows of a program."""

    live: Any  # The program has a chunk.
    spare: Any  # Number of the program among those without a chunk.
    seq: Any  # The sequence.
    # place, stride: where the results of the chunk lie among those of chunks: of the first query token, and from one
    # query token to the next.
    place: Any
    stride: Any
    chunks: Any  # Chunks of the sequence.
    first_row: Any  # First of the program's rows among those of the sequence.
    query_start: Any  # First query token of the sequence.
    query_len: Any  # Query tokens of the sequence.
    context: Any  # Tokens of the sequence before its queries.
    start: Any  # start, end: tokens of the chunk.
    end: Any
    tiles: Any  # Steps through the chunk.


class Results(NamedTuple):
    """The destinations of rows: of finished ones, or of the running softmax of a chunk."""

    output: Any  # A hopper_rows.Output.
    rows: Any  # rows, maxima, sums: the running softmax of a chunk.
    maxima: Any
    sums: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def find_work(
    query_start_loc, seq_lens, num_seqs, table_tokens, max_chunks, ROW_TILES: gl.constexpr, SHAPE: gl.constexpr,
    TILE_ROWS: gl.constexpr,
):  # fmt: skip
    """The Work of this program: chunks in the order of sequences, the tiles of TILE_ROWS rows of each side by side."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lanes = gl.arange(0, _SEQS, layout=layout)
    item = gl.program_id(0) // ROW_TILES
    size = 0
    if SHAPE.SHARED is not None:
        size = _shared(query_start_loc, seq_lens, num_seqs, table_tokens, max_chunks, SHAPE)[0]
    before = 0
    total = 0
    seq = 0
    for base in range(0, num_seqs, _SEQS):
        seqs = base + lanes
        live = seqs < num_seqs
        lens = gl.load(query_start_loc + seqs + 1, mask=live, other=0)
        lens -= gl.load(query_start_loc + seqs, mask=live, other=0)
        keys = gl.load(seq_lens + seqs, mask=live, other=0)
        chunks, _ = _chunks(keys, lens, table_tokens, size, SHAPE)
        past = live & (total + gl.associative_scan(chunks, 0, _add) <= item)
        seq += gl.sum(past.to(gl.int32), 0)
        before += gl.sum(gl.where(past, chunks, 0), 0)
        total += gl.sum(chunks, 0)
    seq = gl.minimum(seq, num_seqs - 1)
    query_start = gl.load(query_start_loc + seq)
    query_len = gl.load(query_start_loc + seq + 1) - query_start
    seq_len = gl.load(seq_lens + seq)
    index = item - before
    chunks, chunk = _chunks(seq_len, query_len, table_tokens, size, SHAPE)
    first, stride = seq * max_chunks, max_chunks
    if SHAPE.SHARED is not None:
        first = gl.where(size > 0, before, first)
        stride = gl.where(size > 0, chunks, stride)
    start = index * chunk
    end = gl.minimum(gl.minimum(seq_len, table_tokens), start + chunk)
    return Work(
        item < total, item - total, seq, first * SHAPE.MAX_QUERY + index, stride, chunks,
        gl.program_id(0) % ROW_TILES * TILE_ROWS, query_start, query_len, seq_len - query_len, start, end,
        gl.maximum(end - start + BLOCK_N - 1, 0) // BLOCK_N,
    )  # fmt: skip


@gluon.jit
def find_row(
    query_start_loc, seq_lens, num_seqs, table_tokens, max_chunks, num_tokens, ROW_TILES: gl.constexpr,
    SHAPE: gl.constexpr, TILE_ROWS: gl.constexpr,
):  # fmt: skip
    """The Work of this program where no sequence has two query tokens: `max_chunks` programs for each sequence.

    Nothing is counted but in an uneven batch. To count takes longer than to attend where each token of a long prompt is
    a sequence.
    """
    item = gl.program_id(0) // ROW_TILES
    total = num_seqs * max_chunks
    # The first chunks come first: most programs without a chunk are the last.
    index = item // num_seqs
    number = gl.where(item < total, item % num_seqs, num_seqs)
    place = number * max_chunks + index
    size = 0
    if SHAPE.SHARED is not None:
        size, keys = _shared(query_start_loc, seq_lens, num_seqs, table_tokens, max_chunks, SHAPE)
        if size > 0:
            counts = (keys + size - 1) // size
            past = gl.associative_scan(counts, 0, _add) <= item
            number = gl.sum(past.to(gl.int32), 0)
            index = item - gl.sum(gl.where(past, counts, 0), 0)
            total = gl.sum(counts, 0)
            place = item
    seq = gl.minimum(number, num_seqs - 1)
    query_start = gl.load(query_start_loc + seq)
    query_len = gl.load(query_start_loc + seq + 1) - query_start
    seq_len = gl.load(seq_lens + seq)
    chunks, chunk = _chunks(seq_len, query_len, table_tokens, size, SHAPE)
    # A sequence without a query token leaves a token of padding: its first program, and those behind the last
    # sequence, clear one each.
    spare = gl.where(index == 0, seq - query_start, num_tokens)
    spare = gl.where(number < num_seqs, spare, item - total + num_seqs - query_start - query_len)
    if SHAPE.SHARED is not None:
        spare = gl.where(size > 0, item - total, spare)
    start = index * chunk
    end = gl.minimum(gl.minimum(seq_len, table_tokens), start + chunk)
    return Work(
        (number < num_seqs) & (index < chunks), spare, seq, place, 0, chunks,
        gl.program_id(0) % ROW_TILES * TILE_ROWS, query_start, query_len, seq_len - query_len, start, end,
        gl.maximum(end - start + BLOCK_N - 1, 0) // BLOCK_N,
    )  # fmt: skip


@gluon.jit
def _shared(query_start_loc, seq_lens, num_seqs, table_tokens, max_chunks, SHAPE: gl.constexpr):
    """(Tokens of every chunk of an uneven batch or 0, the tokens of its sequences)."""
    # Each warp has all sequences.
    layout: gl.constexpr = gl.BlockedLayout([SHAPE.SHARED[2] // 32], [32], [gl.num_warps()], [0])
    seqs = gl.arange(0, SHAPE.SHARED[2], layout=layout)
    keys = chunked_keys(seqs, query_start_loc, seq_lens, num_seqs, table_tokens, SHAPE.MAX_QUERY)
    size = uneven_chunk(keys, table_tokens, max_chunks, SHAPE.CHUNK, SHAPE.LEAST, SHAPE.FEW, SHAPE.SHARED)
    return size, keys


@gluon.jit
def _chunks(seq_len, query_len, table_tokens, size, SHAPE: gl.constexpr):
    """(Chunks, tokens of one) of sequences; with a `size` above 0 those of an uneven batch."""
    _, chunks = chunk_span(
        seq_len, query_len, table_tokens, Bounds(None, None, None), SHAPE.CHUNK, SHAPE.MAX_QUERY, SHAPE.LEAST, SHAPE.FEW
    )
    chunk = SHAPE.CHUNK
    if SHAPE.LEAST is not None:
        chunk = equal_chunk(seq_len, table_tokens, chunks)
    if SHAPE.SHARED is not None:
        keys = gl.maximum(gl.minimum(seq_len, table_tokens), 1)
        chunks = gl.where((size > 0) & (chunks > 0), (keys + size - 1) // gl.maximum(size, 1), chunks)
        chunk = gl.where(size > 0, size, chunk)
    return chunks, chunk


@gluon.jit
def zero_padding(work, output, query_start_loc, num_tokens, num_seqs, SHAPE: gl.constexpr):
    """Programs without a chunk: writes rows of padding, zeros and a log-sum-exp of -inf."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    rows = work.first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    tokens = gl.load(query_start_loc + num_seqs) + work.spare * SHAPE.MAX_QUERY + rows // SHAPE.NUM_HEADS
    heads = rows % SHAPE.NUM_HEADS
    live = (rows < SHAPE.MAX_QUERY * SHAPE.NUM_HEADS) & (tokens < num_tokens)
    zeros = gl.zeros([_ROWS, HALF], gl.float32, layout).to(output.out.dtype.element_ty)
    pointers = output.out + tokens.to(gl.int64) * SHAPE.OUT_STRIDES[0] + heads * SHAPE.OUT_STRIDES[1]
    for half in gl.static_range(2):
        gl.store(pointers[:, None] + half * HALF + columns[None, :], zeros, mask=live[:, None])
    if output.lse is not None:
        empty = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        gl.store(output.lse + tokens.to(gl.int64) * SHAPE.NUM_HEADS + heads, empty, mask=live)


@gluon.jit
def visible_latents(tokens, work, window_right, SHAPE: gl.constexpr):
    """(Last token of the chunk that the query `tokens` see, end of those that all rows of the program see)."""
    last = tokens * 0 + work.end - 1
    full_end = work.end
    if window_right is not None:
        last = gl.minimum(work.context + tokens + window_right, work.end - 1)
        full_end = gl.minimum(work.context + work.first_row // SHAPE.NUM_HEADS + window_right + 1, work.end)
    return last, full_end


@gluon.jit
def store_sums(row_max, row_sum, rows, tokens, work, results, SHAPE: gl.constexpr):
    """Stores the log-sum-exp of whole rows, or the maxima and sums of a chunk's; returns the factors of its rows."""
    live = tokens < work.query_len
    heads = rows % SHAPE.NUM_HEADS
    ratio = gl.full([rows.shape[0]], 1.0, gl.float32, rows.type.layout)
    if work.chunks == 1:
        empty = row_sum == 0.0
        shift = gl.where(empty, 0.0, row_max)
        inverse, shift, total = finish_rows(row_sum, shift, empty, 0, rows, results.output, SHAPE.NUM_HEADS)
        ratio = inverse * results.output.factor
        if results.output.lse is not None:
            pointers = results.output.lse + (work.query_start + tokens).to(gl.int64) * SHAPE.NUM_HEADS + heads
            gl.store(pointers, gl.where(empty, float("-inf"), (shift + gl.log2(total)) * LN2), mask=live)
    elif results.rows is not None:
        slots = slots_of(work, tokens, heads, SHAPE)
        gl.store(results.maxima + slots, row_max, mask=live)
        gl.store(results.sums + slots, row_sum, mask=live)
    return ratio


@gluon.jit
def slots_of(work, tokens, heads, SHAPE: gl.constexpr):
    """The places of a chunk's rows in scratch, for attention_combine_kernel."""
    return (work.place + tokens * work.stride).to(gl.int64) * SHAPE.NUM_HEADS + heads


@gluon.jit
def places_of(work, table, step, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):
    """Where the tile number `step` lies: the rows of its boxes, or with a BOX of 0 each row, -1 where there is none."""
    if SHAPE.BOX == 0:
        key = work.start + step * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
        if SHAPE.BLOCK_SIZE == 1:
            found = gl.load(table + key, mask=key < work.end, other=-1)
        else:
            block = gl.load(table + key // SHAPE.BLOCK_SIZE, mask=key < work.end, other=0)
            found = gl.where(key < work.end, block * SHAPE.BLOCK_ROWS + key % SHAPE.BLOCK_SIZE, -1)
    else:
        found = _boxes_of(work, table, step, SHAPE)
    return found


@gluon.jit
def _boxes_of(work, table, step, SHAPE: gl.constexpr):
    """Rows in the cache's matrix of the boxes of a tile: one for each lane of a warp; outside where there is none."""
    BOX: gl.constexpr = SHAPE.BOX
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    key = work.start + step * BLOCK_N + lanes * BOX
    inside = (key < work.end) & (lanes < BLOCK_N // BOX)
    block = gl.load(table + key // SHAPE.BLOCK_SIZE, mask=inside, other=0)
    return gl.where(inside, block * SHAPE.BLOCK_ROWS + key % SHAPE.BLOCK_SIZE, -BOX)


# Elements of a thread that one test of `rescale_rows` covers.
_RESCALED = gl.constexpr(32)


def _rescale_assembly(count: int) -> str:
    # Operands: `count` values in and out, the same again (tied), `count` factors; in the order of the matrix units: two
    # columns of one row, the same columns of the row 8 below, and so on.
    factor = 2 * count
    products = "".join(f"mul.f32 ${i}, ${i}, ${factor + i // 2 % 2 * 2}; " for i in range(count))
    return (
        "{ .reg .pred moved; "
        f"setp.neu.f32 moved, ${factor}, 0f3F800000; setp.neu.or.f32 moved, ${factor + 2}, 0f3F800000, moved; "
        f"vote.sync.any.pred moved, moved, 0xffffffff; @!moved bra.uni same; {products}same: }}"
    )


_RESCALE = gl.constexpr(_rescale_assembly(_RESCALED.value))
_RESCALE_CONSTRAINTS = gl.constexpr(
    ",".join(["=f"] * _RESCALED.value + [str(i) for i in range(_RESCALED.value)] + ["f"] * _RESCALED.value)
)


@gluon.jit
def rescale_rows(acc, factors):
    """acc times the factors of its rows, which a warp skips where all of its own are 1."""
    factors, _ = gl.broadcast(gl.expand_dims(factors, 1), acc)
    return gl.inline_asm_elementwise(
        _RESCALE, _RESCALE_CONSTRAINTS, [acc, factors], dtype=gl.float32, is_pure=True, pack=_RESCALED
    )
