"""The short way for rows with equally many new tokens gives what the general way gives, element by element."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from torch_core.base.errors import InvalidInput
from torch_core.metadata import BlockTableCache, SequenceRow, build, build_common_metadata, check_metadata
from torch_core.metadata.check import check_written_blocks
from torch_core.metadata.rows import RowColumns, lengths_of

FIELDS = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping", "positions")
NUMBERS = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len")


class NamedRow(NamedTuple):
    seq_id: str
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    num_new_tokens: int
    group_block_ids: tuple[tuple[int, ...], ...]


def uniform_rows(rng: np.random.Generator, block_size: int, window_left: int | None) -> list[NamedRow]:
    """Rows with equally many new tokens; null blocks where a window has passed, some blocks more than needed."""
    count, new = int(rng.integers(1, 9)), int(rng.choice([1, 1, 2, 4, 5]))
    ids = rng.permutation(np.arange(1, 256)).tolist()
    rows = []
    for number in range(count):
        computed = int(rng.integers(0, 4 * block_size))
        needed = -(-(computed + new) // block_size)
        blocks = [ids.pop() for _ in range(needed + int(rng.integers(0, 2)))]
        if window_left is not None:
            passed = max(0, computed - window_left) // block_size
            blocks[:passed] = [0] * passed
        rows.append(NamedRow(f"r{number}", tuple(blocks), computed, new, (tuple(blocks),)))
    return rows


@pytest.fixture
def general_way(monkeypatch):
    def build_the_general_way(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(build, "lengths_of", lambda rows: lengths_of(rows)._replace(uniform=0))
            return build_common_metadata(*args, **options)

    return build_the_general_way


@pytest.mark.parametrize("window_left", [None, 3])
@pytest.mark.parametrize("kind", ["named tuples", "dataclasses", "cached", "one group of several"])
def test_the_short_way_equals_the_general_way(kind, window_left, general_way, seed):
    rng = np.random.default_rng(seed)
    caches = BlockTableCache(), BlockTableCache()
    for _ in range(60):
        block_size = int(rng.choice([1, 2, 4, 16]))
        rows = uniform_rows(rng, block_size, window_left)
        options = {
            "block_size": block_size,
            "num_blocks": 256,
            "window_left": window_left,
            "num_seqs": len(rows) + int(rng.integers(0, 3)),
            "num_tokens": sum(row.num_new_tokens for row in rows) + int(rng.integers(0, 4)),
            "max_blocks": max(len(row.block_ids) for row in rows) + int(rng.integers(0, 3)),
        }
        if kind == "dataclasses":
            rows = [SequenceRow(*row[1:4], seq_id=row.seq_id) for row in rows]
        if kind == "one group of several":
            options["cache_group"] = 0

        short = build_common_metadata(rows, **options, table_cache=caches[0] if kind == "cached" else None)
        general = general_way(rows, **options, table_cache=caches[1] if kind == "cached" else None)

        assert short.packed is not None
        assert general.packed is not None
        assert np.array_equal(short.packed, general.packed)
        for name in FIELDS:
            assert np.array_equal(getattr(short, name), getattr(general, name)), name
            assert getattr(short, name).dtype == np.int32
        assert [getattr(short, name) for name in NUMBERS] == [getattr(general, name) for name in NUMBERS]
        check_metadata(short, window_left=window_left)


@pytest.mark.parametrize("count", [1, 2, 200])
def test_lengths_of_uniform_rows(count):
    rows = [SequenceRow([], index, 3) for index in range(count)]
    found = lengths_of(RowColumns(rows))
    assert (found.num_new, found.longest_query, found.longest, found.uniform) == (3 * count, 3, count + 2, 3)


@pytest.mark.parametrize("bad", [-1, 1 << 31, 2.0, "3"])
@pytest.mark.parametrize("count", [1, 100])
def test_a_bad_length_in_a_uniform_batch_is_named(bad, count):
    rows = [SequenceRow([1], 0, 1) for _ in range(count)]
    rows[-1] = SequenceRow([1], bad, 1)
    with pytest.raises(InvalidInput, match=r"num_computed_tokens of sequence|of a sequence are 2147483649"):
        build_common_metadata(rows, block_size=4, num_blocks=8)


@pytest.mark.parametrize("bad", ["1", None, 1.0, 0, 1 << 40])
def test_a_bad_number_of_new_tokens_is_named_when_all_rows_have_it(bad):
    rows = [SequenceRow([1], 0, bad), SequenceRow([2], 0, bad)]
    with pytest.raises(InvalidInput, match=r"num_new_tokens of sequence 0 is|of a sequence are"):
        build_common_metadata(rows, block_size=4, num_blocks=8)


def test_rows_without_a_name_are_called_by_their_number():
    class Row:
        block_ids, num_computed_tokens, num_new_tokens = [9], 0, 1

    with pytest.raises(InvalidInput, match=r"block_tables\[0, 0\] is 9; .* Sequence 0 has 1 tokens"):
        build_common_metadata([Row()], block_size=4, num_blocks=8)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([SequenceRow([5], 0, 1), SequenceRow([5], 1, 1)], "block 5, which sequence 0 and sequence 1 would write"),
        ([SequenceRow([5, 6], 3, 2), SequenceRow([6], 0, 2)], "block 6, which sequence 0 and sequence 1 would write"),
        ([SequenceRow([5], 0, 1), SequenceRow([5, 6], 3, 2)], "block 5, which sequence 0 and sequence 1 would write"),
        ([SequenceRow([5, 5], 0, 8)], r"slot_mapping\[0\] and slot_mapping\[4\] are both 20"),
    ],
)
def test_a_block_that_two_tokens_would_write_is_refused(rows, message):
    with pytest.raises(InvalidInput, match=message):
        build_common_metadata(rows, block_size=4, num_blocks=8)


@pytest.mark.parametrize("query_lens", [[4], [1, 1, 1, 1], [2, 2]])
def test_tokens_without_a_slot_do_not_clash(query_lens):
    check_written_blocks(np.array([-1, -1, -1, 9], np.int32), np.array(query_lens), block_size=4)


def test_columns_of_named_tuples_equal_those_of_other_rows():
    named = [NamedRow("a", (1,), 0, 1, ((1,),)), NamedRow("b", (2, 3), 5, 2, ((2, 3),))]
    plain = [SequenceRow(*row[1:4], seq_id=row.seq_id) for row in named]
    for name in ("block_ids", "num_computed_tokens", "num_new_tokens", "seq_id"):
        assert RowColumns(named)[name] == RowColumns(plain)[name] == RowColumns([named[0], plain[1]])[name]
    assert RowColumns([]).seq_ids() == []
