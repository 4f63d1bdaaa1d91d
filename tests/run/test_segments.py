"""Segments of packed rows on torch tensors of a CPU: results, gradients, and refusals that name the first bad token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.attention_cases import AttentionCase, assert_matches_reference
from tests.support.segment_cases import assert_padded_match, padded, padded_backward, random_segment_case, segment_case
from torch_core import ops
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec


@pytest.mark.parametrize("seed", range(12))
def test_results_and_gradients_of_a_random_problem_are_as_exact_as_torch(seed: int) -> None:
    case = random_segment_case(seed)
    call = padded_backward(case, ops.run)
    assert_padded_match(case, call, ops.run(call))


def test_segments_have_the_bits_of_the_same_offsets(seed: int) -> None:
    case = segment_case(seed, [[-2, 5, 3], [7, 2, -1]], head_size=16)
    starts = torch.tensor([0, 2, 7, 10, 17, 19, 20]).int()
    by_offsets = {**dict.fromkeys(("query_start_loc", "key_start_loc"), starts), "segment_ids": None}
    out = case.run(ops.attention)
    expected = case.run(ops.attention, **by_offsets)
    real = torch.from_numpy(case.options["segment_ids"] > 0)
    assert torch.equal(out[real], expected[real])
    assert not out[~real].any()


@pytest.mark.parametrize("rows", [[[-5]], [[-3, 2]], [[3], [-4], [2, -1]], [[1] * 9]])
def test_rows_may_be_padding_or_full(rows: list[list[int]], seed: int) -> None:
    case = segment_case(seed, rows)
    assert_matches_reference(case, *padded(case).run(ops.attention_with_lse))


def test_rows_without_tokens_have_no_segments() -> None:
    empty, ids = torch.zeros(0, 2, 16), torch.zeros(0).int()
    starts = torch.tensor([0, 0]).int()
    assert ops.attention(empty, empty, empty, starts, starts, max_query_len=4, segment_ids=ids).shape == (0, 2, 16)


def _refused(changes: dict[str, Any], message: str, error: type[Exception] = InvalidInput) -> None:
    case = segment_case(0, [[-2, 5, 3], [7, 3]])
    with pytest.raises(error, match=message):
        case.run(ops.attention, **changes)


IDS = torch.tensor([0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]).int()
BROKEN = IDS.clone()
BROKEN[9] = 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment_ids": IDS[:7]}, r"segment_ids has shape \[7\]; it must be \[num_tokens\] with num_tokens = 20"),
        ({"segment_ids": IDS[None]}, r"segment_ids has shape \[1, 20\]; it must have 1 axes: \[num_tokens\]"),
        ({"segment_ids": IDS.long()}, "segment_ids is int64; it must be int32"),
        ({"segment_ids": BROKEN}, r"segment_ids\[9\] is 1, an id that sequence 0 has before another one"),
        ({"max_segments": 1}, r"segment_ids has 4 segments in 2 sequences.*; pass max_segments=2"),
        ({"max_segments": 2.0}, "max_segments is 2.0; it must be a static int"),
        ({"max_segment_len": 6}, r"segment_ids\[10\] has 7 tokens of segment \d+, more than 6; raise max_segment_len"),
        ({"key_segment_ids": BROKEN}, r"key_segment_ids\[9\] is 1"),
        ({"segment_ids": None, "max_segments": 3}, "max_segments is given without segment_ids"),
        ({"key_start_loc": torch.tensor([0, 10, 19]).int()}, "key_start_loc differs from query_start_loc"),
        ({"segment_ids": IDS, "key_segment_ids": IDS + 1}, "differ at segment 1 of sequence 1"),
        ({"segment_ids": IDS, "key_segment_ids": IDS.clamp(max=1)}, "differ at segment 2 of sequence 0"),
    ],
)
def test_segments_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    _refused(changes, message)


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_causal": torch.ones(2).bool()},
        {"mm_prefix_range": torch.zeros(2, 1, 2).int()},
        {"qq_bias": torch.zeros(10, 10)},
        {"dropout_rate": 0.5, "dropout_seeds": torch.zeros(2, 6, 2).int()},
    ],
    ids=lambda changes: list(changes)[-1],
)
def test_arrays_of_whole_sequences_are_refused_beside_segments(changes: dict[str, Any]) -> None:
    _refused(changes, f"{[*changes][-1]} with segment_ids", Unsupported)


def test_keys_of_another_number_need_ids_of_their_own(seed: int) -> None:
    case = segment_case(seed, [[3, 2]], key_rows=[[4, 4]])
    with pytest.raises(InvalidInput, match="key_segment_ids is missing for 8 keys of 5 queries"):
        case.run(ops.attention, key_segment_ids=None)


def test_padding_between_segments_counts_as_two_of_them(seed: int) -> None:
    case = segment_case(seed, [[2, -1, 2, -1, 2, -1]])
    assert case.run(ops.attention, max_segments=5).isfinite().all()
    with pytest.raises(InvalidInput, match="pass max_segments=5"):
        case.run(ops.attention, max_segments=4)


@pytest.mark.parametrize("changes", [{"segment_ids": BROKEN}, {"max_segments": 1}, {"max_segment_len": 6}])
def test_where_values_are_unknown_rows_that_see_keys_are_nan(changes: dict[str, Any]) -> None:
    call: Any = replace(segment_case(0, [[-2, 5, 3], [7, 3]]).call(), **changes)
    assert call.for_kernels(torch).sinks.isnan().all()


def _plans(case: AttentionCase) -> list[Any]:
    call = case.call()
    return [plan_call(each.map(array_spec), DeviceLimits()) for each in (call, call.for_kernels(torch))]


def test_the_plan_of_specs_is_that_of_the_offsets(seed: int) -> None:
    case = segment_case(seed, [[40, 60], [80, 20]], key_rows=None, head_size=64, dtype="bfloat16", max_segment_len=80)
    of_specs, of_offsets = _plans(case)
    assert of_specs == of_offsets
    assert "segment_ids" not in dict(of_specs.inputs)
    assert dict(of_specs.inputs)["query_start_loc"].shape == (2 * 32 + 2 * 3 + 1,)


def test_long_sequences_have_room_for_a_segment_each_512_tokens() -> None:
    call = segment_case(0, [[4]]).call()
    sizes = [replace(call, max_query_len=longest).for_kernels(torch).num_seqs - 4 for longest in (4, 8192, 32768)]
    assert sizes == [4, 32, 64]
