"""AttentionMetadata.build: what a JAX user writes for a step, uploaded and checked."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jattn import AttentionMetadata, SequenceRow
from torch_core.errors import InvalidInput, RequestTooLong
from torch_core.metadata import build_common_metadata

ROWS = [SequenceRow([5, 2], 0, 6), SequenceRow([9], 3, 1)]
POOL: dict[str, Any] = {"block_size": 4, "num_blocks": 16}


def test_a_built_step_holds_what_the_builder_says() -> None:
    sizes: dict[str, Any] = {"num_seqs": 4, "num_tokens": 8, "max_blocks": 3, "max_query_len": 7}
    expected = build_common_metadata(ROWS, **POOL, **sizes)

    built = AttentionMetadata.build(ROWS, **POOL, **sizes)

    assert built.max_query_len == 7
    for name in ("block_tables", "seq_lens", "query_start_loc", "slot_mapping"):
        found = getattr(built, name)
        assert isinstance(found, jax.Array)
        np.testing.assert_array_equal(found, getattr(expected, name))


def test_without_sizes_a_step_is_as_large_as_it_must_be() -> None:
    built = AttentionMetadata.build(ROWS, **POOL)

    assert (built.block_tables.shape, built.slot_mapping.shape, built.max_query_len) == ((2, 2), (7,), 6)


def test_a_bound_on_the_queries_that_is_too_small_is_refused() -> None:
    with pytest.raises(RequestTooLong) as error:
        AttentionMetadata.build(ROWS, **POOL, max_query_len=5)
    assert str(error.value) == (
        "max_query_len is 5, but the step has 6 new tokens in its longest row. Pad to a larger bucket."
    )


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (SequenceRow([16], 0, 1), r"block_tables\[2, 0\] is 16"),
        (SequenceRow([0], 0, 1), r"block_tables\[2, 0\] is the null block"),
        (SequenceRow([9], 2, 1), "block 9"),
        (SequenceRow([3], 0, 5), "block_ids of .* has 1 blocks; its 5 tokens need 2 blocks of 4"),
    ],
    ids=["beyond the pool", "null block", "of another row", "too few"],
)
def test_bad_block_ids_are_refused(row: SequenceRow, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        AttentionMetadata.build([*ROWS, row], **POOL)
