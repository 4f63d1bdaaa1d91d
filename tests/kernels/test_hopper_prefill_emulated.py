"""The Hopper prefill kernel's own source without a GPU: pages, windows, heads side by side, chunks, poison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.attention_cases import AttentionCase, assert_matches_reference, dense_case, paged_case
from tests.support.emulated.run import run_emulated_operation
from torch_core.base.specs import AttentionSpec
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

# Few programs, so that each has several work items.
_FEW = DeviceLimits(num_sms=3)


def _check(case: AttentionCase, seed: int, launches: list[str], *, limits: DeviceLimits = _FEW) -> dict[str, Any]:
    call = replace(case.call("cpu"), with_lse=True)
    plan = plan_call(call.map(array_spec), limits)
    assert [launch.name for launch in plan.launches][: len(launches)] == launches
    found = run_emulated_operation(plan, call.arrays(), seed)
    assert_matches_reference(case, found["out"], found["lse"])
    return dict(plan.launches[0].constexprs)


def _sizes(rng: np.random.Generator, group: int) -> dict[str, Any]:
    head_size = int(rng.choice([64, 128, 256]))
    causal = bool(rng.random() < 0.8)
    sizes: dict[str, Any] = {
        "num_heads": 2 * group,
        "num_kv_heads": 2,
        "head_size": head_size,
        "dtype": str(rng.choice(["bfloat16", "float16"])),
        "spec": AttentionSpec(
            scale=head_size**-0.5,
            causal=causal,
            window_left=int(rng.choice([0, 63, 64, 127, 300])) if rng.random() < 0.35 else None,
            window_right=int(rng.choice([0, 70])) if not causal and rng.random() < 0.5 else None,
        ),
        "padding_tokens": int(rng.choice([0, 1, 40])),
        "values": str(rng.choice(["gaussian", "sparse", "large"], p=[0.6, 0.2, 0.2])),
    }
    if rng.random() < 0.4:
        sizes["sinks"] = rng.standard_normal(2 * group).astype(np.float32)
    return sizes


def _random_case(seed: int, dense: bool) -> AttentionCase:
    rng = np.random.default_rng([seed, 11])
    sizes = _sizes(rng, int(rng.choice([1, 3])))
    num_seqs = int(rng.choice([1, 3]))
    seq_lens = [int(rng.integers(0, 300)) for _ in range(num_seqs - 1)] + [int(rng.integers(180, 500))]
    query_lens = [min(n, int(rng.choice([0, 1, 3, 100, n]))) for n in seq_lens[:-1]] + [int(rng.integers(130, 180))]
    if dense:
        return dense_case(seed, key_lens=seq_lens, query_lens=query_lens, **sizes)
    block_size = int(rng.choice([8, 16, 16, 24, 48, 64, 256]))
    return paged_case(seed, seq_lens=seq_lens, query_lens=query_lens, block_size=block_size, **sizes)


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "paged"])
@pytest.mark.parametrize("draw", range(4))
def test_a_random_problem_is_as_exact_as_torch_in_its_dtype(draw: int, dense: bool, seed: int) -> None:
    _check(_random_case(seed, dense), seed, ["hopper_prefill_kernel"])


@pytest.mark.nightly
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "paged"])
@pytest.mark.parametrize("draw", range(100))
def test_many_random_problems_are_as_exact_as_torch_in_its_dtype(draw: int, dense: bool, seed: int) -> None:
    _check(_random_case(seed, dense), seed, ["hopper_prefill_kernel"])


@pytest.mark.parametrize("group", [2, 8])
def test_short_queries_have_the_heads_of_a_group_side_by_side(group: int, seed: int) -> None:
    rng = np.random.default_rng([seed, 13])
    case = paged_case(seed, seq_lens=[90, 600], query_lens=[0, 128 // group - 5], **_sizes(rng, group))
    known = _check(case, seed, ["hopper_prefill_kernel"], limits=DeviceLimits(num_sms=1))
    assert known["PACK"] == group


def test_few_tiles_over_many_keys_are_cut_into_chunks(seed: int) -> None:
    case = paged_case(
        seed, seq_lens=[1500], query_lens=[66], num_heads=1, num_kv_heads=1, head_size=64, dtype="bfloat16",
        spec=AttentionSpec(scale=0.1, window_left=1300),
    )  # fmt: skip
    _check(case, seed, ["hopper_prefill_kernel", "attention_combine_kernel"], limits=DeviceLimits(num_sms=64))


def test_heads_of_192_over_values_of_128(seed: int) -> None:
    case = dense_case(
        seed, key_lens=[300, 129], query_lens=[180, 129], num_heads=2, num_kv_heads=1, head_size=192,
        value_head_size=128, dtype="bfloat16", padding_tokens=3,
    )  # fmt: skip
    _check(case, seed, ["hopper_prefill_kernel"])
