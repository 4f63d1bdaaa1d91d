"""AttentionMetadata.build: what a JAX user writes for a step, uploaded and checked."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jattn import AttentionMetadata, SequenceRow
from torch_core.base.errors import InvalidInput, RequestTooLong
from torch_core.metadata import build_common_metadata, metadata_layout

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


def test_an_uploaded_step_outlives_the_host_buffer() -> None:
    sizes: dict[str, Any] = {"num_seqs": 16, "num_tokens": 16, "max_blocks": 16}
    layout = metadata_layout(**sizes)
    room = np.zeros(layout.num_elements + 16, np.int32)
    # Where XLA's CPU backend takes memory as it is.
    buffer = room[-room.ctypes.data // 4 % 16 :][: layout.num_elements]
    record = build_common_metadata(ROWS, **POOL, **sizes, layout=layout, buffer=buffer)
    expected = {name: getattr(record, name).copy() for name in ("block_tables", "seq_lens", "query_start_loc")}

    uploaded = AttentionMetadata.from_common(record)
    buffer[:] = 99

    for name, array in expected.items():
        np.testing.assert_array_equal(getattr(uploaded, name), array)


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


SHARDS = [[SequenceRow([5, 2], 3, 2)], [SequenceRow([7], 0, 2), SequenceRow([1], 1, 2)], []]


def test_each_devices_own_metadata_lie_one_behind_the_other() -> None:
    built = AttentionMetadata.build_sharded(SHARDS, **POOL)

    for index, rows in enumerate(SHARDS):
        own = AttentionMetadata.build(rows, **POOL, num_seqs=2, num_tokens=4, max_blocks=2, max_query_len=2)
        for name in ("block_tables", "seq_lens", "query_start_loc", "slot_mapping"):
            expected = getattr(own, name)
            np.testing.assert_array_equal(np.split(getattr(built, name), 3)[index], expected)


def test_one_batch_for_all_devices_counts_blocks_and_rows_through() -> None:
    built = AttentionMetadata.build_sharded(SHARDS, **POOL, global_ids=True)

    assert built.query_start_loc.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert built.seq_lens.tolist() == [5, 0, 2, 3, 0, 0]
    assert built.block_tables.tolist() == [[5, 2], [0, 0], [23, 0], [17, 0], [0, 0], [0, 0]]
    assert built.slot_mapping.tolist() == [23, 8, -1, -1, 92, 93, 69, 70, -1, -1, -1, -1]


def test_shards_that_are_no_even_batch_are_refused() -> None:
    with pytest.raises(InvalidInput) as error:
        AttentionMetadata.build_sharded([[SequenceRow([1], 0, 2)], ROWS], **POOL, global_ids=True)
    assert str(error.value) == (
        "row 0 of shards[0] has 2 new tokens; for one batch that is split every row has max_query_len = 6. Pass "
        "global_ids=False, and call the ops inside jax.shard_map."
    )
    with pytest.raises(InvalidInput, match="shards is empty"):
        AttentionMetadata.build_sharded([], **POOL)


def test_the_states_of_a_batch_are_keywords_of_the_ops_that_keep_one():
    rows = [SequenceRow([5], 2, 1, None, 3), SequenceRow([9], 0, 2, None, 1)]
    step = AttentionMetadata.build(rows, block_size=4, num_blocks=16, num_seqs=3, num_tokens=4, num_slots=4)
    found = dict(step.states)
    assert found.pop("defer_states") is False
    assert {name: array.tolist() for name, array in found.items()} == {
        "query_start_loc": [0, 1, 3, 3],
        "cache_indices": [3, 1, -1],
        "has_initial_state": [True, False, False],
    }
    with pytest.raises(InvalidInput, match="has no state_slots"):
        _ = AttentionMetadata.build(rows, block_size=4, num_blocks=16).states
