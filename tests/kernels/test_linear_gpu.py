"""A linear map of few rows on a CUDA device: against float64, and from JAX."""

from __future__ import annotations

import jax
import pytest
import torch

from jattn.bridge import to_jax
from jattn.ops import fused_linear
from tests.support.linear_cases import assert_linear_as_exact_as_torch, linear_call
from torch_core import ops

pytestmark = pytest.mark.gpu
SIZES = {"even": (2048, 1536), "uneven": (1100, 520)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_rows_are_multiplied_with_what_stands_around_the_product(num_tokens, sizes, activation, dtype, seed):
    in_size, out_size = SIZES[sizes]
    call = linear_call(
        seed, num_tokens, in_size=in_size, out_size=out_size, dtype=dtype, activation=activation, norm=True, bias=True,
        residual=True,
    )  # fmt: skip
    assert_linear_as_exact_as_torch(call, ops.run(call.map(torch.Tensor.cuda))["out"].cpu())


def test_bits_are_those_of_the_same_kernel_in_jax(seed):
    call = linear_call(seed, 1, in_size=1024, out_size=512, dtype="bfloat16", norm=True, activation="silu")
    given = call.map(torch.Tensor.cuda)
    arrays = {name: to_jax(x) for name, x in given.arrays().items()}
    out = jax.jit(lambda arrays: fused_linear(**arrays, activation="silu"))(arrays)
    assert torch.equal(torch.from_dlpack(out), ops.run(given)["out"])
