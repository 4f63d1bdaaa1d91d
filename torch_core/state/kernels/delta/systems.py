"""The systems of the gated delta rule's chunks, by their WY form (Yang et al. 2024, arXiv:2406.06484).

Token t of a chunk corrects the state by `u[t] k[t]^T`, and u solves a unit lower triangular system whose right side
depends on the state before the chunk. All chunks' systems are inverted at the same time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import natural_exp
from torch_core.device.work import locate_tile


@triton.jit
def gated_delta_overlaps_kernel(
    query,
    key,
    beta,
    g,
    query_start_loc,
    overlaps,
    products,
    factors,
    decays,
    lowers,
    norms,
    growths,
    num_seqs,
    scale,
    epsilon,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    beta_token_stride,
    g_token_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: heads of keys, of all chunks of the batch by a static bound.

    Writes for each chunk and key head the products of its keys in the blocks of 16 that systems have, as `overlaps`, in
    float32. For each chunk and head: the decayed products of queries and keys as `products`; the logarithms of the
    decay from the chunk's start as `decays`; and as `factors`, in float32, those of each token's key before
    the state reads it, of its result, of its key before the state adds it, of the state over the chunk, and beta. For
    the derivative, also the system below its diagonal without beta, as `lowers`, and the factors of keys and queries
    for their norms, as `norms`, in float32. For segments, the logarithm of a bound of the factor by which the chunk
    changes the length of a state's rows, as `growths`.
    """
    tile, key_head, _ = chunk_program(NUM_HEADS // GROUP, 1)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return
    start = tl.load(query_start_loc + seq)
    step = tl.arange(0, CHUNK)
    token = index * CHUNK + step
    live = token < tl.load(query_start_loc + seq + 1) - start
    place = (start + token).to(tl.int64)
    channel = tl.arange(0, KEY_PADDED)
    is_key = live[:, None] & (channel < KEY_SIZE)[None, :]
    keys = key + place[:, None] * key_token_stride + key_head * key_head_stride + channel[None, :]
    queries = query + place[:, None] * query_token_stride + key_head * query_head_stride + channel[None, :]
    k = tl.load(keys, mask=is_key, other=0.0)
    q = tl.load(queries, mask=is_key, other=0.0)
    own_index = tl.arange(0, GROUP_PADDED)[None, :]
    member = key_head * GROUP + own_index
    is_member = (own_index < GROUP) & (step >= 0)[:, None]
    row = step[:, None]
    rates = beta + place[:, None] * beta_token_stride + member
    rate = tl.load(rates, mask=is_member & live[:, None], other=0.0).to(tl.float32)
    decays = decay_sums(decays, key.dtype.element_ty)
    decay = tl.zeros([CHUNK, GROUP_PADDED], decays.dtype.element_ty)
    if g is not None:
        gates = g + place[:, None] * g_token_stride + member
        # Of two sums with -inf no difference could be taken.
        gate = tl.load(gates, mask=is_member & live[:, None], other=0.0).to(tl.float32)
        gate = tl.maximum(gate, -100.0, propagate_nan=tl.PropagateNan.ALL)
        decay = tl.cumsum(gate.to(decays.dtype.element_ty), 0)
    last = tl.sum(tl.where(row == CHUNK - 1, decay, 0.0), 0)[None, :]
    k_norm = inverse_norms(k, epsilon, NORMALIZE)
    q_norm = inverse_norms(q, epsilon, NORMALIZE) * scale
    number = (tile * NUM_HEADS + member).to(tl.int64) * CHUNK
    held = factors + number * 5 + row
    tl.store(decays + number + row, decay, mask=is_member)
    tl.store(held, -k_norm[:, None] * tl.exp(decay.to(tl.float32)), mask=is_member)
    tl.store(held + CHUNK, q_norm[:, None] * tl.exp(decay.to(tl.float32)), mask=is_member)
    tl.store(held + 2 * CHUNK, k_norm[:, None] * tl.exp((last - decay).to(tl.float32)), mask=is_member)
    tl.store(held + 3 * CHUNK, tl.exp(last.to(tl.float32)) + tl.zeros_like(rate), mask=is_member)
    tl.store(held + 4 * CHUNK, rate, mask=is_member)

    by_key = tl.dot(k, tl.trans(k), input_precision=PRECISION) * k_norm[:, None] * k_norm[None, :]
    column = step[None, :]
    square = row * CHUNK + column
    shared = overlaps + tl.cast(tile * (NUM_HEADS // GROUP) + key_head, tl.int64) * CHUNK * CHUNK
    is_lower = row // 16 >= column // 16
    tl.store(shared + square, by_key, mask=is_lower)
    if growths is not None:
        # Keys that are divided by their norms are at most this long.
        square_norm = 1.0 if NORMALIZE else tl.sum(tl.where(row == column, by_key, 0.0), 1)[:, None]
        # Besides its decay, a token changes the part of a row along its key alone. A logarithm of x is below x - 1.
        growth = tl.maximum(tl.abs(1 - rate * square_norm) - 1, 0.0)
        held = growths + tile * NUM_HEADS + member
        tl.store(held, last + tl.sum(growth, 0)[None, :], mask=own_index < GROUP)
    by_query = tl.dot(q, tl.trans(k), input_precision=PRECISION) * q_norm[:, None] * k_norm[None, :]
    # Decays are read that other threads have stored.
    tl.debug_barrier()
    for index in range(GROUP):
        own = (tile * NUM_HEADS + key_head * GROUP + index).to(tl.int64) * CHUNK
        passed = tl.load(decays + own + step)
        # Of later tokens the difference would be positive without a bound.
        weights = natural_exp(tl.where(row >= column, passed[:, None] - passed[None, :], float("-inf")))
        product = (by_query * weights).to(products.dtype.element_ty)
        tl.store(products + own * CHUNK + square, product, mask=is_lower | (lowers is not None))
        if lowers is not None:
            lower = tl.where(row > column, by_key * weights, 0.0)
            tl.store(lowers + own * CHUNK + square, lower.to(lowers.dtype.element_ty))
            tl.store(norms + own * 2 + step, k_norm)
            tl.store(norms + own * 2 + CHUNK + step, q_norm)


@triton.jit
def gated_delta_inverses_kernel(
    query_start_loc,
    overlaps,
    factors,
    decays,
    through,
    lowers,
    inverses,
    num_seqs,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, heads). Writes inverses of I + overlaps, with columns times beta.

    With gates of channels (`through`) the overlaps are those of each head, otherwise products of keys without factors.
    A finite series would lose digits for keys that are alike, because its terms grow as binomial coefficients.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    _, _, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return
    tl.static_assert(CHUNK == 64)
    number = (tile * NUM_HEADS + head).to(tl.int64) * CHUNK
    step = tl.arange(0, 16)
    inner = step[:, None] * CHUNK + step[None, :]
    target = inverses + number * CHUNK + inner
    rate = factors + number * 5 + 4 * CHUNK + step
    if through is None:
        shared = (tile * (NUM_HEADS // GROUP) + head // GROUP).to(tl.int64)
        source = overlaps + shared * CHUNK * CHUNK + inner
        decay = decay_sums(decays, inverses.dtype.element_ty) + number
    else:
        source = overlaps + number * CHUNK + inner
        decay = None
    x00 = _inverted(_block(source, rate, decay, 0, 0, CHUNK), PRECISION)
    x11 = _inverted(_block(source, rate, decay, 16, 16, CHUNK), PRECISION)
    x22 = _inverted(_block(source, rate, decay, 32, 32, CHUNK), PRECISION)
    x33 = _inverted(_block(source, rate, decay, 48, 48, CHUNK), PRECISION)
    l10 = _block(source, rate, decay, 16, 0, CHUNK)
    l20 = _block(source, rate, decay, 32, 0, CHUNK)
    l21 = _block(source, rate, decay, 32, 16, CHUNK)
    l30 = _block(source, rate, decay, 48, 0, CHUNK)
    l31 = _block(source, rate, decay, 48, 16, CHUNK)
    l32 = _block(source, rate, decay, 48, 32, CHUNK)
    x10 = -_product(x11, _product(l10, x00, PRECISION), PRECISION)
    x21 = -_product(x22, _product(l21, x11, PRECISION), PRECISION)
    x32 = -_product(x33, _product(l32, x22, PRECISION), PRECISION)
    x20 = -_product(x22, _product(l20, x00, PRECISION) + _product(l21, x10, PRECISION), PRECISION)
    x31 = -_product(x33, _product(l31, x11, PRECISION) + _product(l32, x21, PRECISION), PRECISION)
    x30 = _product(l30, x00, PRECISION) + _product(l31, x10, PRECISION) + _product(l32, x20, PRECISION)
    x30 = -_product(x33, x30, PRECISION)
    zero = None if lowers is None else tl.zeros([16, 16], tl.float32)
    _store_column(target, rate, x00, x10, x20, x30, CHUNK)
    _store_column(target + 16, rate + 16, zero, x11, x21, x31, CHUNK)
    _store_column(target + 32, rate + 32, zero, zero, x22, x32, CHUNK)
    _store_column(target + 48, rate + 48, zero, zero, zero, x33, CHUNK)


@triton.jit
def decay_sums(decays, dtype: tl.constexpr):
    """Returns the logarithms of decays from a chunk's start: of float32 inputs in float64, in the room of two numbers.

    Differences of neighbours would not have the digits of float32 after strong gates. (JAX makes no float64 arrays.)
    """
    return decays.to(tl.pointer_type(tl.float64), bitcast=True) if dtype == tl.float32 else decays


@triton.jit
def chunk_program(HEADS: tl.constexpr, PARTS: tl.constexpr):
    """Returns chunk, head and part of a program: those of a chunk run side by side, and read what they share once."""
    program = tl.program_id(0)
    return program // (HEADS * PARTS), program // PARTS % HEADS, program % PARTS


@triton.jit
def _block(source, rate, decay, ROW: tl.constexpr, COLUMN: tl.constexpr, CHUNK: tl.constexpr):
    """Returns a block of a system; `decay` is None if it is stored with its factors."""
    block = tl.load(source + ROW * CHUNK + COLUMN)
    if decay is not None:
        step = tl.arange(0, 16)
        own = tl.load(decay + ROW + step)[:, None]
        earlier = tl.load(decay + COLUMN + step)[None, :]
        rate = tl.load(rate + ROW)[:, None]
        if ROW == COLUMN:
            is_later = step[:, None] > step[None, :]
            # Of earlier tokens the difference would be positive without a bound.
            block *= natural_exp(tl.where(is_later, own - earlier, 0.0)) * rate
            block = tl.where(is_later, block, 0.0)
        else:
            border = tl.load(decay + ROW)
            block = block * (natural_exp(own - border) * rate) * natural_exp(border - earlier)
    return block


@triton.jit
def _store_column(target, rate, x0, x1, x2, x3, CHUNK: tl.constexpr):
    rate = tl.load(rate)[None, :]
    dtype: tl.constexpr = target.dtype.element_ty
    if x0 is not None:
        tl.store(target, (x0 * rate).to(dtype))
    if x1 is not None:
        tl.store(target + 16 * CHUNK, (x1 * rate).to(dtype))
    if x2 is not None:
        tl.store(target + 32 * CHUNK, (x2 * rate).to(dtype))
    tl.store(target + 48 * CHUNK, (x3 * rate).to(dtype))


@triton.jit
def _inverted(lower, PRECISION: tl.constexpr):
    """Returns the inverse of I + lower, of 16 rows, from those of the blocks of 1, 2, 4 and 8 rows on its diagonal."""
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 16)[None, :]
    x = tl.where(row == column, 1.0, 0.0)
    for level in tl.static_range(4):
        between = tl.where(((row >> level) ^ (column >> level)) == 1, lower, 0.0)
        x -= between if level == 0 else _product(_product(x, between, PRECISION), x, PRECISION)
    return x


@triton.jit
def inverse_norms(rows, epsilon, NORMALIZE: tl.constexpr):
    """Returns the inverse of each row's norm if NORMALIZE, and ones otherwise."""
    wide = rows.to(tl.float32)
    return 1 / tl.sqrt(tl.sum(wide * wide, 1) + epsilon) if NORMALIZE else tl.full([rows.shape[0]], 1.0, tl.float32)


@triton.jit
def _product(left, right, PRECISION: tl.constexpr):
    if PRECISION == "parts":
        left, left_rest = _parts(left)
        right, right_rest = _parts(right)
        product = tl.dot(left, right, acc=tl.dot(left, right_rest, acc=tl.dot(left_rest, right)))
    else:
        product = tl.dot(left, right, input_precision=PRECISION)
    return product


@triton.jit
def _parts(x):
    """Returns the eight leading bits of numbers, and the next eight: five more than float16 has."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)
