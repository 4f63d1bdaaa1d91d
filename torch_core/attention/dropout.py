"""Dropout of attention weights by a counter: the dropped weights are a function of seed, query and key alone.

The generator is Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, where 7 rounds are
the fewest that pass BigCrush). Its key is the seed of a sequence and head. A draw serves eight weights, those of four
keys and two queries that are 8 apart: with key and query counted from 0 in their sequence, its counter is
(key // 32 * 8 + key % 8, query // 16 * 8 + query % 8, 0, 0), word key // 8 % 4 is that of the key, and its half
query // 8 % 2, the lower one first, that of the query. A weight goes if these 16 bits are below `dropout_limit`;
tiles, neighbours and devices have no part in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_core.base.errors import InvalidInput

_RANGE = 1 << 16
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7


def check_rate(rate: float) -> None:
    """Raises InvalidInput unless a rate is a number from 0 up to 1 that leaves something."""
    number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    if not (number and 0 <= rate < 1 and dropout_limit(rate) < _RANGE):
        raise InvalidInput("dropout_rate", value=rate, wanted="it must be a static number, at least 0 and less than 1")


def dropout_limit(rate: float) -> int:
    """Returns below which of 2^16 numbers a weight goes: a rate is rounded to a multiple of 2^-16."""
    return round(rate * _RANGE)


def keep_factor(rate: float) -> float:
    """Returns the factor of the kept weights, which preserves their mean.

    Example:
        >>> keep_factor(0.5)
        2.0
    """
    return _RANGE / (_RANGE - dropout_limit(rate))


def keep_mask(seeds: Any, queries: Any, keys: tuple[int, int], rate: float, library: Any = np) -> Any:
    """Returns which weights stay.

    Args:
        seeds: int32 `[..., 2]`, of sequences and heads.
        queries: int32 `[rows]`, rows of the sequence.
        keys: first and last-plus-one key.
        rate: share of dropped weights.
        library: `numpy` or `jax.numpy`, whose arrays they are.

    Returns:
        bool `[..., rows, keys]`.

    Example:
        >>> keep_mask(np.array([1, 2], np.int32), np.arange(2), (0, 6), 0.5).astype(int).tolist()
        [[0, 1, 0, 1, 0, 0], [0, 1, 1, 0, 0, 1]]
    """
    first = keys[0] // 32
    blocks = library.arange(first, -(-keys[1] // 32), dtype=np.uint32)
    front = (1,) * (seeds.ndim - 1)
    queries = queries.astype(np.uint32).reshape(*front, -1, 1, 1)
    columns = (blocks[:, None] * 8 + library.arange(8, dtype=np.uint32)[None]).reshape(*front, 1, -1, 8)
    counters = (columns, queries // 16 * 8 + queries % 8)
    words = _philox(*counters, *(seeds[..., word, None, None, None].astype(np.uint32) for word in range(2)))
    numbers = library.stack(words, axis=-2) >> (queries // 8 % 2 * 16)[..., None] & 0xFFFF
    kept = (numbers >= dropout_limit(rate)).reshape(*seeds.shape[:-1], queries.size, len(blocks) * 32)
    return kept[..., keys[0] - first * 32 : keys[1] - first * 32]


def _philox(c0: Any, c1: Any, k0: Any, k1: Any) -> tuple[Any, ...]:
    """Returns the four words of counter (c0, c1, 0, 0) and key (k0, k1), uint32 arrays that broadcast."""
    c2 = c3 = (c0 ^ c1) & np.uint32(0)
    for _ in range(_ROUNDS):
        (low_a, high_a), (low_b, high_b) = _product(c0, _MULTIPLIERS[0]), _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = k0 + np.uint32(_KEY_STEPS[0]), k1 + np.uint32(_KEY_STEPS[1])
    return c0, c1, c2, c3


def _product(x: Any, constant: int) -> tuple[Any, Any]:
    """Returns the lower and upper 32 bits of x * constant; by halves, since JAX has no 64-bit integers by default."""
    low, high = np.uint32(constant & 0xFFFF), np.uint32(constant >> 16)
    x_low, x_high = x & 0xFFFF, x >> 16
    middle = x_high * low + (x_low * low >> 16)
    cross = x_low * high + (middle & 0xFFFF)
    return x * np.uint32(constant), x_high * high + (middle >> 16) + (cross >> 16)
