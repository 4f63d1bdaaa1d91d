"""What `build_common_metadata` computes, and what it refuses."""

from __future__ import annotations

import re
from array import array
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from torch_core.base.errors import InvalidInput, RequestTooLong
from torch_core.metadata import (
    BlockTableCache,
    SequenceRow,
    build_common_metadata,
    check_metadata,
    metadata_layout,
    tables,
)

FIELDS = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping", "positions")


def build(rows, **options):
    return build_common_metadata(rows, **{"block_size": 4, "num_blocks": 64, **options})


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "numpy", "cached"])
def test_random_batches_equal_the_naive_builder(kind, seed, naive_metadata, random_rows):
    rng = np.random.default_rng(seed)
    cache = BlockTableCache()
    for _ in range(60):
        block_size = int(rng.choice([1, 2, 4, 16]))
        rows = random_rows(rng, block_size=block_size, num_blocks=256)
        num_seqs = len(rows) + int(rng.integers(0, 3))
        num_tokens = sum(row.num_new_tokens for row in rows) + int(rng.integers(0, 5))
        width = max(len(row.block_ids) for row in rows) + int(rng.integers(0, 3))
        sizes = {"num_seqs": num_seqs, "num_tokens": num_tokens}
        expected = naive_metadata(rows, block_size=block_size, max_blocks=width, **sizes)
        make = {
            "list": list,
            "tuple": tuple,
            "array": lambda ids: array("i", ids),
            "numpy": lambda ids: np.array(ids, np.int32),
            "cached": tuple,
        }[kind]
        rows = [replace(row, block_ids=make(row.block_ids)) for row in rows]
        options = {"table_cache": cache} if kind == "cached" else {}

        found = build(rows, block_size=block_size, num_blocks=256, max_blocks=width, **sizes, **options)

        for name in FIELDS:
            array_found = getattr(found, name)
            assert array_found.dtype == np.int32
            assert array_found.tolist() == expected[name], name
        check_metadata(found)


def test_any_object_with_the_three_attributes_is_a_row():
    @dataclass
    class Plan:
        block_ids: list[int]
        num_computed_tokens: int
        num_new_tokens: int

    assert build([Plan([7], 0, 2)]).slot_mapping.tolist() == [28, 29]


def test_the_arrays_are_views_of_one_packed_buffer():
    step = build([SequenceRow([7, 3], 2, 4)], num_seqs=2, num_tokens=8, max_blocks=3)

    assert step.layout is not None
    assert step.packed is not None
    unpacked = step.layout.unpack(step.packed)

    for name in FIELDS:
        assert np.shares_memory(getattr(step, name), step.packed)
        assert unpacked[name].tolist() == getattr(step, name).tolist()


def test_the_arrays_and_the_record_cannot_be_changed():
    step = build([SequenceRow([7], 0, 1)])

    with pytest.raises(ValueError, match="read-only"):
        step.seq_lens[0] = 9
    with pytest.raises(FrozenInstanceError):
        step.num_reqs = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_extra_fields_of_the_layout_travel_in_the_same_buffer():
    layout = metadata_layout(num_seqs=1, num_tokens=2, max_blocks=1, extra=[("token_ids", (2,))])
    buffer = np.full(layout.num_elements, 77, np.int32)

    step = build([SequenceRow([7], 0, 2)], layout=layout, buffer=buffer, num_seqs=1, num_tokens=2, max_blocks=1)

    assert step.packed is buffer
    assert layout["token_ids"].of(buffer).tolist() == [77, 77]


def test_a_reused_buffer_keeps_nothing_of_the_step_before():
    layout = metadata_layout(num_seqs=4, num_tokens=16, max_blocks=6)
    sizes = {"num_seqs": 4, "num_tokens": 16, "max_blocks": 6, "layout": layout}
    dirty = np.full(layout.num_elements, 12345, np.int32)
    rows = [SequenceRow([7, 9], 3, 2)]

    reused, fresh = build(rows, buffer=dirty, **sizes), build(rows, **sizes)

    for name in FIELDS:
        assert getattr(reused, name).tolist() == getattr(fresh, name).tolist()


