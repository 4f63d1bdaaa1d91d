"""Further cache groups of a step: their tables and slots are those of a build of their own, in the same buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torch_core.base.errors import InvalidInput
from torch_core.cache import StepRow
from torch_core.metadata import (
    BlockTableCache,
    CommonAttentionMetadata,
    build_common_metadata,
    build_group_metadata,
    check_metadata,
    group_layout,
    metadata_layout,
)

POOL: dict[str, Any] = {"block_size": 4, "num_blocks": 200}
SIZES: dict[str, Any] = {"num_seqs": 6, "num_tokens": 64, "max_blocks": 9}


def step_of(rows: list[StepRow], num_groups: int) -> CommonAttentionMetadata:
    layout = metadata_layout(**SIZES, extra=group_layout(num_groups, **SIZES))
    return build_common_metadata(rows, layout=layout, cache_group=0, **POOL, **SIZES)


def row_of(rng: np.random.Generator, name: str, ids: list[int], *, decodes: bool) -> StepRow:
    computed, new = int(rng.integers(1, 25)), 1 if decodes else int(rng.integers(1, 10))
    width = -(-(computed + new) // 4)
    tables = tuple(tuple(ids.pop() for _ in range(width)) for _ in range(3))
    return StepRow(name, tables[0], computed, new, tables)


@pytest.mark.parametrize("decodes", [False, True])
def test_each_group_has_what_a_build_of_its_own_tables_gives(decodes, seed) -> None:
    rng = np.random.default_rng(seed)
    caches = [BlockTableCache() for _ in range(3)]
    for _ in range(10):
        ids = (1 + rng.permutation(199)).tolist()
        rows = [row_of(rng, str(index), ids, decodes=decodes) for index in range(5)]
        step = step_of(rows, 3)

        for group in (1, 2):
            found = build_group_metadata(step, rows, cache_group=group, table_cache=caches[group])
            own = build_common_metadata(rows, cache_group=group, **POOL, **SIZES)

            check_metadata(found)
            assert found.cache_group == group
            for name in ("block_tables", "slot_mapping", "seq_lens", "query_start_loc", "positions"):
                np.testing.assert_array_equal(getattr(found, name), getattr(own, name))
            assert np.shares_memory(found.block_tables, step.packed)


ROW = StepRow("a", (5, 2, 7), 8, 2, ((5, 2, 7), (0, 6, 3)))


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            ROW,
            {"cache_group": 1},
            "block_tables[0, 0] is the null block but tokens 0..3 are visible (sequence 'a').",
        ),
        (
            ROW,
            {"cache_group": 1, "window_left": 5},
            "block_tables[0, 0] is the null block but tokens 0..3 are inside the window (sequence 'a').",
        ),
        (
            ROW,
            {"cache_group": 2},
            (
                "cache_group is 2, but a row has no group_block_ids[2]; the rows come from an allocator with fewer "
                "cache groups."
            ),
        ),
        (ROW, {"cache_group": 3}, "name is 'block_tables 3'; the packed layout has "),
        (
            ROW._replace(group_block_ids=((5, 2, 7), (0, 6, 200))),
            {"cache_group": 1, "window_left": 3},
            "block_tables[0, 2] is 200; valid ids are 1..199 (pool of 200 blocks, 0 is the null block).",
        ),
    ],
)
def test_what_a_group_must_not_follow_is_refused(row, options, message) -> None:
    step = step_of([row], 3)

    with pytest.raises(InvalidInput) as error:
        build_group_metadata(step, [row], **options)

    assert str(error.value).startswith(message)


def test_a_step_without_a_buffer_has_no_room_for_groups() -> None:
    with pytest.raises(InvalidInput, match=r"^first has no layout: its arrays were given apart"):
        build_group_metadata(step_of([ROW], 2).unpadded(), [ROW], cache_group=1)
