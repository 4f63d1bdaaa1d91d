"""The kernels of a linear map of few rows, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpret import run_interpreted_operation
from tests.support.linear_cases import assert_linear_as_exact_as_torch, linear_call
from torch_core.plan.plan import DeviceLimits
from torch_core.planner import plan_call
from torch_core.run import array_spec

AROUND = {
    "nothing": {},
    "a norm": {"norm": True},
    "a residual": {"residual": True},
    "a norm and an activation": {"norm": True, "activation": "silu"},
    "everything": {"norm": True, "activation": "gelu_pytorch_tanh", "bias": True, "residual": True},
}
# Loads, and the copy engine.
ARCHS = (80, 90)


def run(call, arch=90):
    plan = plan_call(call.map(array_spec), DeviceLimits(arch=arch))
    return run_interpreted_operation(plan, call.arrays())["out"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("around", AROUND)
def test_a_row_is_multiplied_with_what_stands_around_the_product(around, dtype, arch, seed):
    # Neither rows nor columns fill a tile.
    call = linear_call(seed, 1, in_size=264, out_size=40, dtype=dtype, **AROUND[around])
    assert_linear_as_exact_as_torch(call, run(call, arch))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("num_tokens", [3, 16])
def test_what_other_rows_hold_does_not_show(num_tokens, arch, seed):
    call = linear_call(seed, num_tokens, in_size=200, out_size=72, norm=True, activation="silu", residual=True)
    expected = run(call, arch)
    assert_linear_as_exact_as_torch(call, expected)
    call.hidden_states[1:] = torch.nan
    assert torch.equal(run(call, arch)[0], expected[0])


@pytest.mark.parametrize("arch", ARCHS)
def test_arrays_that_are_parts_of_others_are_read_where_they_lie(arch, seed):
    call = linear_call(seed, 2, in_size=80, out_size=32)
    wide, long = torch.full((80, 64), torch.nan), torch.full((2, 96), torch.nan)
    wide[:, :32], long[:, :80] = call.kernel, call.hidden_states
    parts = call.with_arrays({"kernel": wide[:, :32], "hidden_states": long[:, :80]})
    assert torch.equal(run(parts, arch), run(call, arch))


def test_a_large_row_of_float16_is_normalised_without_overflow(seed):
    call = linear_call(seed, 1, dtype="float16", norm=True)
    call.hidden_states.mul_(10_000).clamp_(-65_000, 65_000)
    assert_linear_as_exact_as_torch(call, run(call))
