"""A router on JAX arrays: every implementation that runs here, its derivative, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn.ops import route_experts
from tests.ops.runner import IMPLEMENTATIONS
from tests.support.expert_cases import assert_routed_as_exactly_as_torch, route_call
from torch_core import ops
from torch_core.base.errors import InvalidInput

GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "scoring_func": "sigmoid", "corrected": True}


def in_jax(call: Any, implementation: str | None = None) -> dict[str, torch.Tensor]:
    given = {name: value for name, value in call.__dict__.items() if name not in ("hidden_states", "kernel")}
    given |= {name: jnp.asarray(x.numpy()) for name, x in call.arrays().items()}
    found = route_experts(**given, implementation=implementation)
    return {name: torch.from_numpy(np.array(x)) for name, x in zip(("topk_weights", "topk_ids"), found, strict=True)}


@pytest.mark.parametrize("options", [{"bias": True}, GROUPS, {"norm_topk_prob": False, "routed_scaling_factor": 2.5}])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_best_experts_of_each_token_are_found(implementation, options, seed):
    call = route_call(seed, 5, **options)
    assert_routed_as_exactly_as_torch(call, in_jax(call, implementation))


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, GROUPS])
def test_tensors_are_routed_alike(options, seed):
    call = route_call(seed, 5, **options)
    assert_routed_as_exactly_as_torch(call, ops.run(call))


@pytest.mark.parametrize("run", [ops.run, in_jax])
def test_of_equal_scores_the_first_expert_wins(run):
    call = route_call(1, 2, num_experts=6)
    call.kernel[:] = 0
    assert run(call)["topk_ids"].tolist() == [[0, 1, 2]] * 2


def test_gradients_of_weights_are_those_of_torch(seed):
    call = route_call(seed, 3)
    x = jnp.asarray(call.hidden_states.numpy())
    found = jax.grad(lambda kernel: jnp.square(route_experts(x, kernel, top_k=3)[0]).sum())(
        jnp.asarray(call.kernel.numpy())
    )
    kernel = call.kernel.double().requires_grad_()
    best = (call.hidden_states.double() @ kernel).softmax(-1).topk(3).values
    (best / best.sum(-1, keepdim=True)).square().sum().backward()
    assert kernel.grad is not None
    np.testing.assert_allclose(found, kernel.grad, rtol=0, atol=2.0**-18 * float(kernel.grad.abs().max()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k is 0; it must be an int of at least 1"),
        ({"top_k": 13}, "top_k is 13; 1 groups of 12 experts have only 12"),
        ({"n_group": 5}, "n_group is 5 with 12 experts; it must divide them into groups of at least 1"),
        ({"n_group": 12, "correction_bias": torch.zeros(12)}, "n_group is 12 with 12 experts; .* of at least 2"),
        ({"topk_group": 2}, "topk_group is 2; it must be from 1 to 1"),
        ({"scoring_func": "relu"}, "scoring_func is 'relu'; use one of softmax, sigmoid"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0; it must be positive and finite"),
        ({"routed_scaling_factor": torch.ones(())}, r"routed_scaling_factor is tensor\(1.\); it must be positive and"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be True or False"),
        ({"kernel": torch.zeros(48, 12).half()}, "kernel is float16; beside hidden_states of float32 it is float32"),
        ({"kernel": torch.zeros(40, 12)}, "kernel has shape .40, 12.; it must be .* hidden_size = 48"),
        ({"kernel": torch.zeros(48, 0)}, "kernel has shape .48, 0.; no size of a router may be 0"),
    ],
)
def test_a_bad_call_is_refused(change, message):
    with pytest.raises(InvalidInput, match=message):
        ops.run(replace(route_call(1, 3), **change))


def test_no_token_has_no_experts():
    assert ops.run(route_call(1, 0))["topk_ids"].shape == (0, 3)
