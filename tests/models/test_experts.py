"""SparseMLP: every token reaches its experts, however uneven the router is, and by either way of computing them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.llm.models import MoEConfig
from jattn.llm.models.experts import SparseMLP
from jattn.ops.activations import gated
from jattn.ops.expert_products import ExpertKernels
from jattn.ops.routed import by_groups, by_rows
from tests.support.tiny_models import tiny_config
from torch_core.base.errors import InvalidInput

MOE = MoEConfig(num_experts=5, num_experts_per_tok=2, intermediate_size=24, router_bias=True, expert_bias=True)


def layer(seed, moe=MOE) -> Any:
    module = SparseMLP(tiny_config(moe=moe), rngs=nnx.Rngs(seed))
    random = np.random.default_rng(seed)
    graph, state = nnx.split(module)
    drawn = jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.3, leaf.shape), leaf.dtype), state)
    return nnx.merge(graph, drawn)


def rows(seed, count):
    return jnp.asarray(np.random.default_rng(seed + 1).normal(size=(count, 48)), jnp.float32)


def by_definition(module, x):
    """Each row's experts one after the other, in float64."""
    weights, experts = (np.asarray(part, np.float64) for part in module.route(x))
    up, down = module.gate_up_proj, module.down_proj
    out = np.zeros(x.shape)
    for row, (token_weights, chosen) in enumerate(zip(weights, experts.astype(int), strict=True)):
        for weight, expert in zip(token_weights, chosen, strict=True):
            inner = np.asarray(x[row], np.float64) @ np.asarray(up.kernel[expert], np.float64) + bias_of(up, expert)
            gate, value = np.split(inner, 2)
            inner = gate / (1 + np.exp(-gate)) * value
            out[row] += weight * (inner @ np.asarray(down.kernel[expert], np.float64) + bias_of(down, expert))
    return out


def bias_of(linear, expert):
    return 0.0 if linear.bias is None else linear.bias[expert]


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_a_layer_is_the_weighted_sum_of_each_tokens_experts(count, seed):
    module, x = layer(seed), rows(seed, count)
    expected = by_definition(module, x)
    np.testing.assert_allclose(module(x), expected, rtol=0, atol=64 * 2.0**-23 * np.abs(expected).max())


def test_gathered_and_grouped_experts_agree(seed):
    module, x = layer(seed), rows(seed, 6)
    experts, gate_up, down = module.route(x)[1], module.gate_up_proj, module.down_proj
    first, second = (ExpertKernels(linear.kernel[...], linear.bias[...]) for linear in (gate_up, down))
    silu = functools.partial(gated, "silu")
    gathered, grouped = (routed(first, second, silu, x, experts, 5)[0] for routed in (by_rows, by_groups))
    np.testing.assert_allclose(gathered, grouped, rtol=0, atol=64 * 2.0**-23 * np.abs(gathered).max())


def test_no_token_is_dropped_when_all_go_to_one_expert(seed):
    module, x = layer(seed), rows(seed, 33)
    module.router.bias = nnx.Param(jnp.asarray([0.0, 0.0, 60.0, 30.0, 0.0]))
    assert np.asarray(module.route(x)[1]).tolist() == [[2, 3]] * 33
    expected = by_definition(module, x)
    np.testing.assert_allclose(module(x), expected, rtol=0, atol=64 * 2.0**-23 * np.abs(expected).max())


def test_a_row_does_not_depend_on_the_rows_beside_it(seed):
    module, x = layer(seed), rows(seed, 16)
    other = x.at[1:].set(rows(seed + 7, 15))
    np.testing.assert_array_equal(module(x)[0], module(other)[0])


def test_weights_of_a_token_sum_to_one_unless_they_are_shares_of_all(seed):
    x = rows(seed, 9)
    normed = layer(seed).route(x)[0]
    shares = layer(seed, MoEConfig(num_experts=5, num_experts_per_tok=2, intermediate_size=24, norm_topk_prob=False))
    np.testing.assert_allclose(normed.sum(-1), 1, rtol=2.0**-22)
    assert (np.asarray(shares.route(x)[0].sum(-1)) < 1).all()


