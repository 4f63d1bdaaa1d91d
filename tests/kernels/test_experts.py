"""The kernels of a layer of experts, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.expert_cases import (
    assert_as_exact_as_torch,
    assert_results_as_exact_as_torchs,
    experts_call,
)
from tests.support.triton_ops import run_triton
from torch_core.experts.call import ACTIVATIONS
from torch_core.experts.plan import plan_experts
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.tensors import array_spec


@pytest.mark.parametrize("num_tokens", [1, 3, 21, 130])
def test_a_layer_is_the_weighted_sum_of_each_tokens_experts(num_tokens, seed):
    # One program for each pair, for each expert with several tiles of rows, and rows that were sorted first.
    call = experts_call(seed, num_tokens, unused=0.2)
    assert_as_exact_as_torch(call, run_triton(call)["out"])


@pytest.mark.parametrize(
    ("num_tokens", "options"),
    [(1, {"bias": True}), (1, {"gated": False, "activation": "relu2"}), (3, {}), (21, {"gated": False}), (130, {})],
    ids=str,
)
def test_what_adapters_add_is_added_and_their_inputs_are_returned(num_tokens, options, seed):
    call = experts_call(seed, num_tokens, unused=0.2, adapted=True, dtype="bfloat16", **options)
    assert call.gate_up_added is not None
    call.gate_up_added[(call.topk_ids < 0) | (call.topk_ids >= call.num_experts)] = torch.nan
    assert_results_as_exact_as_torchs(call, run_triton(call))


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_and_biases(activation, num_tokens, seed):
    call = experts_call(seed, num_tokens, activation=activation, bias=True, hidden=40, inner=56)
    assert_as_exact_as_torch(call, run_triton(call)["out"])


@pytest.mark.parametrize(("num_tokens", "activation"), [(1, "relu2"), (5, "silu"), (66, "relu2")])
def test_experts_without_a_gate(num_tokens, activation, seed):
    call = experts_call(seed, num_tokens, activation=activation, gated=False, bias=True, unused=0.2)
    assert_as_exact_as_torch(call, run_triton(call)["out"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 4, 66])
def test_sixteen_bits_are_as_exact_as_torchs(dtype, num_tokens, seed):
    call = experts_call(seed, num_tokens, dtype=dtype, num_experts=4, top_k=4, hidden=64, inner=32)
    assert_as_exact_as_torch(call, run_triton(call)["out"])


@pytest.mark.parametrize(("hidden", "inner"), [(600, 72), (512, 72)])
def test_one_token_with_rows_of_several_steps(hidden, inner, seed):
    call = experts_call(seed, 1, num_experts=4, hidden=hidden, inner=inner, bias=True)
    assert_as_exact_as_torch(call, run_triton(call)["out"])


def test_a_token_whose_rows_do_not_fit_a_block_goes_the_way_of_several():
    call = experts_call(1, 1, num_experts=2, top_k=1, hidden=8200, inner=16).map(array_spec)
    small = DeviceLimits(shared_memory=101376)
    names = [plan_experts(call, limits).launches[0].name for limits in (DeviceLimits(), small)]
    assert names == ["one_token_kernel", "expert_product_kernel"]


def test_all_tokens_may_go_to_one_expert_and_some_to_none(seed):
    call = experts_call(seed, 40)
    call = replace(call, topk_ids=torch.tensor([[3, -1]] * 40, dtype=torch.int32))
    assert_as_exact_as_torch(call, run_triton(call)["out"])


@pytest.mark.parametrize("num_tokens", [1, 5, 33])
def test_neither_experts_that_nobody_goes_to_nor_other_rows_show(num_tokens, seed):
    call = experts_call(seed, num_tokens, unused=0.3, top_k=8 if num_tokens > 5 else 2, hidden=32, inner=16)
    call = replace(call, topk_ids=torch.where(call.topk_ids == 2, -1, call.topk_ids))
    expected = run_triton(call)["out"][0]
    for kernel in (call.gate_up_kernel, call.down_kernel):
        kernel[2] = torch.nan
    call.hidden_states[1:] = torch.nan
    assert torch.equal(run_triton(call)["out"][0], expected)


def test_a_float32_sum_of_sixteen_bit_rows_is_not_rounded(seed):
    call = experts_call(seed, 3, dtype="bfloat16", hidden=64, inner=32)
    wide = run_triton(replace(call, out_dtype="float32"))["out"]
    assert torch.equal(wide.bfloat16(), run_triton(call)["out"])
    assert not torch.equal(wide.bfloat16().float(), wide)
