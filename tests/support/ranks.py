"""A cache whose sequences are spread over ranks, cut from one that holds all tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["of_rank"]


def of_rank(cache: Any, world: int, rank: int, interleave: int = 1) -> Any:
    """Returns what a rank holds of a cache or scale cache whose blocks are `world` times as large as a rank's."""
    axis = 2 if cache.ndim == 5 else 1
    tokens = np.arange(cache.shape[axis])
    mine = tokens[tokens // interleave % world == rank]
    return np.ascontiguousarray(np.take(np.asarray(cache), mine, axis))
