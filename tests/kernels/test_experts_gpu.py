"""A layer of experts on a CUDA device: against the reference, from JAX, in a captured graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from jattn.bridge import to_jax
from jattn.ops import fused_experts
from jattn.ops.run import run as jax_run
from tests.support.expert_cases import assert_as_exact_as_torch, assert_results_as_exact_as_torchs, experts_call
from torch_core import ops
from torch_core.experts.call import ACTIVATIONS, ExpertsCall

pytestmark = pytest.mark.gpu
# For each way of a plan: one token; rows looked up pair by pair, and expert by expert; sorted tiles of 64 rows, and of
# 128 by the Hopper kernel.
TOKENS = [1, 8, 96, 300, 1100]


def run(call: ExpertsCall[torch.Tensor]) -> torch.Tensor:
    return ops.run(call.map(torch.Tensor.cuda))["out"].cpu()


def in_jax(call: ExpertsCall[torch.Tensor], **options: str) -> torch.Tensor:
    arrays = call.map(lambda x: to_jax(x.cuda())).arrays()
    given = {"activation": call.activation, "out_dtype": call.out_dtype, **options}
    out = jax.jit(lambda arrays: fused_experts(**arrays, **given))(arrays)
    return torch.from_dlpack(out).cpu()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_layer_is_as_exact_as_torchs(tokens, dtype, seed):
    call = experts_call(
        seed, tokens, num_experts=16, top_k=4, hidden=256, inner=192, dtype=dtype, unused=0.1, bias=tokens == 8
    )
    assert_as_exact_as_torch(call, run(call))


@pytest.mark.parametrize("tokens", TOKENS)
def test_bits_are_those_of_the_same_kernels_in_jax(tokens, seed):
    call = experts_call(seed, tokens, num_experts=16, top_k=4, hidden=192, inner=128, dtype="bfloat16", unused=0.1)
    assert torch.equal(run(call), in_jax(call))


@pytest.mark.parametrize("tokens", TOKENS)
def test_what_adapters_add_is_added_in_torch_and_jax_alike(tokens, seed):
    sizes: dict[str, Any] = {"num_experts": 16, "top_k": 4, "hidden": 192, "inner": 128, "dtype": "bfloat16"}
    call = experts_call(seed, tokens, unused=0.1, adapted=True, **sizes)
    found = {name: x.cpu() for name, x in ops.run(call.map(torch.Tensor.cuda)).items()}
    assert_results_as_exact_as_torchs(call, found)
    in_jax = jax.jit(jax_run)(call.map(lambda x: to_jax(x.cuda())))
    is_expert = (call.topk_ids >= 0) & (call.topk_ids < call.num_experts)
    assert torch.equal(torch.from_dlpack(in_jax["out"]).cpu(), found["out"])
    assert torch.equal(torch.from_dlpack(in_jax["activated"]).cpu()[is_expert], found["activated"][is_expert])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(1, 90, 45), (20, 90, 45), (700, 192, 64)])
def test_every_activation_and_biases(tokens, hidden, inner, activation, seed):
    call = experts_call(seed, tokens, activation=activation, bias=True, dtype="bfloat16", hidden=hidden, inner=inner)
    assert_as_exact_as_torch(call, run(call))


@pytest.mark.parametrize("tokens", [1, 5, 300, 1100])
def test_what_others_hold_does_not_show(tokens, seed):
    call = experts_call(seed, tokens, dtype="bfloat16", unused=0.3, num_experts=16, top_k=4, hidden=64, inner=64)
    call = replace(call, topk_ids=torch.where(call.topk_ids == 2, -1, call.topk_ids))
    expected = run(call)[0]
    for kernel in (call.gate_up_kernel, call.down_kernel):
        kernel[2] = torch.nan
    call.hidden_states[1:] = torch.nan
    assert torch.equal(run(call)[0], expected)


def test_kernels_of_more_than_two_to_the_31_elements(seed):
    ids = torch.tensor([[0, 0], [1, 2]], dtype=torch.int32, device="cuda") * 1023
    make = {"device": "cuda", "dtype": torch.bfloat16}
    call = ExpertsCall(
        hidden_states=torch.randn(2, 1024, **make), topk_weights=torch.ones(2, 2, device="cuda"),
        topk_ids=ids.clamp(max=2046), gate_up_kernel=torch.zeros(2047, 1024, 2048, **make),
        down_kernel=torch.zeros(2047, 1024, 1024, **make),
    )  # fmt: skip
    for place in (0, 1023, 2046):
        call.gate_up_kernel[place].normal_(std=1 / 32)
        call.down_kernel[place].normal_(std=1 / 32)
    small = call.with_arrays(
        {
            "topk_ids": ids // 1023,
            "gate_up_kernel": call.gate_up_kernel[::1023].contiguous(),
            "down_kernel": call.down_kernel[::1023].contiguous(),
        }
    )
    expected = ops.run(small)["out"]
    assert bool(expected.any())
    torch.testing.assert_close(ops.run(call)["out"], expected, rtol=2**-7, atol=2**-7)


def test_a_layer_is_captured(seed):
    call = experts_call(seed, 300, dtype="bfloat16", hidden=64, inner=64).map(torch.Tensor.cuda)
    expected = ops.run(call)["out"]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.run(call)["out"]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_gradients_are_those_of_jnp(seed):
    call = experts_call(seed, 12, hidden=64, inner=32).map(lambda x: to_jax(x.cuda()))
    arrays: dict[str, Any] = call.arrays()
    ids = arrays.pop("topk_ids")

    def loss(arrays: dict[str, Any], implementation: str | None) -> jax.Array:
        return jnp.square(fused_experts(topk_ids=ids, **arrays, implementation=implementation)).sum()

    ours, jnps = (jax.jit(jax.grad(lambda x, way=way: loss(x, way)))(arrays) for way in (None, "xla"))
    for name, gradient in ours.items():
        assert jnp.allclose(gradient, jnps[name], rtol=0, atol=2.0**-9 * float(jnp.abs(jnps[name]).max())), name