def test_an_empty_step_is_all_padding():
    step = build([], num_seqs=2, num_tokens=2, max_blocks=1)

    assert (step.num_reqs, step.num_actual_tokens, step.max_query_len, step.max_seq_len) == (0, 0, 0, 0)
    assert step.slot_mapping.tolist() == [-1, -1]
    assert step.query_start_loc.tolist() == [0, 0, 0]
    check_metadata(step)


def test_unpadded_drops_padding_and_keeps_the_numbers():
    step = build([SequenceRow([7, 8], 3, 2), SequenceRow([9], 0, 1)], num_seqs=4, num_tokens=8)

    plain = step.unpadded()

    assert plain.seq_lens.tolist() == [5, 1]
    assert plain.query_start_loc.tolist() == [0, 2, 3]
    assert plain.slot_mapping.tolist() == [31, 32, 36]
    assert plain.encoder_seq_lens is None
    assert plain.packed is None
    assert plain.unpadded() is plain
    check_metadata(plain)


def test_unpadded_to_fewer_sequences_keeps_the_first_ones():
    step = build([SequenceRow([7, 8], 3, 2), SequenceRow([9], 0, 1)], num_seqs=4, num_tokens=8)

    first = step.unpadded(2, 1)

    assert (first.num_reqs, first.num_actual_tokens) == (1, 2)
    assert first.query_start_loc.tolist() == [0, 2]
    assert first.slot_mapping.tolist() == [31, 32]
    check_metadata(first)
    assert step.unpadded(num_actual_tokens=3, num_actual_reqs=2).slot_mapping.tolist() == [31, 32, 36]
    with pytest.raises(InvalidInput, match=r"^num_actual_reqs is 3; the batch has 2 sequences\.$"):
        step.unpadded(3, 3)
    with pytest.raises(InvalidInput, match=r"^num_actual_tokens is 3; the first 1 sequences have 2\.$"):
        step.unpadded(3, 1)


def test_num_computed_tokens_are_the_lengths_before_the_step():
    step = build([SequenceRow([7, 8], 3, 2), SequenceRow([9], 0, 1)], num_seqs=3)

    assert step.compute_num_computed_tokens().tolist() == [3, 0, 0]


def test_static_bounds_replace_the_true_maxima():
    step = build([SequenceRow([7, 8], 3, 2)], max_query_len=8, max_seq_len=64)

    assert (step.max_query_len, step.max_seq_len) == (8, 64)


def test_null_blocks_before_the_window_are_accepted():
    step = build([SequenceRow([0, 4, 5], 8, 2)], window_left=3)

    assert step.slot_mapping.tolist() == [20, 21]


@pytest.mark.parametrize("ids", [[7, 8, 9], (7, 8, 9), array("i", [7, 8, 9]), np.array([7, 8, 9], np.int32)])
@pytest.mark.parametrize("table_cache", [None, BlockTableCache()])
def test_unused_blocks_at_the_end_of_a_row_are_left_out_of_the_table(ids, table_cache):
    step = build([SequenceRow(ids, 0, 3, "a")], max_blocks=2, table_cache=table_cache)

    assert step.block_tables.tolist() == [[7, 0]]


def test_rows_of_several_cache_groups_give_the_table_of_the_chosen_group():
    rows = [GroupedRow("a", (5,), 0, 3, ((5,), (8, 9)))]

    first, second = build(rows, cache_group=0), build(rows, cache_group=1, block_size=2)

    assert (first.block_tables.tolist(), first.cache_group) == ([[5]], 0)
    assert (second.block_tables.tolist(), second.cache_group) == ([[8, 9]], 1)


class GroupedRow(NamedTuple):
    seq_id: str
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    num_new_tokens: int
    group_block_ids: tuple[tuple[int, ...], ...]


