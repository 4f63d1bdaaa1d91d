"""A layer of experts on JAX arrays: every implementation that runs here, its derivative, and under transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn.ops import fused_experts
from jattn.ops.run import run
from tests.ops.runner import IMPLEMENTATIONS
from tests.support.attention_cases import to_torch
from tests.support.expert_cases import assert_as_exact_as_torch, assert_results_as_exact_as_torchs, experts_call
from torch_core.experts.call import ExpertsCall


def in_jax(call) -> tuple[dict[str, Any], dict[str, Any]]:
    options = {"activation": call.activation, "out_dtype": call.out_dtype}
    return {name: to_jax(x) for name, x in call.arrays().items()}, options


def to_jax(x):
    return jnp.asarray(x.float().numpy(), str(x.dtype).removeprefix("torch.")) if x.is_floating_point() else x.numpy()


# Fewer rows than experts, and more.
@pytest.mark.parametrize(("num_tokens", "gated"), [(3, True), (9, True), (9, False)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_layer_is_the_weighted_sum_of_each_tokens_experts(implementation, num_tokens, gated, seed):
    call = experts_call(seed, num_tokens, gated=gated, unused=0.2, bias=True, dtype="bfloat16", out_dtype="float32")
    arrays, options = in_jax(call)
    out = jax.jit(lambda arrays: fused_experts(**arrays, **options, implementation=implementation))(arrays)
    assert_as_exact_as_torch(call, to_torch(out))


# Fewer rows than experts, and more; the CPU's by torch, and by jnp.
@pytest.mark.parametrize("num_tokens", [3, 9])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_adapters_add_is_added_and_their_inputs_are_returned(implementation, num_tokens, seed):
    call = experts_call(seed, num_tokens, unused=0.2, adapted=True)
    found: Any = run(ExpertsCall(**in_jax(call)[0], with_activated=True), implementation)
    assert_results_as_exact_as_torchs(call, {name: to_torch(x) for name, x in found.items()})


def test_gradients_are_those_of_torch(seed):
    call = experts_call(seed, 5, unused=0.2)
    arrays, options = in_jax(call)
    ids = arrays.pop("topk_ids")
    found = jax.grad(lambda arrays: jnp.square(fused_experts(topk_ids=ids, **arrays, **options)).sum())(arrays)
    leaves = {name: x.double().requires_grad_() for name, x in call.arrays().items() if x.is_floating_point()}
    _by_definition(leaves, call.topk_ids).square().sum().backward()
    for name, gradient in found.items():
        leaf = leaves[name].grad
        assert leaf is not None
        exact = leaf.numpy()
        np.testing.assert_allclose(gradient, exact, rtol=0, atol=2.0**-18 * np.abs(exact).max(), err_msg=name)


def _by_definition(x, topk_ids):
    rows = []
    for token, row in enumerate(x["hidden_states"]):
        parts = [row * 0]
        for k, expert in enumerate(topk_ids[token].tolist()):
            if 0 <= expert < 8:
                gate, up = (row @ x["gate_up_kernel"][expert]).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                parts.append(x["topk_weights"][token, k] * (inner @ x["down_kernel"][expert]))
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def test_examples_of_a_batch_are_mapped(seed):
    arrays, _ = in_jax(experts_call(seed, 6))
    moving = ("hidden_states", "topk_weights", "topk_ids")
    fixed = {name: x for name, x in arrays.items() if name not in moving}
    whole = fused_experts(**arrays)
    parts = jax.vmap(lambda *each: fused_experts(**dict(zip(moving, each, strict=True)), **fixed))(
        *(jnp.asarray(arrays[name]).reshape(2, 3, -1) for name in moving)
    )
    np.testing.assert_allclose(parts.reshape(whole.shape), whole, rtol=2.0**-18, atol=2.0**-18)
