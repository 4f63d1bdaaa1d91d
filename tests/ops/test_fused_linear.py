"""A linear map with what stands around it on JAX arrays: every implementation that runs here, and its derivative."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn.ops import fused_linear
from tests.ops.runner import IMPLEMENTATIONS
from tests.support.attention_cases import to_torch
from tests.support.linear_cases import assert_linear_as_exact_as_torch, linear_call
from torch_core.errors import InvalidInput


def in_jax(call):
    arrays = {
        name: jnp.asarray(x.float().numpy(), str(x.dtype).removeprefix("torch.")) for name, x in call.arrays().items()
    }
    return arrays, {"norm_epsilon": call.norm_epsilon, "activation": call.activation}


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_norm_product_activation_and_sum_are_one_operation(implementation, activation, seed):
    call = linear_call(seed, 1, dtype="bfloat16", norm=True, bias=True, residual=True, activation=activation)
    arrays, options = in_jax(call)
    out = jax.jit(lambda arrays: fused_linear(**arrays, **options, implementation=implementation))(arrays)
    assert_linear_as_exact_as_torch(call, to_torch(out))


def test_gradients_are_those_of_torch(seed):
    call = linear_call(seed, 5, norm=True, residual=True, activation="silu")
    arrays, options = in_jax(call)
    found = jax.grad(lambda arrays: jnp.square(fused_linear(**arrays, **options)).sum())(arrays)
    x = {name: each.double().requires_grad_() for name, each in call.arrays().items()}
    normed = x["hidden_states"] * (x["hidden_states"].square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    gate, up = (normed * x["norm_weight"] @ x["kernel"]).chunk(2, -1)
    (x["residual"] + torch.nn.functional.silu(gate) * up).square().sum().backward()
    for name, gradient in found.items():
        leaf = x[name].grad
        assert leaf is not None
        exact = leaf.numpy()
        np.testing.assert_allclose(gradient, exact, rtol=0, atol=2.0**-17 * np.abs(exact).max(), err_msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual": torch.zeros(2, 7)}, r"residual has shape \[2, 7\]; it must have the result's 48 columns"),
        ({"activation": "swish"}, "activation is 'swish'; use None or one of silu"),
        ({"norm_weight": torch.zeros(80, dtype=torch.float16)}, "norm_weight is float16; .* it is float32"),
        ({"kernel": torch.zeros(80, 5), "activation": "silu"}, "kernel has 5 columns"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, message, seed):
    arrays, options = in_jax(linear_call(seed, 2))
    changed = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in changes.items()}
    with pytest.raises(InvalidInput, match=message):
        fused_linear(**{**arrays, **options, **changed})


def test_an_epsilon_below_zero_is_refused(seed):
    with pytest.raises(InvalidInput, match="norm_epsilon is -1"):
        dataclasses.replace(linear_call(seed, 1), norm_epsilon=-1.0)
