"""The Hopper prefill kernel over keys in chunks, on a CUDA device, next to the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import AttentionCase, assert_matches_reference, paged_case
from torch_core.attention import hopper_prefill
from torch_core.base.specs import AttentionSpec
from torch_core.launch.launcher import device_limits, run_operation
from torch_core.launch.plan import OperationPlan
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

pytestmark = pytest.mark.gpu

_SIZES: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16"}


def _plan(case: AttentionCase) -> OperationPlan:
    call = replace(case.call("cuda"), with_lse=True)
    # Not from the cache of plans: tests change what the plan chooses.
    return plan_call.__wrapped__(call.map(array_spec), device_limits(torch.device("cuda", 0)))


def _run(case: AttentionCase, chunk: int, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    monkeypatch.setattr(hopper_prefill, "hopper_chunk", lambda **_: chunk)
    plan = _plan(case)
    return _results(case, plan)


def _results(case: AttentionCase, plan: OperationPlan) -> tuple[torch.Tensor, torch.Tensor]:
    assert [launch.name for launch in plan.launches[:2]] == ["hopper_prefill_kernel", "attention_combine_kernel"]
    tensors = case.tensors("cuda")
    results = run_operation(plan, {name: tensors[name] for name, _ in plan.inputs})
    return results["out"], results["lse"]


def _random_case(seed: int) -> tuple[AttentionCase, int]:
    rng = np.random.default_rng([seed, 29])
    head_size = int(rng.choice([64, 128, 256]))
    group = int(rng.choice([1, 2, 3, 4, 8]))
    num_seqs = int(rng.choice([1, 3, 40]))
    longest = int(rng.integers(65, 300))
    seq_lens = [int(rng.integers(0, 700)) for _ in range(num_seqs - 1)] + [int(rng.integers(longest, 1500))]
    query_lens = [min(n, int(rng.choice([0, 1, 3, longest // 2 + 1, longest]))) for n in seq_lens[:-1]] + [longest]
    causal = bool(rng.random() < 0.8)
    spec = AttentionSpec(
        scale=head_size**-0.5,
        causal=causal,
        window_left=int(rng.choice([0, 15, 63, 64, 127, 300])) if rng.random() < 0.4 else None,
        window_right=int(rng.choice([0, 70])) if not causal and rng.random() < 0.5 else None,
    )
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options["sinks"] = rng.standard_normal(2 * group).astype(np.float32)
    dtype = str(rng.choice(["bfloat16", "float16"]))
    # Large scores overflow what torch computes in float16.
    kinds = ["gaussian", "sparse", *(["large"] if dtype == "bfloat16" else [])]
    case = paged_case(
        seed, seq_lens=seq_lens, query_lens=query_lens, block_size=int(rng.choice([8, 16, 16, 48, 64, 128, 256])),
        num_heads=2 * group, num_kv_heads=2, head_size=head_size, dtype=dtype,
        spec=spec, padding_tokens=int(rng.choice([0, 1, 40])),
        values=str(rng.choice(kinds)), **options,
    )  # fmt: skip
    # One chunk of all keys would be no split.
    width = case.operands["block_tables"].shape[1] * case.operands["kv_cache"].shape[2]
    return case, int(rng.choice([chunk for chunk in (128, 256, 384, 512) if chunk < width]))


@pytest.mark.parametrize("seed", range(60))
def test_a_random_problem_in_chunks_is_as_exact_as_torch_in_its_dtype(seed, monkeypatch):
    case, chunk = _random_case(seed)
    assert_matches_reference(case, *_run(case, chunk, monkeypatch))


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("chunk", [128, 256])
def test_lengths_around_the_end_of_a_chunk(chunk, edge, seed, monkeypatch):
    case = paged_case(seed, seq_lens=[chunk + edge, 3 * chunk + edge, chunk // 2, 0],
                      query_lens=[100, 70, 1, 0], block_size=16, **_SIZES)  # fmt: skip
    assert_matches_reference(case, *_run(case, chunk, monkeypatch))


@pytest.mark.parametrize("window", [0, 100, 128, 300])
def test_a_window_that_starts_inside_a_chunk(window, seed, monkeypatch):
    spec = AttentionSpec(scale=0.09, window_left=window)
    case = paged_case(seed, seq_lens=[900, 401, 127], query_lens=[127, 70, 20], block_size=16, spec=spec,
                      padding_tokens=7, **_SIZES)  # fmt: skip
    assert_matches_reference(case, *_run(case, 256, monkeypatch))


def test_what_the_planner_splits_is_as_exact(seed):
    case = paged_case(seed, seq_lens=[2100], query_lens=[100], block_size=16, **_SIZES)
    assert_matches_reference(case, *_results(case, _plan(case)))
