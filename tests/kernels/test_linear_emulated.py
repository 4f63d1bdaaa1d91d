"""The Hopper kernel of a linear map of one row, its own source without a GPU: the ring, the row and its norm."""

from __future__ import annotations

import pytest
import torch

from tests.support.emulated.run import run_emulated_operation
from tests.support.linear_cases import assert_linear_as_exact_as_torch, linear_call
from torch_core.calls import LinearCall
from torch_core.plan.plan import DeviceLimits
from torch_core.planner import plan_call
from torch_core.run import array_spec


def run(call: LinearCall[torch.Tensor], seed: int) -> torch.Tensor:
    plan = plan_call(call.map(array_spec), DeviceLimits())
    assert [launch.name for launch in plan.launches] == ["hopper_linear_row_kernel"]
    return run_emulated_operation(plan, call.arrays(), seed)["out"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "around", [{}, {"norm": True, "activation": "silu", "bias": True}, {"residual": True, "bias": True}, {"norm": True}]
)
def test_a_row_is_multiplied_with_what_stands_around_the_product(around, dtype, seed):
    # A ring is filled more than once, the row is padded, and the last tile of columns is not full.
    call = linear_call(seed, 1, in_size=1792, out_size=72, dtype=dtype, **around)
    assert_linear_as_exact_as_torch(call, run(call, seed))


def test_a_kernel_that_is_a_part_of_another_is_read_where_it_lies(seed):
    call = linear_call(seed, 1, in_size=512, out_size=32, dtype="bfloat16")
    wide = torch.full((512, 64), torch.nan, dtype=torch.bfloat16)
    wide[:, :32] = call.kernel
    found = run(call.with_arrays({"kernel": wide[:, :32]}), seed)
    assert torch.equal(found, run(call, seed))
