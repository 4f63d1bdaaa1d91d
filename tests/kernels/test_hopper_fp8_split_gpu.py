"""The fp8 Hopper prefill kernel over keys in chunks, and with heads side by side, on a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.attention_cases import AttentionCase, paged_case
from tests.support.fp8_cases import assert_matches_fp8_weights, random_fp8_chunk_case
from torch_core.attention import hopper_prefill
from torch_core.attention.kernels.hopper_fp8.plan import hopper_fp8_launch
from torch_core.base.specs import AttentionSpec
from torch_core.launch.launcher import device_limits, run_operation
from torch_core.launch.plan import OperationPlan
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

pytestmark = pytest.mark.gpu

_IN_CHUNKS = ["hopper_fp8_prefill_kernel", "attention_combine_kernel"]
_SIZES: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "dtype": "float8_e4m3fn", "block_size": 16}
_SCALES: dict[str, Any] = {"q_scale": 0.5, "k_scale": 2.5, "v_scale": 0.25}


def _plan(case: AttentionCase) -> OperationPlan:
    call = replace(case.call("cuda"), with_lse=True)
    # Not from the cache of plans: tests change what the plan chooses.
    return plan_call.__wrapped__(call.map(array_spec), device_limits(torch.device("cuda", 0)))


def _run(case: AttentionCase, plan: OperationPlan) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = case.call("cuda").arrays()
    results = run_operation(plan, {name: tensors[name] for name, _ in plan.inputs})
    return results["out"], results["lse"]


def _check_chunks(case: AttentionCase, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_prefill, "hopper_chunk", lambda **_: chunk)
    plan = _plan(case)
    assert [launch.name for launch in plan.launches] == _IN_CHUNKS
    assert_matches_fp8_weights(case, *_run(case, plan))


@pytest.mark.parametrize("seed", range(60))
def test_a_random_problem_in_chunks_is_as_exact_as_torch_with_e4m3_weights(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_chunks(*random_fp8_chunk_case(seed), monkeypatch)


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("chunk", [128, 256])
def test_lengths_around_the_end_of_a_chunk(
    chunk: int, edge: int, head_size: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = paged_case(
        seed, seq_lens=[chunk + edge, 3 * chunk + edge, chunk // 2, 0], query_lens=[100, 70, 1, 0],
        head_size=head_size, **_SIZES, **_SCALES,
    )  # fmt: skip
    _check_chunks(case, chunk, monkeypatch)


@pytest.mark.parametrize("window", [0, 100, 128, 300])
def test_a_window_that_starts_inside_a_chunk(window: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(scale=0.09, window_left=window)
    case = paged_case(
        seed, seq_lens=[900, 401, 127], query_lens=[127, 70, 20], head_size=128, spec=spec, padding_tokens=7, **_SIZES
    )
    _check_chunks(case, 256, monkeypatch)


@pytest.mark.parametrize("query_len", [40, 100, 200])
def test_what_the_planner_splits_is_as_exact_and_has_the_same_bits_again(query_len: int, seed: int) -> None:
    case = paged_case(seed, seq_lens=[2100], query_lens=[query_len], head_size=128, **_SIZES)
    plan = _plan(case)
    assert [launch.name for launch in plan.launches] == _IN_CHUNKS
    out, lse = _run(case, plan)
    assert_matches_fp8_weights(case, out, lse)
    again, lse_again = _run(case, plan)
    assert torch.equal(out.view(torch.int16), again.view(torch.int16))
    assert torch.equal(lse, lse_again)


@pytest.mark.parametrize("poison", [0.0, float("nan")])
def test_what_lies_in_unused_slots_does_not_matter(poison: float, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = paged_case(
        seed, seq_lens=[700, 333, 129], query_lens=[90, 70, 66], head_size=128, poison=poison, **_SIZES, **_SCALES
    )
    _check_chunks(case, 256, monkeypatch)


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("group", [2, 8, 16])
def test_short_queries_may_have_the_heads_of_a_group_side_by_side(group: int, head_size: int, seed: int) -> None:
    sizes: dict[str, Any] = {**_SIZES, "num_heads": 2 * group}
    case = paged_case(
        seed, seq_lens=[90, 600, 7], query_lens=[0, 100, 3], head_size=head_size, padding_tokens=5, **sizes, **_SCALES
    )
    plan = _plan(case)
    call = replace(case.call("cuda"), with_lse=True).map(array_spec)
    launch = hopper_fp8_launch(call, device_limits(torch.device("cuda", 0)), min_query=1, pack=group)
    assert launch is not None
    assert_matches_fp8_weights(case, *_run(case, replace(plan, launches=(launch,), scratch=())))


@pytest.mark.parametrize("query_len", [8, 16, 40])
def test_many_short_queries_are_packed_by_the_planner(query_len: int, seed: int) -> None:
    sizes: dict[str, Any] = {**_SIZES, "num_heads": 32, "num_kv_heads": 8}
    seq_lens = [900 - 13 * i for i in range(56)]
    case = paged_case(seed, seq_lens=seq_lens, query_lens=[query_len] * 56, head_size=128, **sizes, **_SCALES)
    plan = _plan(case)
    assert [(launch.name, dict(launch.constexprs)["PACK"]) for launch in plan.launches] == [(_IN_CHUNKS[0], 4)]
    assert_matches_fp8_weights(case, *_run(case, plan))
