"""The Hopper backward kernel's own source without a GPU: random problems against autograd in float64, poison, order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.attention_cases import dense_case
from tests.support.backward_cases import (
    assert_poisoned_match,
    backward_call,
    hopper_backward_case,
    poisoned,
)
from tests.support.emulated.run import run_emulated_operation
from torch_core import ops
from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.kernels.backward_hopper.plan import HopperBackwardTile, hopper_backward_plan
from torch_core.base.specs import AttentionSpec
from torch_core.launch.plan import DeviceLimits, OperationPlan
from torch_core.launch.tensors import array_spec

_HEAD_SIZES = [(64, 64), (128, 128), (192, 128), (256, 256)]


def _run(
    call: DenseBackwardCall[torch.Tensor], seed: int, tile: HopperBackwardTile | None = None, resident: int = 1
) -> dict[str, torch.Tensor]:
    return run_emulated_operation(_plan(call, tile), call.arrays(), seed, resident)


def _plan(call: DenseBackwardCall[torch.Tensor], tile: HopperBackwardTile | None = None) -> OperationPlan:
    plan = hopper_backward_plan(call.map(array_spec), DeviceLimits(), tile=tile)
    assert plan is not None
    return plan


@pytest.mark.parametrize(("head_sizes", "draw"), [*((sizes, 0) for sizes in _HEAD_SIZES), ((256, 256), 1)])
def test_gradients_of_a_random_problem_are_as_exact_as_torch_in_its_dtype(
    head_sizes: tuple[int, int], draw: int, seed: int
) -> None:
    case = hopper_backward_case(seed, head_sizes, small=True)
    call = backward_call(poisoned(case), ops.run, with_d_lse=bool(draw))
    assert_poisoned_match(case, call, _run(call, seed))


def test_a_tile_of_128_queries_adds_the_gradients_of_both_halves(seed: int) -> None:
    case = hopper_backward_case(seed, (64, 64), small=True)
    call = backward_call(poisoned(case), ops.run, with_d_lse=False)
    assert_poisoned_match(case, call, _run(call, seed, HopperBackwardTile(128, 4, 2)))


@pytest.mark.nightly
@pytest.mark.parametrize("head_sizes", _HEAD_SIZES)
@pytest.mark.parametrize("draw", range(40))
def test_gradients_of_many_random_problems_are_as_exact_as_torch_in_its_dtype(
    head_sizes: tuple[int, int], draw: int, seed: int
) -> None:
    case = hopper_backward_case(seed, head_sizes, small=draw % 8 > 0)
    call = backward_call(poisoned(case), ops.run, with_d_lse=bool(draw % 2))
    assert_poisoned_match(case, call, _run(call, seed))


@pytest.mark.parametrize(("head_size", "value_head_size"), [(128, 128), (192, 128), (256, 256)])
def test_both_edges_of_a_window_hide_what_they_should(head_size: int, value_head_size: int, seed: int) -> None:
    case = dense_case(
        seed, key_lens=[450], query_lens=[300], num_heads=1, num_kv_heads=1, head_size=head_size,
        value_head_size=value_head_size, dtype="bfloat16",
        spec=AttentionSpec(scale=0.1, causal=False, window_left=190, window_right=70),
    )  # fmt: skip
    call = backward_call(poisoned(case), ops.run, with_d_lse=False)
    assert_poisoned_match(case, call, _run(call, seed))


@pytest.mark.parametrize(("causal", "key_lens"), [(False, [0, 256]), (True, [256, 128])])
@pytest.mark.parametrize(("head_size", "value_head_size"), [(64, 64), (192, 128)])
def test_every_query_has_a_last_tile_of_keys_or_sees_none(
    head_size: int, value_head_size: int, causal: bool, key_lens: list[int], seed: int
) -> None:
    case = dense_case(
        seed, key_lens=key_lens, query_lens=[70, 256], num_heads=1, num_kv_heads=1, head_size=head_size,
        value_head_size=value_head_size, dtype="bfloat16", spec=AttentionSpec(scale=0.1, causal=causal),
    )  # fmt: skip
    call = backward_call(poisoned(case), ops.run, with_d_lse=False)
    assert_poisoned_match(case, call, _run(call, seed))


@pytest.mark.parametrize(
    ("head_size", "value_head_size"), [(64, 64), (192, 128), pytest.param(256, 256, marks=pytest.mark.nightly)]
)
def test_the_order_of_warps_and_programs_changes_no_bit(head_size: int, value_head_size: int, seed: int) -> None:
    case = dense_case(
        seed, key_lens=[260], query_lens=[260], num_heads=2, num_kv_heads=1, head_size=head_size,
        value_head_size=value_head_size, dtype="bfloat16",
    )  # fmt: skip
    call = backward_call(case, ops.run, with_d_lse=False)
    # The second time three programs run at the same time.
    first, second = (_run(call, seed + order, resident=1 + 2 * order) for order in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("head_sizes", _HEAD_SIZES)
def test_gradients_without_order_are_as_exact(head_sizes: tuple[int, int], seed: int) -> None:
    case = hopper_backward_case(seed, head_sizes, small=True)
    call = replace(backward_call(poisoned(case), ops.run, with_d_lse=False), deterministic=False)
    assert_poisoned_match(case, call, _run(call, seed, resident=4))


def test_programs_that_start_with_the_first_queries_are_as_exact(seed: int) -> None:
    case = dense_case(
        seed, key_lens=[400, 1], query_lens=[330, 1], num_heads=2, num_kv_heads=1, head_size=128, dtype="bfloat16"
    )
    call = replace(backward_call(poisoned(case), ops.run, with_d_lse=False), deterministic=False, max_query_len=2048)
    assert [launch.name for launch in _plan(call).launches][2:] == ["finish_backward_kernel"]
    assert_poisoned_match(case, call, _run(call, seed, resident=3))


def test_heads_that_alternate_have_the_bits_of_heads_one_after_the_other(seed: int) -> None:
    case = dense_case(
        seed, key_lens=[130], query_lens=[70], num_heads=2, num_kv_heads=2, head_size=64, dtype="bfloat16"
    )
    call = replace(backward_call(case, ops.run, with_d_lse=False), max_query_len=256)
    first, second = (_run(call, seed, HopperBackwardTile(64, 4, 4, heads_together=n)) for n in (1, 8))
    assert all(torch.equal(first[name], second[name]) for name in first)
