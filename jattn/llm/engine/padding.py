"""How many tokens of prompts a step takes, where it costs by the size that it is padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# A step of fewer tokens takes as long, because it reads all weights.
# Two steps instead of one save at least this many tokens of padding: the prompts of the second one end later. With
# more rows that decode than _MANY_ROWS fewer in proportion, because each of them waits for the padding.
_CHEAPEST_TOKENS, _WORTH_TWO_STEPS, _MANY_ROWS = 256, 512, 48
#: A step that none with prompts preceded takes prompts of this many tokens, and each further one of twice as many as
#: the one before it: the first of many that come together need not wait for a full step, and a smaller one would cost
#: them as much.
FIRST_TOKENS = 2048


def fitting(sizes: Sequence[int], num_new: int, num_decoding: int) -> int:
    """Returns the tokens of prompts for the next step: less than there are, if padding would cost too much.

    Args:
        sizes: the numbers of tokens that steps are padded to, in order; none if they do not cost by their tokens.
        num_new: tokens of prompts that could run.
        num_decoding: rows that decode a token.
    """
    total = num_new + num_decoding

    def cost(num_tokens: int) -> int:
        return sizes[min(bisect_left(sizes, max(num_tokens, _CHEAPEST_TOKENS)), len(sizes) - 1)]

    smaller = bisect_left(sizes, total) - 1
    if smaller < 0 or sizes[smaller] <= num_decoding:
        return num_new
    # Without this rest the next step would decode alone.
    rest = cost(total - sizes[smaller] + num_decoding) - (cost(num_decoding) if num_decoding else 0)
    worth = _WORTH_TWO_STEPS * _MANY_ROWS // max(_MANY_ROWS, num_decoding)
    pays = cost(sizes[smaller]) + rest + worth <= cost(total)
    return sizes[smaller] - num_decoding if pays else num_new
