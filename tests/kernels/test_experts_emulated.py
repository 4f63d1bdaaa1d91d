"""The Hopper kernel of a layer of experts, its own source without a GPU: roles, rings and padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.emulated.run import run_emulated_operation
from tests.support.expert_cases import assert_as_exact_as_torch, assert_results_as_exact_as_torchs, experts_call
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec


def _run(call: Any, seed: int) -> Any:
    plan = plan_call(call.map(array_spec), DeviceLimits(num_sms=3))
    assert [launch.name for launch in plan.launches][2:4] == ["expert_product_kernel", "hopper_expert_product_kernel"]
    return run_emulated_operation(plan, call.arrays(), seed)


@pytest.mark.parametrize("bias", [False, True])
def test_sorted_tiles_are_as_exact_as_torch(bias: bool, seed: int) -> None:
    # Whole tiles, half ones, columns that are no multiple of a tile's, and rows of nobody.
    call = experts_call(
        seed, 210, num_experts=3, top_k=2, hidden=320, inner=192, dtype="bfloat16", unused=0.2, bias=bias
    )
    assert_as_exact_as_torch(call, _run(call, seed)["out"])


def test_what_adapters_add_is_added_and_their_inputs_are_returned(seed: int) -> None:
    call = experts_call(
        seed, 210, num_experts=3, top_k=2, hidden=64, inner=64, dtype="bfloat16", unused=0.2, adapted=True
    )
    assert_results_as_exact_as_torchs(call, _run(call, seed))


def test_neither_experts_that_nobody_goes_to_nor_other_rows_show(seed: int) -> None:
    call = experts_call(seed, 300, num_experts=3, top_k=1, hidden=64, inner=64, dtype="float16", unused=0.1)
    call = replace(call, topk_ids=torch.where(call.topk_ids == 1, -1, call.topk_ids))
    expected = _run(call, seed)["out"][0]
    for kernel in (call.gate_up_kernel, call.down_kernel):
        kernel[1] = torch.nan
    call.hidden_states[1:] = torch.nan
    assert torch.equal(_run(call, seed)["out"][0], expected)
