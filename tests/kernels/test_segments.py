"""Segments of packed rows in the kernels: those of Triton interpreted, those of Hopper emulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import AttentionCase
from tests.support.emulated.run import run_emulated_operation
from tests.support.segment_cases import assert_padded_match, padded, padded_backward, random_segment_case, segment_case
from tests.support.triton_ops import run_triton
from torch_core.launch.call import Call
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

# Rows of two documents and padding, that fill tiles of a Hopper kernel and leave some unfilled.
ROWS = [[-9, 140, 70, -37], [130, -2, 90]]
BROKEN = np.array([1, 1, 2, 2, 1, 3], np.int32)


def _emulated(call: Call[torch.Tensor], kernel: str) -> dict[str, torch.Tensor]:
    call = call.for_kernels(torch)
    plan = plan_call(call.map(array_spec), DeviceLimits(num_sms=3))
    assert kernel in [launch.name for launch in plan.launches]
    return run_emulated_operation(plan, call.arrays(), 0)


@pytest.mark.parametrize("seed", [2, 5])
def test_a_random_problem_is_as_exact_as_torch_in_its_dtype(seed: int) -> None:
    case = random_segment_case(seed, longest=6, num_heads=1, num_kv_heads=1)
    call = padded_backward(case, run_triton)
    assert_padded_match(case, call, run_triton(call))


def _hopper_case(seed: int) -> AttentionCase:
    sizes: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_size": 64, "dtype": "bfloat16"}
    case = segment_case(seed, ROWS, **sizes, max_segments=4)
    # The backward kernel serves calls whose queries may be this long.
    return replace(case, limits={"max_query_len": 256, "max_key_len": 256})


def test_hopper_kernels_serve_segments_as_sequences(seed: int) -> None:
    case = _hopper_case(seed)
    call = padded_backward(case, lambda call: _emulated(call, "hopper_prefill_kernel"))
    assert_padded_match(case, call, _emulated(call, "hopper_backward_kernel"))


def test_segments_that_do_not_fit_make_every_row_nan(seed: int) -> None:
    case = segment_case(seed, [[6]], num_heads=2, num_kv_heads=1, head_size=16)
    call = replace(case.call(segment_ids=torch.from_numpy(BROKEN)), with_lse=True)
    found = run_triton(call)
    assert found["out"].isnan().all()
    assert found["lse"].isnan().all()
    in_a_hopper_kernel = _emulated(replace(_hopper_case(seed).call(), max_segments=1), "hopper_prefill_kernel")
    real = torch.from_numpy(_hopper_case(seed).options["segment_ids"] > 0)
    assert in_a_hopper_kernel["out"][real].isnan().all()


def test_padding_of_the_array_and_of_rows_is_zero(seed: int) -> None:
    case = segment_case(seed, [[-3, 4], [-5]], num_heads=2, num_kv_heads=1, head_size=16, padding_tokens=2)
    out = run_triton(padded(case).call())["out"]
    assert not out[:3].any()
    assert not out[7:].any()
