"""A router on a CUDA device: against float64, and from JAX."""

from __future__ import annotations

import jax
import pytest
import torch

from jattn.bridge import to_jax
from jattn.ops import route_experts
from tests.support.expert_cases import assert_routed_as_exactly_as_torch, route_call
from torch_core import ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 7, 530])
def test_the_best_experts_of_each_token_are_found(tokens, dtype, seed):
    call = route_call(seed, tokens, dtype=dtype, hidden=1100, num_experts=128, top_k=8, bias=tokens == 7)
    found = ops.run(call.map(torch.Tensor.cuda))
    assert_routed_as_exactly_as_torch(call, {name: x.cpu() for name, x in found.items()})


@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_of_the_best_groups_alone_are_chosen(tokens, seed):
    call = route_call(
        seed, tokens, dtype="bfloat16", hidden=256, num_experts=160, top_k=6, n_group=8, topk_group=3,
        scoring_func="sigmoid", corrected=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    found = ops.run(call.map(torch.Tensor.cuda))
    assert_routed_as_exactly_as_torch(call, {name: x.cpu() for name, x in found.items()})


@pytest.mark.parametrize("tokens", [1, 100])
def test_bits_are_those_of_the_same_kernels_in_jax(tokens, seed):
    call = route_call(seed, tokens, dtype="bfloat16", hidden=512, num_experts=64, top_k=4).map(torch.Tensor.cuda)
    x, kernel = to_jax(call.hidden_states), to_jax(call.kernel)
    weights, ids = jax.jit(lambda x, kernel: route_experts(x, kernel, top_k=4))(x, kernel)
    found = ops.run(call)
    assert torch.equal(torch.from_dlpack(weights), found["topk_weights"])
    assert torch.equal(torch.from_dlpack(ids), found["topk_ids"])
