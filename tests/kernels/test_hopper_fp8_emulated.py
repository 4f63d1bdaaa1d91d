"""The fp8 Hopper prefill kernel's own source without a GPU: pages, windows, scales, tiles, chunks, poison, order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.attention_cases import AttentionCase, paged_case
from tests.support.emulated.run import run_emulated_operation
from tests.support.fp8_cases import assert_matches_fp8_weights, random_fp8_case, random_fp8_chunk_case
from torch_core.attention import hopper_prefill
from torch_core.attention.kernels.hopper_fp8.plan import hopper_fp8_launch
from torch_core.base.specs import AttentionSpec
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

# Few programs, so that each has several work items.
_FEW = DeviceLimits(num_sms=3)
_SIZES: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "dtype": "float8_e4m3fn"}


def _run(case: AttentionCase, seed: int, *, warpgroups: int = 2, **changes: Any) -> dict[str, torch.Tensor]:
    call = replace(case.call("cpu"), with_lse=True, **changes)
    plan = plan_call(call.map(array_spec), _FEW)
    assert plan.launches[0].name == "hopper_fp8_prefill_kernel"
    assert dict(plan.launches[0].constexprs)["WARPGROUPS"] == warpgroups
    return run_emulated_operation(plan, call.arrays(), seed)


def _check(case: AttentionCase, seed: int, **changes: Any) -> None:
    found = _run(case, seed, **changes)
    assert_matches_fp8_weights(case, found["out"], found["lse"])


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_a_random_problem_is_as_exact_as_torch_with_e4m3_weights(head_size: int, seed: int) -> None:
    _check(random_fp8_case(seed, head_size, small=True), seed)


@pytest.mark.nightly
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("draw", range(40))
def test_many_random_problems_are_as_exact_as_torch_with_e4m3_weights(head_size: int, draw: int, seed: int) -> None:
    _check(random_fp8_case(seed, head_size, small=draw % 8 > 0), seed)


def test_three_warpgroups_of_long_queries_give_the_bits_of_two(seed: int) -> None:
    case = random_fp8_case(seed, 64, small=True)
    # A size that is given keeps keys whole, which a planner may cut in one of the two calls alone.
    two = _run(case, seed, kv_chunk_size=2048)
    three = _run(case.with_longest_query(2048), seed, warpgroups=3, kv_chunk_size=2048)
    assert all(torch.equal(two[name], three[name]) for name in two)


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_a_row_that_sees_one_key_gives_its_value(head_size: int, seed: int) -> None:
    """One weight, a power of two, for each row, at every place of a tile: a key out of place would show."""
    spec = AttentionSpec(scale=1.0, window_left=0)
    case = paged_case(seed, seq_lens=[300], query_lens=[300], head_size=head_size, spec=spec, block_size=16, **_SIZES)
    exact, _ = case.expected()
    assert torch.equal(_run(case, seed)["out"], exact.bfloat16())


def test_what_lies_in_unused_slots_does_not_matter(seed: int) -> None:
    sizes = {"seq_lens": [333, 129], "query_lens": [200, 129], "head_size": 128, "block_size": 32, **_SIZES}
    clean, poisoned = (_run(paged_case(seed, poison=poison, **sizes), seed) for poison in (0.0, float("nan")))
    assert all(torch.equal(poisoned[name], clean[name]) for name in clean)


def test_the_order_in_which_warps_come_changes_no_bit(seed: int) -> None:
    case = random_fp8_case(seed, 128, small=True)
    first, second = (_run(case, seed + order) for order in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


def _check_chunks(case: AttentionCase, chunk: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_prefill, "hopper_chunk", lambda **_: chunk)
    call = replace(case.call("cpu"), with_lse=True)
    plan = plan_call.__wrapped__(call.map(array_spec), _FEW)
    assert [launch.name for launch in plan.launches] == ["hopper_fp8_prefill_kernel", "attention_combine_kernel"]
    found = run_emulated_operation(plan, call.arrays(), seed)
    assert_matches_fp8_weights(case, found["out"], found["lse"])


def test_few_tiles_over_many_keys_are_cut_into_chunks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_chunks(*random_fp8_chunk_case(seed, small=True), seed, monkeypatch)


@pytest.mark.nightly
def test_tiles_of_one_query_leave_their_chunks_beside_each_other(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = paged_case(seed, seq_lens=[300], query_lens=[150], head_size=64, block_size=16, **_SIZES)
    _check_chunks(case, 256, seed, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("draw", range(60))
def test_many_random_problems_are_cut_into_chunks(draw: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_chunks(*random_fp8_chunk_case(seed + draw, small=draw % 8 > 0), seed, monkeypatch)


@pytest.mark.parametrize("group", [2, 8])
def test_short_queries_may_have_the_heads_of_a_group_side_by_side(group: int, seed: int) -> None:
    case = paged_case(
        seed, seq_lens=[90, 300], query_lens=[0, 128 // group - 5], head_size=64, block_size=16,
        **{**_SIZES, "num_heads": group},
    )  # fmt: skip
    call = replace(case.call("cpu"), with_lse=True)
    plan = plan_call(call.map(array_spec), _FEW)
    launch = hopper_fp8_launch(call.map(array_spec), _FEW, min_query=1, pack=group)
    assert launch is not None
    found = run_emulated_operation(replace(plan, launches=(launch,), scratch=()), call.arrays(), seed)
    assert_matches_fp8_weights(case, found["out"], found["lse"])
