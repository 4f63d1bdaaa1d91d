"""The search for a program's sequence, tile or chunk. It runs on the device: no grid depends on a true length.

There is no list in memory: a program counts the work of all sequences in registers (a thousand lengths are 4 KB that
stay in the cache), which costs less than the launch of a kernel that would write the list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.mask import Bounds

# Tokens that a program of latents could read in the time that it takes to begin and to end.
_START = tl.constexpr(256)
# Sizes of chunks that are compared: powers of two, and one and a half times these.
_SIZES = tl.constexpr(5)


@triton.jit
def locate_tile(work, query_start_loc, num_seqs, BLOCK_SEQS: tl.constexpr, TILE: tl.constexpr, MIN_QUERY: tl.constexpr):
    """Finds the query tile number `work`: (sequence, tile within it, number of tiles of the batch).

    Sequences with fewer than MIN_QUERY query tokens have no tiles; the others have one for every TILE tokens. The
    sequence means nothing beyond the last tile.
    """
    before = 0
    total = 0
    seq = 0
    for base in range(0, num_seqs, BLOCK_SEQS):
        seqs = base + tl.arange(0, BLOCK_SEQS)
        live = seqs < num_seqs
        query_end = tl.load(query_start_loc + seqs + 1, mask=live, other=0)
        query_len = query_end - tl.load(query_start_loc + seqs, mask=live, other=0)
        tiles = tl.where(query_len >= MIN_QUERY, (query_len + TILE - 1) // TILE, 0)
        past = live & (total + tl.cumsum(tiles, 0) <= work)
        seq += tl.sum(past.to(tl.int32), 0)
        before += tl.sum(tl.where(past, tiles, 0), 0)
        total += tl.sum(tiles, 0)
    return seq, work - before, total


@triton.jit
def chunk_span(
    seq_len, query_len, table_tokens, bounds, chunk, max_query, LEAST: tl.constexpr = None, FEW: tl.constexpr = 1
):
    """The chunks of `chunk` keys that the last `query_len` positions of a sequence can see.

    Chunks are counted from key 0, so a sequence is cut at the same places in every batch. Works on scalars and on
    vectors. A sequence with query rows has at least one chunk, whose program writes the zeros of an empty row. Returns
    (first chunk, number of chunks); the number is 0 without query rows or with more than `max_query` of them. With
    LEAST there is no window, and a sequence has up to FEW chunks of about LEAST keys or more where these are more. They
    are equal, see `equal_chunk`, and none is empty.
    """
    keys = tl.minimum(seq_len, table_tokens)
    first_pos = tl.maximum(seq_len - query_len, 0)
    low = seq_len * 0
    if bounds.window_left is not None:
        low = tl.maximum(low, first_pos - bounds.window_left)
    if bounds.attention_chunk is not None:
        low = tl.maximum(low, first_pos // bounds.attention_chunk * bounds.attention_chunk)
    first = low // chunk
    chunks = tl.maximum((keys + chunk - 1) // chunk - first, 1)
    if LEAST is not None:
        chunks = tl.maximum(chunks, tl.minimum((keys + LEAST - 1) // LEAST, FEW))
        # Multiples of 128: fewer may have all the keys.
        size = tl.maximum(equal_chunk(seq_len, table_tokens, chunks), 1)
        chunks = tl.maximum((keys + size - 1) // size, 1)
    return first, tl.where((query_len > 0) & (query_len <= max_query), chunks, 0)


@triton.jit
def equal_chunk(seq_len, table_tokens, chunks):
    """The keys of each of `chunks` equal chunks of a sequence, a multiple of 128."""
    span = tl.maximum(chunks, 1) * 128
    return (tl.minimum(seq_len, table_tokens) + span - 1) // span * 128


@triton.jit
def uneven_chunk(
    keys, table_tokens, max_chunks, CHUNK: tl.constexpr, LEAST: tl.constexpr, FEW: tl.constexpr, SHARED: tl.constexpr
):
    """The tokens of every chunk of a batch in which most programs would wait for those of a long sequence; else 0.

    Of SHARED the first number is that of chunks that run at a time, the second that of those that read as fast as
    memory gives. `keys` are the tokens of all sequences, as `chunked_keys` gives them. 0 says that each sequence has
    its own chunks, see `chunk_span`, of `max_chunks` at most. Others are taken if they save a quarter of the time: a
    sequence is cut in the same way among most neighbours. There are never more chunks than the sequences could have of
    their own.
    """
    total = tl.sum(keys, 0)
    longest = tl.max(keys, 0)
    fastest = total // SHARED[1] + _START
    alone = tl.minimum(longest, CHUNK)
    if LEAST is not None:
        _, chunks = chunk_span(longest, 1, table_tokens, Bounds(None, None, None), CHUNK, 1, LEAST, FEW)
        alone = equal_chunk(longest, table_tokens, chunks)
    least_time = (alone + _START) * 3 // 4 + 1
    size = total * 0
    if fastest < least_time:
        most = tl.sum((keys > 0).to(tl.int32), 0) * max_chunks
        # The smallest size is 128 or, if a share of all tokens is larger, the power of two below that.
        bits = total * 0 + 7
        for i in tl.static_range(12):
            bits += (total // SHARED[0] >= 256 << i).to(tl.int32)
        for i in tl.static_range(_SIZES):
            unit = bits + (i // 2 - i % 2)
            count = (keys + (1 << unit) - 1) >> unit
            if i % 2 == 1:
                count = (count + 2) // 3
            tokens = (1 + i % 2 * 2) << unit
            count = tl.sum(count, 0)
            # Programs of a second wave begin one by one, and half of one is left at the end.
            time = (total + _START * count) // SHARED[0] + (tokens + _START) // 2
            time = tl.where(count <= SHARED[0], tokens + _START, time)
            better = (count <= most) & (time < least_time)
            size = tl.where(better, tokens, size)
            least_time = tl.where(better, time, least_time)
    return size


@triton.jit
def chunked_keys(seqs, query_start_loc, seq_lens, num_seqs, table_tokens, MAX_QUERY: tl.constexpr):
    """The tokens of sequences that have chunks, at least 1; 0 of others."""
    live = seqs < num_seqs
    query_len = tl.load(query_start_loc + seqs + 1, mask=live, other=0)
    query_len -= tl.load(query_start_loc + seqs, mask=live, other=0)
    keys = tl.minimum(tl.load(seq_lens + seqs, mask=live, other=0), table_tokens)
    return tl.where((query_len > 0) & (query_len <= MAX_QUERY), tl.maximum(keys, 1), 0)


@triton.jit
def locate_chunk(
    work, query_start_loc, seq_lens, num_seqs, table_tokens, bounds, BLOCK_SEQS: tl.constexpr, chunk,
    MAX_QUERY: tl.constexpr, LONG: tl.constexpr = None, LEAST: tl.constexpr = None, FEW: tl.constexpr = 1,
    RUNS: tl.constexpr = None,
):  # fmt: skip
    """Finds the run of key chunks number `work`: (sequence, its run, runs of the batch, chunks of a run).

    With BLOCK_SEQS 1 there is one sequence. With LONG there are at most BLOCK_SEQS, and those of more keys come first:
    what begins last should end soon. LEAST and FEW are as in `chunk_span`. With RUNS a run has as many chunks as
    it takes for a batch of about RUNS of them, or one: a few long sequences among short ones are then read by many
    programs, and no bit depends on it. Without, it has one.
    """
    each = 1
    before = 0
    total = 0
    seq = 0
    if BLOCK_SEQS == 1:
        only_len = tl.load(query_start_loc + 1) - tl.load(query_start_loc)
        _, total = chunk_span(tl.load(seq_lens), only_len, table_tokens, bounds, chunk, MAX_QUERY, LEAST, FEW)
    elif LONG is not None:
        seqs = tl.arange(0, BLOCK_SEQS)
        seq_len, chunks = _chunks(
            seqs, query_start_loc, seq_lens, num_seqs, table_tokens, bounds, chunk, MAX_QUERY, LEAST, FEW
        )
        if RUNS is not None:
            each = tl.maximum((tl.sum(chunks, 0) + RUNS - 1) // RUNS, 1)
            chunks = (chunks + each - 1) // each
        total = tl.sum(chunks, 0)
        long = tl.where(seq_len > LONG, chunks, 0)
        num_long = tl.sum(long, 0)
        chunks = tl.where(work < num_long, long, chunks - long)
        work = tl.where(work < num_long, work, work - num_long)
        past = (seqs < num_seqs) & (tl.cumsum(chunks, 0) <= work)
        seq = tl.sum(past.to(tl.int32), 0)
        before = tl.sum(tl.where(past, chunks, 0), 0)
    else:
        for base in range(0, num_seqs, BLOCK_SEQS):
            seqs = base + tl.arange(0, BLOCK_SEQS)
            _, chunks = _chunks(
                seqs, query_start_loc, seq_lens, num_seqs, table_tokens, bounds, chunk, MAX_QUERY, LEAST, FEW
            )
            past = (seqs < num_seqs) & (total + tl.cumsum(chunks, 0) <= work)
            seq += tl.sum(past.to(tl.int32), 0)
            before += tl.sum(tl.where(past, chunks, 0), 0)
            total += tl.sum(chunks, 0)
    return seq, work - before, total, each


@triton.jit
def _chunks(
    seqs, query_start_loc, seq_lens, num_seqs, table_tokens, bounds, chunk, MAX_QUERY: tl.constexpr,
    LEAST: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """(keys, chunks) of sequences; no chunks past the last one."""
    live = seqs < num_seqs
    query_end = tl.load(query_start_loc + seqs + 1, mask=live, other=0)
    query_len = query_end - tl.load(query_start_loc + seqs, mask=live, other=0)
    seq_len = tl.load(seq_lens + seqs, mask=live, other=0)
    _, chunks = chunk_span(seq_len, query_len, table_tokens, bounds, chunk, MAX_QUERY, LEAST, FEW)
    return seq_len, chunks
