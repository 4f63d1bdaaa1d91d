"""The dense forward pass equals transformers', can be trained, and works in both nnx modes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.llm.load import load_model
from jattn.llm.models import RopeScaling
from tests.support.tiny_models import (
    dense_logits,
    reference_bound,
    tiny_config,
    tiny_model,
    transformers_logits,
    write_tiny_model,
)
from torch_core.base.errors import InvalidInput

LLAMA3 = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64)
VARIANTS = {
    "grouped": {},
    "multi-head": {"num_key_value_heads": 4},
    "one-kv-head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "qwen2": {"attention_bias": True},
    "mistral-window": {"sliding_window": 7},
    "linear-rope": {"rope_scaling": RopeScaling(rope_type="linear", factor=4.0)},
    "llama3-rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "wide-heads": {"head_dim": 32},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant, tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed, **VARIANTS[variant])
    token_ids = np.random.default_rng(seed).integers(0, 257, (2, 33))
    model, _, _ = load_model(folder, implementation="xla")
    ours = np.asarray(model.forward_dense(jnp.asarray(token_ids, jnp.int32)), np.float64)
    exact = transformers_logits(folder, token_ids, "float64")
    assert np.abs(ours - exact).max() <= reference_bound(exact, transformers_logits(folder, token_ids))


def test_a_later_token_never_changes_earlier_logits(seed):
    model = tiny_model(tiny_config(), seed)
    token_ids = np.random.default_rng(seed).integers(0, 256, 12).astype(np.int32)
    changed = token_ids.copy()
    changed[8] += 1
    before, after = dense_logits(model, token_ids), dense_logits(model, changed)
    np.testing.assert_array_equal(before[:8], after[:8])
    assert not np.array_equal(before[8:], after[8:])


def test_low_precision_models_return_float32_logits(seed):
    model = tiny_model(tiny_config(dtype="bfloat16"), seed)
    logits = jax.eval_shape(model.forward_dense, jnp.zeros((1, 4), jnp.int32))
    assert logits.dtype == jnp.float32


def test_a_few_gradient_steps_lower_the_loss(seed):
    config = tiny_config(tie_word_embeddings=True, num_hidden_layers=1)
    graph, parameters = nnx.split(tiny_model(config, seed))
    rows = jnp.asarray(np.random.default_rng(seed).integers(0, 257, (2, 17)), jnp.int32)

    @jax.jit
    def loss_and_gradient(parameters, key):
        def loss_of(parameters):
            model = nnx.merge(graph, parameters)
            logits = model.forward_dense(rows[:, :-1], dropout_rate=0.05, dropout_key=key)
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], -1).mean()

        return jax.value_and_grad(loss_of)(parameters)

    losses = []
    for step in range(8):
        loss, gradient = loss_and_gradient(parameters, jax.random.key(step))
        losses.append(float(loss))
        parameters = jax.tree.map(lambda value, slope: value - 0.1 * slope, parameters, gradient)
    assert losses[-1] < 0.8 * losses[0]


def test_dropout_without_a_key_is_refused(seed):
    model = tiny_model(tiny_config(), seed)
    with pytest.raises(
        InvalidInput, match=r"^dropout_rate is 0\.1 but dropout_key is None; pass a jax\.random\.key\.$"
    ):
        model.forward_dense(jnp.zeros((1, 2), jnp.int32), dropout_rate=0.1)


def test_a_dropout_rate_of_one_is_refused(seed):
    model = tiny_model(tiny_config(), seed)
    with pytest.raises(InvalidInput, match=r"^dropout_rate is 1\.0; it must be at least 0 and less than 1\.$"):
        model.forward_dense(jnp.zeros((1, 2), jnp.int32), dropout_rate=1.0, dropout_key=jax.random.key(0))


@pytest.mark.parametrize("graph_mode", [True, False], ids=["graph", "tree"])
def test_the_model_runs_under_nnx_jit_in_both_modes(graph_mode, seed):
    model = tiny_model(tiny_config(), seed)
    token_ids = np.arange(6, dtype=np.int32)
    forward = nnx.jit(lambda model, token_ids: model.forward_dense(token_ids), graph=graph_mode)
    np.testing.assert_allclose(forward(model, token_ids[None])[0], dense_logits(model, token_ids), rtol=0, atol=1e-4)
