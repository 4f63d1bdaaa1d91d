"""The online softmax: one step and its end; shared by every attention kernel.

Milakov and Gimelshein, arXiv 1805.02867; the base-2 form of FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.mask import LOG2E

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def rescale(old_max, new_max, EXACT: tl.constexpr):
    """The factor of sums accumulated under old_max once the maximum is new_max; 1 while both are -inf."""
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    difference = old_max - shift
    if EXACT:
        difference = difference * LOG2E
    return tl.math.exp2(difference)


@triton.jit
def softmax_step(scores, factor, row_max, row_sum, EXACT: tl.constexpr):
    """Takes one tile of scores (-inf where masked) into the running softmax.

    The maximum is kept in units of log 2 and scores * factor is subtracted from it in one fused operation. EXACT keeps
    natural units instead (the factor is 1): the difference from the maximum is then exact, at one more operation.

    Returns (weights, factor for everything accumulated so far, new maximum, new sum). Rows that have seen no key keep
    the maximum -inf and weights of 0: they are shifted by 0 instead, because -inf - -inf is NaN.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    if EXACT:
        weights = tl.math.exp2((scores - shift[:, None]) * LOG2E)
        keep = tl.math.exp2((row_max - shift) * LOG2E)
    else:
        weights = tl.math.exp2(scores * factor - shift[:, None])
        keep = tl.math.exp2(row_max - shift)
    return weights, keep, new_max, row_sum * keep + tl.sum(weights, 1)


@triton.jit
def finish_rows(row_max, row_sum, sinks, heads, valid, EXACT: tl.constexpr):
    """Ends a softmax: returns the factor of the accumulated rows, and their log-sum-exp, a natural logarithm.

    A sink is a logit without a value: it joins the denominator only. Rows that saw no key get (0, -inf), with or
    without a sink.
    """
    empty = row_sum == 0.0
    shift = tl.where(empty, 0.0, row_max)
    keep = tl.where(empty, 0.0, 1.0)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32)
        if not EXACT:
            sink = sink * LOG2E
        top = tl.maximum(shift, sink)
        keep = keep * rescale(shift, top, EXACT)
        row_sum = row_sum * keep + rescale(sink, top, EXACT)
        shift = top
    total = tl.where(empty, 1.0, row_sum)
    if not EXACT:
        shift = shift * LN2
    # Rounded to nearest: the plain division is off by up to two units in the last place, equally for the whole row.
    return tl.div_rn(keep, total), tl.where(empty, float("-inf"), shift + tl.math.log2(total) * LN2)
