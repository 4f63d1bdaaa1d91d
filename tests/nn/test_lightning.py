"""Lightning attention: its recurrence, token by token, and rates that are not trained."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.nn import LightningAttention

HEADS, FEATURES = 2, 5


def recurrence(layer: LightningAttention, x: np.ndarray, kind: type) -> np.ndarray:
    """The layer's results of tokens [tokens, features] in numpy, by the states after each token."""
    names = ("qkv_proj", "output_gate", "out_proj")
    qkv, gates, last = (np.asarray(getattr(layer, name).kernel[...], kind) for name in names)
    decay, x = np.exp(-np.asarray(layer.slope_rate[...], kind)), x.astype(kind)
    heads = x @ qkv
    dim = layer.head_dim
    query, key, value = np.split((heads / (1 + np.exp(-heads))).reshape(len(x), HEADS, 3 * dim), 3, axis=-1)
    state, rows = np.zeros((HEADS, dim, dim), kind), []
    for token in range(len(x)):
        state = state * decay[:, None, None] + key[token, :, :, None] * value[token, :, None, :]
        rows.append((query[token, :, :, None] * state).sum(1).ravel())
    out = np.stack(rows)
    out = out / np.sqrt((out * out).mean(-1, keepdims=True) + kind(1e-6))
    return (out / (1 + np.exp(-(x @ gates)))) @ last


def test_the_layer_is_its_recurrence_and_does_not_train_its_rates(seed):
    layer = LightningAttention(HEADS, FEATURES, head_dim=3, rngs=nnx.Rngs(seed))
    x = np.random.default_rng(seed).normal(size=(7, FEATURES)).astype(np.float32)
    exact, narrow = (recurrence(layer, x, kind) for kind in (np.float64, np.float32))

    def total(layer: LightningAttention) -> tuple[jax.Array, jax.Array]:
        out = layer(jnp.asarray(x))
        return out.sum(), out

    (_, found), gradients = nnx.jit(nnx.value_and_grad(total, has_aux=True))(layer)

    error = np.abs(np.asarray(found, np.float64) - exact).max()
    assert error <= 2 * (np.abs(narrow - exact).max() + 2.0**-23 * np.abs(exact).max())
    assert not np.asarray(gradients["slope_rate"][...]).any()
    assert all(np.asarray(each).any() for each in jax.tree.leaves(gradients["qkv_proj"]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_its_kernels_are_as_exact_as_jnp_or_its_recurrence_in_the_layer(dtype, seed):
    x = np.random.default_rng(seed).normal(size=(2, 300, 64)).astype(np.float32)
    errors = {}
    for implementation in ("triton", "xla"):
        layer = LightningAttention(
            HEADS, 64, head_dim=128, dtype=dtype, implementation=implementation, rngs=nnx.Rngs(seed)
        )
        exact = np.stack([recurrence(layer, row, np.float64) for row in x])
        found = np.asarray(nnx.jit(lambda layer, x: layer(x))(layer, jnp.asarray(x, dtype)), np.float64)
        errors[implementation] = np.abs(found - exact).max()
    # A decay is the same for all tokens, so its rounding adds up where a state goes through it token by token, as that
    # of float32 kernels does.
    narrow = np.stack([recurrence(layer, row, np.float32) for row in x])
    allowed = max(errors["xla"], np.abs(narrow - exact).max())
    assert errors["triton"] <= 2 * (allowed + float(jnp.finfo(dtype).eps) * np.abs(exact).max())
