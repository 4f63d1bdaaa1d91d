"""A product with a gate's activation on a CUDA device: as exact as torch's, with the same bits from JAX."""

from __future__ import annotations

import jax
import pytest
import torch

from jattn.bridge import to_jax
from jattn.ops import gates_rows, row_product
from tests.support.gated_product_cases import assert_as_exact_as_torch, gated_product
from torch_core import ops

pytestmark = pytest.mark.gpu
# Rows, inputs and outputs: a Llama's by two warpgroups and by three, uneven ones, fewer tiles than multiprocessors, as
# few steps as slots; by one.
SIZES = [(2048, 4096, 14336), (1536, 4096, 14336), (1211, 2048, 5000), (513, 512, 136), (1024, 256, 264)]
SIZES += [(64, 4096, 14336), (50, 2048, 5000), (1, 256, 264)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_as_exact_as_torchs_from_both_frameworks(sizes, dtype, seed):
    num_rows, inputs, outputs = sizes
    call = gated_product(seed, num_rows, inputs, outputs, dtype).map(torch.Tensor.cuda)
    out = ops.run(call)["out"]
    assert_as_exact_as_torch(call, out)
    x, kernel = to_jax(call.x), to_jax(call.kernel)
    assert gates_rows(x, kernel)
    again = jax.jit(lambda x, kernel: row_product(x, kernel, activation="silu"))(x, kernel)
    assert torch.equal(torch.from_dlpack(again), out)


def test_two_runs_have_the_same_bits(seed):
    call = gated_product(seed, 3000, 4096, 14336, torch.bfloat16).map(torch.Tensor.cuda)
    assert torch.equal(ops.run(call)["out"], ops.run(call)["out"])
