"""The kernels of a router, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.support.expert_cases import assert_routed_as_exactly_as_torch, route_call
from tests.support.triton_ops import run_triton


@pytest.mark.parametrize("num_tokens", [1, 3, 21])
def test_the_best_experts_of_each_token_are_found(num_tokens, seed):
    # Parts of rows, a row without matrix units, and a tile of tokens that is not full.
    call = route_call(seed, num_tokens, hidden=200, bias=num_tokens == 3)
    assert_routed_as_exactly_as_torch(call, run_triton(call))


@pytest.mark.parametrize("options", [{"scoring_func": "sigmoid", "corrected": True}, {"norm_topk_prob": False}])
@pytest.mark.parametrize("num_experts", [12, 20])
def test_experts_of_the_best_groups_alone_are_chosen(num_experts, options, seed):
    call = route_call(
        seed,
        5,
        num_experts=num_experts,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        dtype="bfloat16",
        **options,
    )
    assert_routed_as_exactly_as_torch(call, run_triton(call))


def test_of_equal_scores_the_first_expert_wins():
    call = route_call(1, 2, num_experts=6)
    call.kernel[:] = 0
    assert run_triton(call)["topk_ids"].tolist() == [[0, 1, 2]] * 2


def test_what_other_rows_hold_does_not_show(seed):
    call = route_call(seed, 3)
    expected = run_triton(call)
    call.hidden_states[1:] = torch.nan
    found = run_triton(call)
    assert all(torch.equal(found[name][0], expected[name][0]) for name in found)