BAD = {
    "id beyond the pool": (
        [SequenceRow([1], 0, 1), SequenceRow([2, 99], 3, 2, "r12")],
        {},
        InvalidInput,
        (
            "block_tables[1, 1] is 99; valid ids are 1..63 (pool of 64 blocks, 0 is the null block). Sequence 'r12' "
            "has 5 tokens and needs 2 blocks."
        ),
    ),
    "negative id": (
        [SequenceRow([2, -1], 3, 2)],
        {},
        InvalidInput,
        (
            "block_tables[0, 1] is -1; valid ids are 1..63 (pool of 64 blocks, 0 is the null block). Sequence 0 has 5 "
            "tokens and needs 2 blocks. -1 may appear only after column 1."
        ),
    ),
    "null block": (
        [SequenceRow([2, 0, 3], 8, 2, "r3")],
        {},
        InvalidInput,
        "block_tables[0, 1] is the null block but tokens 4..7 are visible (sequence 'r3').",
    ),
    "null block inside the window": (
        [SequenceRow([0, 0, 3], 8, 2)],
        {"window_left": 4},
        InvalidInput,
        "block_tables[0, 1] is the null block but tokens 4..7 are inside the window (sequence 0).",
    ),
    "table too narrow": (
        [SequenceRow([1], 0, 1), SequenceRow([2, 3, 4], 8, 2, "r4")],
        {"max_blocks": 2},
        RequestTooLong,
        (
            "seq_lens[1] is 10 (3 blocks of 4) but block_tables has 2 columns (max_blocks) for sequence 'r4'. Widen "
            "the table or end the sequence."
        ),
    ),
    "too few blocks": (
        [SequenceRow([2], 3, 2, "r5")],
        {},
        InvalidInput,
        "block_ids of sequence 'r5' has 1 blocks; its 5 tokens need 2 blocks of 4. Allocate before building.",
    ),
    "two writers of one block": (
        [SequenceRow([9], 1, 1, "r12"), SequenceRow([9], 2, 1, "r15")],
        {},
        InvalidInput,
        (
            "slot_mapping[1] is in block 9, which sequence 'r12' and sequence 'r15' would write in one step; copy the "
            "tail before a fork writes it."
        ),
    ),
    "two writers of one block in a prefill": (
        [SequenceRow([8, 9], 0, 6), SequenceRow([9], 2, 1)],
        {},
        InvalidInput,
        (
            "slot_mapping[6] is in block 9, which sequence 0 and sequence 1 would write in one step; copy the tail "
            "before a fork writes it."
        ),
    ),
    "one block twice in a table": (
        [SequenceRow([9, 9], 0, 8)],
        {},
        InvalidInput,
        "slot_mapping[0] and slot_mapping[4] are both 36 (sequence 0); its table holds block 9 twice.",
    ),
    "no new token": (
        [SequenceRow([9], 1, 0, "r1")],
        {},
        InvalidInput,
        (
            "num_new_tokens of sequence 'r1' is 0; it must be at least 1. Leave a sequence that does nothing out of "
            "the step."
        ),
    ),
    "negative computed": (
        [SequenceRow([9], -1, 2)],
        {},
        InvalidInput,
        (
            "num_computed_tokens of sequence 0 is -1; it must be at least 0. Leave a sequence that does nothing out of "
            "the step."
        ),
    ),
    "float length": (
        [SequenceRow([9], cast(Any, 1.5), 2)],
        {},
        InvalidInput,
        "num_computed_tokens of sequence 0 is 1.5; it must be an int up to 2147483647.",
    ),
    "huge length": (
        [SequenceRow([9], 0, 1), SequenceRow([9], 1 << 70, 2)],
        {},
        InvalidInput,
        f"num_computed_tokens of sequence 1 is {1 << 70}; it must be an int up to 2147483647.",
    ),
    "length beyond int32": (
        [SequenceRow([9], (1 << 31) - 1, 2)],
        {},
        InvalidInput,
        "num_new_tokens and num_computed_tokens of a sequence are 2147483649; int32 metadata allow 2147483647.",
    ),
    "float ids": (
        [SequenceRow(cast(Any, [9.0]), 0, 2)],
        {},
        InvalidInput,
        (
            "block_ids of sequence 0 holds something that is not an int32 block id ('float' object cannot be "
            "interpreted as an integer)."
        ),
    ),
    "int64 ids": (
        [SequenceRow(cast(Any, np.array([9])), 0, 2, "r1")],
        {},
        InvalidInput,
        (
            "block_ids of sequence 'r1' has dtype int64 and rank 1; int32 of rank 1 is required. Use "
            "block_ids.astype(np.int32)."
        ),
    ),
    "too many sequences": (
        [SequenceRow([9], 0, 2), SequenceRow([8], 0, 2)],
        {"num_seqs": 1},
        RequestTooLong,
        "num_seqs is 1, but the step has 2 rows. Pad to a larger bucket.",
    ),
    "too many tokens": (
        [SequenceRow([9], 0, 2)],
        {"num_tokens": 1},
        RequestTooLong,
        "num_tokens is 1, but the step has 2 new tokens. Pad to a larger bucket.",
    ),
    "query beyond its bound": (
        [SequenceRow([9], 0, 2)],
        {"max_query_len": 1},
        RequestTooLong,
        "max_query_len is 1, but the step has 2 new tokens in its longest row. Pad to a larger bucket.",
    ),
    "sequence beyond its bound": (
        [SequenceRow([9], 1, 2)],
        {"max_seq_len": 2},
        RequestTooLong,
        "max_seq_len is 2, but the step has 3 tokens in its longest sequence. Pad to a larger bucket.",
    ),
    "block size": (
        [],
        {"block_size": 0},
        InvalidInput,
        "block_size is 0; it must be at least 1.",
    ),
    "block size that is no int": (
        [SequenceRow([9], 0, 2)],
        {"block_size": 4.0},
        InvalidInput,
        "block_size is 4.0; it must be an int.",
    ),
    "bound that is no int": (
        [SequenceRow([9], 0, 2)],
        {"max_query_len": 2.5},
        InvalidInput,
        "max_query_len is 2.5; it must be an int, or None.",
    ),
    "width that is no int": (
        [SequenceRow([9], 0, 2)],
        {"max_blocks": "2"},
        InvalidInput,
        "max_blocks is '2'; it must be an int, or None.",
    ),
    "pool of one block": (
        [],
        {"num_blocks": 1},
        InvalidInput,
        "num_blocks is 1; it must be at least 2, since block 0 is the null block.",
    ),
    "pool beyond int32 slots": (
        [],
        {"num_blocks": 1 << 30},
        InvalidInput,
        "num_blocks * block_size is 4294967296; int32 slots allow at most 2147483647.",
    ),
    "too few blocks in a cached table": (
        [SequenceRow((5,), 3, 2, "a")],
        {"table_cache": BlockTableCache()},
        InvalidInput,
        "block_ids of sequence 'a' has 1 blocks; its 5 tokens need 2 blocks of 4. Allocate before building.",
    ),
    "a group that the rows lack": (
        [GroupedRow("a", (5,), 0, 3, ((5,),))],
        {"cache_group": 1},
        InvalidInput,
        (
            "cache_group is 1, but a row has no group_block_ids[1]; the rows come from an allocator with fewer cache "
            "groups."
        ),
    ),
    "a table cache for rows without names": (
        [SequenceRow((5,), 0, 3)],
        {"table_cache": BlockTableCache()},
        InvalidInput,
        ("seq_ids of 1 rows are 0 names; a table cache needs one for each. Leave table_cache out otherwise."),
    ),
    "a float id in a cached table": (
        [SequenceRow(cast(Any, (5.0,)), 0, 3, "a")],
        {"table_cache": BlockTableCache()},
        InvalidInput,
        (
            "block_ids of sequence 'a' holds something that is not an int32 block id ('float' object cannot be "
            "interpreted as an integer)."
        ),
    ),
    "a pair as a row": (
        [SequenceRow([9], 0, 2), ([8], 0, 2)],
        {},
        InvalidInput,
        "rows[1] is a tuple; a SequenceRow has block_ids, num_computed_tokens, num_new_tokens; build one.",
    ),
    "a row without a list": (
        SequenceRow([9], 0, 2),
        {},
        InvalidInput,
        "rows is a SequenceRow; it must be a list of SequenceRow.",
    ),
    "layout of another bucket": (
        [SequenceRow([9], 0, 2)],
        {"layout": metadata_layout(num_seqs=2, num_tokens=4, max_blocks=1)},
        InvalidInput,
        (
            "layout is for 2 sequences, 4 tokens and 1 blocks; the step is padded to 1, 2 and 1. Pass its sizes as "
            "num_seqs, num_tokens and max_blocks."
        ),
    ),
    "short buffer": (
        [SequenceRow([9], 0, 2)],
        {"buffer": np.zeros(3, np.int32)},
        InvalidInput,
        "buffer is int32[3]; this layout needs int32[160].",
    ),
    "read-only buffer": (
        [SequenceRow([9], 0, 2)],
        {"buffer": np.broadcast_to(np.int32(0), (160,))},
        InvalidInput,
        "buffer is strided or read-only; give a contiguous, writeable array.",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_its_message(name):
    rows, options, error, message = BAD[name]

    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        build(rows, **options)


def test_building_256_decoding_sequences_does_not_convert_every_id(monkeypatch):
    ids = np.random.default_rng(0).permutation(np.arange(1, 256 * 256 + 1)).tolist()
    rows = [SequenceRow(tuple(ids[256 * i : 256 * (i + 1)]), 4093, 1, f"r{i}") for i in range(256)]
    options = {"block_size": 16, "num_blocks": 256 * 257 + 1, "table_cache": BlockTableCache()}
    build(rows, **options)
    converted = []
    monkeypatch.setattr(tables, "array", lambda code, ids: converted.extend(ids) or array(code, ids))

    build([replace(row, num_computed_tokens=4094) for row in rows], **options)
    assert converted == []
    grown = [replace(row, block_ids=(*row.block_ids, 65_537 + i, 65_793 + i)) for i, row in enumerate(rows[:2])]
    step = build([*grown, *rows[2:]], **options)
    assert converted == [65_537, 65_793, 65_538, 65_794]
    check_metadata(step)


@pytest.mark.parametrize("changed", [(5, 64), (5, -1), (64, 6), (5, 0, 7), (0, 6)])
@pytest.mark.parametrize("earlier", [(5,), (5, 6), (9, 8, 7)])
def test_a_bad_id_in_a_table_that_changed_is_found_with_a_cache_too(earlier, changed):
    cache = BlockTableCache()
    build([SequenceRow(earlier, 0, 1, "a")], table_cache=cache)
    with pytest.raises(InvalidInput, match=r"^block_tables\[0, [01]\] is"):
        build([SequenceRow(changed, 4 * len(changed) - 1, 1, "a")], table_cache=cache)


def test_a_cache_of_tables_may_serve_a_smaller_pool():
    cache = BlockTableCache()
    row = SequenceRow((5, 63), 7, 1, "a")
    build([row], table_cache=cache)
    with pytest.raises(InvalidInput, match=r"^block_tables\[0, 1\] is 63; valid ids are 1..62"):
        build([row], table_cache=cache, num_blocks=63)


def test_rows_that_come_with_columns_are_not_read_one_by_one():
    class Rows(tuple):
        columns: dict

    rows = Rows((object(), object()))
    rows.columns = {"block_ids": [(7, 3), (5,)], "num_computed_tokens": [2, 0], "num_new_tokens": (4, 3)}

    step = build(rows)

    expected = build([SequenceRow((7, 3), 2, 4), SequenceRow((5,), 0, 3)])
    for name in FIELDS:
        assert np.array_equal(getattr(step, name), getattr(expected, name))
