"""A naive builder, written token by token, that the vectorised one is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from torch_core.metadata import SequenceRow


def _naive_metadata(
    rows: list[SequenceRow], *, block_size: int, num_seqs: int, num_tokens: int, max_blocks: int
) -> dict[str, Any]:
    starts, lens, tables, slots, positions = [0], [], [], [], []
    for row in rows:
        lens.append(row.num_computed_tokens + row.num_new_tokens)
        starts.append(starts[-1] + row.num_new_tokens)
        for position in range(row.num_computed_tokens, lens[-1]):
            positions.append(position)
            slots.append(row.block_ids[position // block_size] * block_size + position % block_size)
        used = [int(row.block_ids[i]) for i in range((lens[-1] + block_size - 1) // block_size)]
        tables.append(used + [0] * (max_blocks - len(used)))
    for _ in range(num_seqs - len(rows)):
        starts.append(starts[-1])
        lens.append(0)
        tables.append([0] * max_blocks)
    return {
        "query_start_loc": starts,
        "seq_lens": lens,
        "block_tables": tables,
        "slot_mapping": slots + [-1] * (num_tokens - len(slots)),
        "positions": positions + [0] * (num_tokens - len(positions)),
    }


def _random_rows(rng: np.random.Generator, *, block_size: int, num_blocks: int, max_rows: int = 8) -> list[SequenceRow]:
    ids = rng.permutation(np.arange(1, num_blocks)).tolist()
    rows = []
    for index in range(int(rng.integers(1, max_rows + 1))):
        computed = int(rng.integers(0, 3 * block_size)) if rng.random() < 0.7 else 0
        new = 1 if rng.random() < 0.5 else int(rng.integers(1, 3 * block_size))
        spare = int(rng.integers(0, 2))
        count = -(-(computed + new) // block_size) + spare
        rows.append(SequenceRow(ids[:count], computed, new, seq_id=f"r{index}"))
        del ids[:count]
    return rows


@pytest.fixture
def naive_metadata() -> Callable[..., dict[str, Any]]:
    return _naive_metadata


@pytest.fixture
def random_rows() -> Callable[..., list[SequenceRow]]:
    return _random_rows
