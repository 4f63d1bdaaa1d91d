"""Buckets, layouts, slots and the persistent table."""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import pytest
import torch

from torch_core.base.errors import InvalidInput, RequestTooLong
from torch_core.metadata import (
    BlockTableCache,
    Buckets,
    PackedLayout,
    metadata_layout,
)
from torch_core.metadata.slots import write_slots


def refuses(message: str, error: type[Exception] = InvalidInput):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def test_a_value_is_padded_to_the_next_bucket():
    buckets = Buckets("num_seqs", (1, 4, 6))

    assert [buckets.pad(value) for value in (0, 1, 2, 4, 5, 6)] == [1, 1, 4, 4, 6, 6]
    assert buckets.largest == 6


def test_powers_of_two_end_with_the_largest_size():
    assert Buckets.powers_of_two("x", 48, smallest=3).sizes == (4, 8, 16, 32, 48)
    assert Buckets.powers_of_two("x", 1).sizes == (1,)


def test_a_value_beyond_the_largest_bucket_is_refused():
    message = "num_seqs is 9; the largest bucket is 8. Split the step, or configure a larger bucket."
    with refuses(message, RequestTooLong):
        Buckets.powers_of_two("num_seqs", 8).pad(9)


def test_a_negative_value_is_refused():
    with refuses("value is -1; it cannot be negative."):
        Buckets("value", (1, 2)).pad(-1)


def test_bucket_lists_must_increase():
    with refuses("sizes[1] of x is 2 after 2; sizes must be ints that are positive and strictly increasing."):
        Buckets("x", (2, 2))
    with refuses("sizes[0] of x is True after 0; sizes must be ints that are positive and strictly increasing."):
        Buckets("x", (True,))
    with refuses("sizes is (); the buckets of x must be at least one."):
        Buckets("x", ())


def test_powers_of_two_need_positive_ends():
    with refuses("The largest bucket of x is 0; it must be an int of at least 1."):
        Buckets.powers_of_two("x", 0)
    with refuses("The smallest bucket of x is 0; it must be an int of at least 1."):
        Buckets.powers_of_two("x", 4, smallest=0)


def test_fields_are_aligned_and_do_not_overlap():
    layout = metadata_layout(num_seqs=3, num_tokens=5, max_blocks=7, extra=[("token_ids", (5,)), ("one", ())])

    end = 0
    for entry in layout.fields:
        assert entry.offset % 32 == 0
        assert entry.offset >= end
        end = entry.offset + entry.size
    assert end <= layout.num_elements
    assert "token_ids" in layout
    assert hash(layout) == hash(metadata_layout(num_seqs=3, num_tokens=5, max_blocks=7, extra=layout_extra()))


def layout_extra():
    return [("token_ids", (5,)), ("one", ())]


def test_one_layout_unpacks_numpy_and_torch_alike():
    layout = metadata_layout(num_seqs=2, num_tokens=3, max_blocks=2)
    buffer = np.arange(layout.num_elements, dtype=np.int32)

    from_numpy, from_torch = layout.unpack(buffer), layout.unpack(torch.from_numpy(buffer))

    for name, value in from_numpy.items():
        assert from_torch[name].tolist() == value.tolist()


def test_layout_mistakes_are_refused():
    with refuses("shapes names 'a' twice; names must differ."):
        PackedLayout.of_shapes([("a", (1,)), ("a", (2,))])
    with refuses("shapes gives 'a' the shape (-1,); sizes cannot be negative."):
        PackedLayout.of_shapes([("a", (-1,))])
    layout = PackedLayout.of_shapes([("a", (1,)), ("b", (1,))])
    with refuses("name is 'c'; the packed layout has a, b."):
        layout["c"]
    message = "buffer has shape (3,); this layout needs (64,). It was packed for other sizes."
    with refuses(message):
        layout.unpack(np.zeros(3, np.int32))


