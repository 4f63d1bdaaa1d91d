"""The kernel of a linear map of few rows, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.support.linear_cases import assert_linear_as_exact_as_torch, linear_call
from tests.support.triton_ops import run_triton
from torch_core.errors import Unsupported

AROUND = {
    "nothing": {},
    "a norm": {"norm": True},
    "a residual": {"residual": True},
    "a norm and an activation": {"norm": True, "activation": "silu"},
    "everything": {"norm": True, "activation": "gelu_pytorch_tanh", "bias": True, "residual": True},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("around", AROUND)
def test_a_row_is_multiplied_with_what_stands_around_the_product(around, dtype, seed):
    # Neither rows nor columns fill a tile.
    call = linear_call(seed, 1, in_size=264, out_size=40, dtype=dtype, **AROUND[around])
    assert_linear_as_exact_as_torch(call, run_triton(call)["out"])


def test_a_kernel_that_is_a_part_of_another_is_read_where_it_lies(seed):
    call = linear_call(seed, 1, out_size=32)
    wide = torch.full((80, 64), torch.nan)
    wide[:, :32] = call.kernel
    found = run_triton(call.with_arrays({"kernel": wide[:, :32]}))["out"]
    assert torch.equal(found, run_triton(call)["out"])


def test_a_large_row_of_float16_is_normalised_without_overflow(seed):
    call = linear_call(seed, 1, dtype="float16", norm=True)
    call.hidden_states.mul_(10_000).clamp_(-65_000, 65_000)
    assert_linear_as_exact_as_torch(call, run_triton(call)["out"])


def test_more_rows_than_the_kernel_takes_are_refused(seed):
    with pytest.raises(Unsupported, match="17 rows"):
        run_triton(linear_call(seed, 17))
