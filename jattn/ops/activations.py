"""Activations of feed-forward layers, by the names of Hugging Face's `hidden_act`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


def activated(hidden_act: str, x: jax.Array) -> jax.Array:
    """Returns `act(x)`."""
    return _ACTIVATIONS[hidden_act](x)


def gated(hidden_act: str, gate_up: jax.Array) -> jax.Array:
    """Returns `act(gate) * up` of `[..., gate | up]`."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    if hidden_act == "swigluoai":
        # gpt-oss (arXiv:2508.10925): a clamped gate with the sigmoid's slope of GELU, and 1 added to the gated values.
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    return _ACTIVATIONS[hidden_act](gate) * up


def _gelu_by_tanh(x: jax.Array) -> jax.Array:
    # 1 + tanh(u) is 2 * sigmoid(2 * u), of which results are as exact as torch's on XLA's CPU backend. Its tanh (jaxlib
    # 0.10.2) rounds 1.5 times as much, to one side: logits of a Gemma 4 were off by 3.8e-4, and are by 3.2e-5.
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), _gelu_by_tanh),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