def test_a_row_without_tokens_gets_no_slots():
    tables, slots = np.array([[3], [5]], np.int32), np.empty(3, np.int32)

    positions = write_slots(slots, np.array([0, 0, 2], np.int32), np.array([1, 0], np.int32), tables, block_size=4)

    assert slots.tolist() == [20, 21, -1]
    assert positions.tolist() == [0, 1]


def converted(cache, seq_ids, tables):
    rows, lens = cache.convert(seq_ids, tables)
    assert all((row[count:] == 0).all() for row, count in zip(rows, lens, strict=True))
    return [row[:count].tolist() for row, count in zip(rows, lens, strict=True)]


def test_tables_that_come_back_in_another_order_are_found_again(monkeypatch):
    cache, first, second = BlockTableCache(), (5, 6), (7,)
    converted(cache, ["a", "b"], [first, second])
    updated = []
    monkeypatch.setattr(BlockTableCache, "_update", lambda self, index, table: updated.append(index))

    assert converted(cache, ["b", "a"], [second, first]) == [[7], [5, 6]]
    assert updated == []


def test_a_table_that_grew_shrank_or_changed_is_converted_anew():
    cache = BlockTableCache()

    found = [converted(cache, ["a"], [table]) for table in [(5, 6), (5, 6, 7), (5, 9, 7), (5,), (5, 1), ()]]

    assert found == [[[5, 6]], [[5, 6, 7]], [[5, 9, 7]], [[5]], [[5, 1]], [[]]]


def test_a_list_is_never_remembered_because_it_may_change():
    cache, table = BlockTableCache(), [5, 6]
    converted(cache, ["a"], [table])
    table[0] = 9

    assert converted(cache, ["a"], [table]) == [[9, 6]]


def test_a_sequence_that_left_the_step_is_forgotten():
    cache = BlockTableCache()
    converted(cache, ["a", "b"], [(5, 6, 7), (8,)])

    assert converted(cache, ["b"], [(8,)]) == [[8]]
    assert converted(cache, ["a", "b"], [(5,), (8, 9)]) == [[5], [8, 9]]


def test_a_bad_id_leaves_the_cache_in_order():
    cache = BlockTableCache()
    converted(cache, ["a", "b"], [(5,), (6,)])
    with pytest.raises(TypeError):
        cache.convert(["a", "b"], cast(Any, [(5, 7), (6, 0.5)]))

    assert converted(cache, ["a", "b"], [(5, 7, 8), (6, 1)]) == [[5, 7, 8], [6, 1]]


class _Interrupt:
    """A lengths array that is interrupted when it is written."""

    def __init__(self, values):
        self.values = values

    def __getitem__(self, index):
        return self.values[index]

    def __setitem__(self, index, value):
        raise KeyboardInterrupt


@pytest.mark.parametrize("changed", [(5, 6, 7, 8, 9), (5, 6, 7, 8), (4,)])
def test_a_table_whose_conversion_was_interrupted_is_converted_again(changed):
    cache, table = BlockTableCache(), (5, 6, 7)
    converted(cache, ["a"], [table])
    lens, cache._lens = cache._lens, cast(Any, _Interrupt(cache._lens))
    with pytest.raises(KeyboardInterrupt):
        cache.convert(["a"], [changed])
    cache._lens = lens

    assert converted(cache, ["a"], [table]) == [[5, 6, 7]]


def test_random_histories_of_tables_equal_a_conversion_from_scratch(seed):
    rng, cache, known = np.random.default_rng(seed), BlockTableCache(), {}
    for _ in range(200):
        names = [f"r{i}" for i in rng.permutation(6)[: int(rng.integers(1, 7))]]
        for name in names:
            table = known.get(name, ())
            if rng.random() < 0.3:
                cut = int(rng.integers(0, len(table) + 1)) if rng.random() < 0.3 else len(table)
                known[name] = table[:cut] + tuple(rng.integers(1, 99, int(rng.integers(0, 4))).tolist())
            else:
                known[name] = table
        assert converted(cache, names, [known[name] for name in names]) == [list(known[name]) for name in names]
