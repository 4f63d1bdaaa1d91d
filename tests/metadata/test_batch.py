"""The order of a batch, its split into decodes and prefills, and the tokens that later layers still need."""

from __future__ import annotations

import re

import numpy as np
import pytest

from torch_core.base.errors import InvalidInput, RequestTooLong
from torch_core.metadata import (
    SequenceRow,
    build_common_metadata,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    split_prefill_chunks,
)


def refuses(message: str, error: type[Exception] = InvalidInput):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def batch(*lengths, **options):
    """One row for each (num_computed_tokens, num_new_tokens)."""
    rows = [SequenceRow([8 * i + k for k in range(1, 9)], *pair) for i, pair in enumerate(lengths)]
    return build_common_metadata(rows, block_size=4, num_blocks=128, **options)


def test_rows_that_can_be_read_once_only_are_refused():
    rows = (row for row in [SequenceRow([9], 0, 2)])
    with refuses("rows is a generator; it must be a list of SequenceRow."):
        build_common_metadata(rows, block_size=4, num_blocks=128)  # type: ignore[arg-type]


def test_reordered_random_batches_can_be_split(seed, random_rows):
    rng = np.random.default_rng(seed)
    for threshold in (1, 2, 4):
        rows = random_rows(rng, block_size=4, num_blocks=256)
        rows = [rows[index] for index in reorder_batch_to_split_decodes_and_prefills(rows, threshold)]
        is_decode = [row.num_computed_tokens > 0 and row.num_new_tokens <= threshold for row in rows]
        # Short prompts without a context are prefills in the order and decodes by length: leave them out.
        rows = [row for row in rows if row.num_computed_tokens > 0 or row.num_new_tokens > threshold]
        step = build_common_metadata(rows, block_size=4, num_blocks=256, num_seqs=len(rows) + 2)

        split = split_decodes_and_prefills(step, threshold)

        assert split.num_decodes == sum(is_decode)
        assert split.num_prefills == len(rows) - sum(is_decode)
        assert split.num_decode_tokens == sum(row.num_new_tokens for row in rows[: split.num_decodes])
        assert sum(split[2:]) == step.num_actual_tokens


def test_a_reorder_keeps_the_order_within_each_part():
    rows = [SequenceRow([1], 0, 9), SequenceRow([1], 3, 1), SequenceRow([1], 2, 5), SequenceRow([1], 4, 1)]

    assert reorder_batch_to_split_decodes_and_prefills(rows).tolist() == [1, 3, 2, 0]


def test_speculative_rows_are_decodes_under_a_higher_threshold():
    step = batch((4, 3), (5, 1), (0, 6))

    assert split_decodes_and_prefills(step, 3) == (2, 1, 4, 6)


def test_a_uniform_split_ends_at_the_first_other_length():
    step = batch((4, 3), (5, 3), (6, 1), (0, 6))

    assert split_decodes_and_prefills(step, 3, require_uniform=True) == (2, 2, 6, 7)


def test_a_batch_of_one_kind_has_an_empty_other_part():
    assert split_decodes_and_prefills(batch((4, 1), (5, 1))) == (2, 0, 2, 0)
    assert split_decodes_and_prefills(batch((0, 4), (0, 2))) == (0, 2, 0, 6)
    assert split_decodes_and_prefills(batch(num_seqs=3)) == (0, 0, 0, 0)


def test_padding_rows_count_for_no_part():
    assert split_decodes_and_prefills(batch((4, 1), (0, 3), num_seqs=8, num_tokens=16)) == (1, 1, 1, 3)


def test_a_decode_behind_a_prefill_is_refused():
    message = (
        "query_lens[1] is 1 after 4 of row 0; decodes (at most 1) come first. Order the rows with "
        "reorder_batch_to_split_decodes_and_prefills."
    )
    with refuses(message):
        split_decodes_and_prefills(batch((0, 4), (3, 1)))


def test_a_threshold_below_one_is_refused():
    with refuses("decode_threshold is 0; it must be an int of at least 1."):
        split_decodes_and_prefills(batch((4, 1)), 0)
    with refuses("decode_threshold is 0; it must be an int of at least 1."):
        reorder_batch_to_split_decodes_and_prefills([], 0)


def test_prefill_chunks_fill_the_workspace():
    assert split_prefill_chunks(np.array([5, 3, 8, 1]), 8, request_offset=2) == [(2, 4), (4, 5), (5, 6)]
    assert split_prefill_chunks(np.array([], int), 8) == []


def test_a_sequence_larger_than_the_workspace_is_refused():
    message = "seq_lens[1] is 9; the workspace holds 8 tokens. Split the prompt."
    with refuses(message, RequestTooLong):
        split_prefill_chunks(np.array([5, 9]), 8)


def test_fast_prefill_keeps_the_chosen_tokens_of_each_sequence():
    step = batch((2, 1), (0, 5), num_seqs=4, num_tokens=8)

    fast = make_kv_sharing_fast_prefill_common_attn_metadata(step, np.array([0, 4, 5]))

    assert fast.query_start_loc.tolist() == [0, 1, 3]
    assert fast.seq_lens.tolist() == [3, 5]
    assert fast.positions.tolist() == [2, 3, 4]
    assert fast.slot_mapping.tolist() == step.slot_mapping[[0, 4, 5]].tolist()
    assert (fast.num_actual_tokens, fast.max_query_len) == (3, 2)


def test_fast_prefill_refuses_other_choices():
    step = batch((2, 1), (0, 5))
    with refuses(
        "logits_indices do not choose the last tokens of row 1 (0 chosen); every sequence needs at least its last "
        "token, and no gaps."
    ):
        make_kv_sharing_fast_prefill_common_attn_metadata(step, np.array([0]))
    with refuses(
        "logits_indices do not choose the last tokens of row 1 (2 chosen); every sequence needs at least its last "
        "token, and no gaps."
    ):
        make_kv_sharing_fast_prefill_common_attn_metadata(step, np.array([0, 3, 5]))
    with refuses("logits_indices must rise strictly within 0..5; they begin with [0, 6] and end with 6."):
        make_kv_sharing_fast_prefill_common_attn_metadata(step, np.array([0, 6]))
