"""What `check_metadata` finds in a record that the builder did not make, or that changed since."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from torch_core.base.errors import InvalidInput
from torch_core.metadata import SequenceRow, build_common_metadata, check_metadata


@pytest.fixture
def step():
    rows = [SequenceRow([5, 6], 3, 3, "a"), SequenceRow([9], 1, 1, "b")]
    return build_common_metadata(rows, block_size=4, num_blocks=16, num_seqs=4, num_tokens=6, max_blocks=3)


def changed(step, name, index, value):
    array = getattr(step, name).copy()
    array[index] = value
    return replace(step, **{name: array})


CHANGES = {
    "sum starts elsewhere": (
        ("query_start_loc", 0, 1),
        "query_start_loc[0] is 1; a running sum starts with 0.",
    ),
    "sum decreases": (
        ("query_start_loc", 2, 2),
        "query_start_loc[2] is 2 after 3; it cannot decrease (sequence 'b').",
    ),
    "row without a query": (
        ("query_start_loc", 2, 3),
        (
            "query_start_loc[2] equals query_start_loc[1] (3): sequence 'b' has no query. Leave it out of the step, or "
            "make it a padding row."
        ),
    ),
    "padding row with a query": (
        ("query_start_loc", 4, 5),
        "query_start_loc[4] is 5 after 4, but row 3 is padding (num_reqs is 2); padding rows repeat the last sum.",
    ),
    "sum ends elsewhere": (
        ("query_start_loc", slice(2, 5), 5),
        "query_start_loc[4] is 5; it must equal the number of new tokens, 4.",
    ),
    "empty sequence": (
        ("seq_lens", 1, 0),
        "seq_lens[1] is 0 for sequence 'b'; a sequence in a step has at least 1 token.",
    ),
    "negative length": (
        ("seq_lens", 0, -3),
        "seq_lens[0] is -3 for sequence 'a'; a sequence in a step has at least 1 token.",
    ),
    "query longer than the sequence": (
        ("seq_lens", 0, 2),
        "seq_lens[0] is 2 but its query has 3 tokens (sequence 'a'); seq_lens counts the new tokens too.",
    ),
    "padding row with a length": (
        ("seq_lens", 3, 7),
        "seq_lens[3] is 7, but row 3 is padding and must be 0.",
    ),
    "length beyond the bound": (
        ("seq_lens", 0, 8),
        "max_seq_len is 6, but row 0 has 8 tokens.",
    ),
    "id beyond the pool": (
        ("block_tables", (1, 0), 16),
        (
            "block_tables[1, 0] is 16; valid ids are 1..15 (pool of 16 blocks, 0 is the null block). Sequence 'b' has "
            "2 tokens and needs 1 blocks."
        ),
    ),
    "null block": (
        ("block_tables", (0, 1), 0),
        "block_tables[0, 1] is the null block but tokens 4..5 are visible (sequence 'a').",
    ),
    "stale tail": (
        ("block_tables", (0, 2), 7),
        (
            "block_tables[0, 2] is 7, beyond the 2 blocks of sequence 'a'; the builder leaves 0 there. The buffer "
            "still holds an older step."
        ),
    ),
    "stale padding row": (
        ("block_tables", (3, 0), 7),
        (
            "block_tables[3, 0] is 7, beyond the 0 blocks of padding row 3; the builder leaves 0 there. The buffer "
            "still holds an older step."
        ),
    ),
    "slot beyond the pool": (
        ("slot_mapping", 1, 64),
        "slot_mapping[1] is 64; slots are 4..63 (16 blocks of 4, block 0 is never written) or -1 for none.",
    ),
    "slot in the null block": (
        ("slot_mapping", 1, 3),
        "slot_mapping[1] is 3; slots are 4..63 (16 blocks of 4, block 0 is never written) or -1 for none.",
    ),
    "slot of padding": (
        ("slot_mapping", 5, 8),
        "slot_mapping[5] is 8, but token 5 is padding (num_actual_tokens is 4); it must be -1.",
    ),
    "slot elsewhere": (
        ("slot_mapping", 1, 25),
        "slot_mapping[1] is 25, but position 4 of sequence 'a' lies in slot 24 (block 6).",
    ),
    "position elsewhere": (
        ("positions", 3, 2),
        "positions[3] is 2; query_start_loc and seq_lens say 1 (sequence 'b').",
    ),
    "block read and written": (
        ("block_tables", (0, 0), 9),
        "slot_mapping[0] is 23, but position 3 of sequence 'a' lies in slot 39 (block 9).",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_entry_is_found_and_named(name, step):
    (field, index, value), message = CHANGES[name]

    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        check_metadata(changed(step, field, index, value), seq_ids=["a", "b"])


def test_int64_arrays_are_refused(step):
    with pytest.raises(InvalidInput, match=r"^seq_lens has dtype int64; int32 is required. Use seq_lens.astype\("):
        check_metadata(replace(step, seq_lens=step.seq_lens.astype(np.int64)))


def test_arrays_of_unequal_lengths_are_refused(step):
    with pytest.raises(InvalidInput, match=r"^query_start_loc has shape \(3,\); \(5,\) is required.$"):
        check_metadata(replace(step, query_start_loc=step.query_start_loc[:3]))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"num_reqs": 9}, "num_reqs is 9 of 4 rows and num_actual_tokens is 4 of 6 tokens"),
        ({"num_actual_tokens": 9}, "num_reqs is 2 of 4 rows and num_actual_tokens is 9 of 6 tokens"),
    ],
)
def test_more_sequences_than_rows_or_tokens_than_slots_are_refused(change, found, step):
    with pytest.raises(InvalidInput, match=f"^{re.escape(found)}; the arrays must hold them all.$"):
        check_metadata(replace(step, **change))


def test_a_table_without_room_for_its_sequence_is_refused(step):
    message = "seq_lens[0] is 6 (2 blocks of 4) but block_tables has 1 columns (sequence 'a')."
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        check_metadata(replace(step, block_tables=step.block_tables[:, :1]), seq_ids=["a", "b"])


def test_a_block_that_another_sequence_reads_may_not_be_written():
    rows = [SequenceRow([5, 6], 4, 2, "a"), SequenceRow([6, 7], 4, 1, "b")]
    step = build_common_metadata(rows, block_size=4, num_blocks=16)

    message = "block_tables[1, 0] is block 6, which sequence 'a' writes and sequence 'b' reads in one step"
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}; copy the block first.$"):
        check_metadata(step, seq_ids=["a", "b"])


def test_sequences_may_share_blocks_that_nobody_writes():
    rows = [SequenceRow([5, 6], 4, 2), SequenceRow([5, 7], 4, 1)]

    check_metadata(build_common_metadata(rows, block_size=4, num_blocks=16))


def test_a_written_block_with_two_holders_is_refused(step):
    counts = np.ones(16, np.int64)
    counts[9] = 2

    message = "slot_mapping[3] is 37 in block 9, which has 2 holders (sequence 1 writes it); copy the block first."
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        check_metadata(step, ref_counts=counts)


def test_a_block_twice_in_one_table_is_refused():
    step = build_common_metadata([SequenceRow([5, 5, 6], 8, 1)], block_size=4, num_blocks=16)

    message = r"^block_tables\[0\] holds block 5 twice \(sequence 0\); a sequence has each block once.$"
    with pytest.raises(InvalidInput, match=message):
        check_metadata(step)


def test_null_blocks_before_the_window_are_accepted():
    step = build_common_metadata([SequenceRow([0, 4, 6], 8, 1)], block_size=4, num_blocks=16, window_left=2)

    check_metadata(step, window_left=2)


def test_an_empty_running_sum_is_refused():
    from torch_core.metadata.check import check_query_start_loc

    with pytest.raises(InvalidInput, match=r"^query_start_loc is empty; it needs num_seqs \+ 1 entries, the first"):
        check_query_start_loc(np.empty(0, np.int32), 0)


def test_padding_tokens_write_nothing_and_clash_with_nothing():
    from torch_core.metadata.check import check_written_blocks

    slots, lens = np.array([-1, -1, 36, 37, 36], np.int32), np.array([2, 2, 1])
    check_written_blocks(slots[:4], np.array([2, 2]), block_size=4)

    message = (
        r"^slot_mapping\[4\] is in block 9, which sequence 1 and sequence 2 would write in one step; copy the tail"
    )
    with pytest.raises(InvalidInput, match=message):
        check_written_blocks(slots, lens, block_size=4)