GROUPED: dict[str, Any] = {
    "num_experts": 12, "num_experts_per_tok": 4, "intermediate_size": 8, "n_group": 4, "topk_group": 2
}  # fmt: skip


@pytest.mark.parametrize("corrected", [False, True])
def test_experts_of_the_best_groups_alone_are_chosen(corrected, seed):
    """Row by row in float64: groups by their best expert, or by their best two with the bias, which weighs nothing."""
    func = "sigmoid" if corrected else "softmax"
    moe = MoEConfig(**GROUPED, scoring_func=func, score_correction_bias=corrected, routed_scaling_factor=2.5)
    module, x = layer(seed, moe), rows(seed, 20)
    logits = np.asarray(x, np.float64) @ np.asarray(module.router.kernel[...], np.float64)
    scores = 1 / (1 + np.exp(-logits)) if corrected else np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    choice = scores + np.asarray(module.e_score_correction_bias[...]) if corrected else scores
    for row, (weights, experts) in enumerate(zip(*map(np.asarray, module.route(x)), strict=True)):
        best = np.sort(choice[row].reshape(4, 3), axis=-1)[:, -2 if corrected else -1 :].sum(-1)
        allowed = [index for index in range(12) if index // 3 in np.argsort(best)[-2:]]
        chosen = sorted(allowed, key=lambda index: -choice[row, index])[:4]
        assert experts.tolist() == chosen
        expected = 2.5 * scores[row, chosen] / scores[row, chosen].sum()
        np.testing.assert_allclose(weights, expected, rtol=2.0**-18)


def test_experts_are_those_of_a_router_of_ones_own(seed):
    module, x = layer(seed, MoEConfig(**GROUPED)), rows(seed, 20)
    options = {"use_bias": False, "lora_rank": 2, "b_initializer": nnx.initializers.normal()}
    lora = nnx.LoRALinear(48, 12, **options, rngs=nnx.Rngs(seed))
    plain = layer(seed, MoEConfig(**GROUPED))
    module.router, plain.router.kernel[...] = lora, lora.kernel[...] + lora.lora.lora_a[...] @ lora.lora.lora_b[...]

    found, expected = module.route(x), plain.route(x)

    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)


def test_shared_experts_are_added_as_they_are(seed):
    moe = MoEConfig(num_experts=5, num_experts_per_tok=2, intermediate_size=24, n_shared_experts=2)
    module, x = layer(seed, moe), rows(seed, 3)
    routed = by_definition(module, x)
    expected = routed + np.asarray(module.shared_expert(x), np.float64)
    np.testing.assert_allclose(module(x), expected, rtol=0, atol=64 * 2.0**-23 * np.abs(expected).max())


def test_weights_of_scores_that_are_all_zero_are_finite(seed):
    module = layer(seed, MoEConfig(**GROUPED, scoring_func="sigmoid", score_correction_bias=True))
    module.router.kernel = nnx.Param(jnp.full((48, 12), -100.0))
    assert bool(jnp.isfinite(module.route(jnp.ones((2, 48)))[0]).all())


def test_experts_have_gradients(seed):
    graph, state = nnx.split(layer(seed))
    x = rows(seed, 8)
    gradients = jax.jit(jax.grad(lambda state: jnp.square(nnx.merge(graph, state)(x)).sum()))(state)
    assert all(bool(jnp.isfinite(leaf).all() and jnp.abs(leaf).max() > 0) for leaf in jax.tree.leaves(gradients))


def test_a_config_without_experts_is_refused():
    with pytest.raises(InvalidInput, match=r"^config\.moe is None; a SparseMLP needs a MoEConfig\.$"):
        SparseMLP(tiny_config(), rngs=nnx.Rngs(0))
