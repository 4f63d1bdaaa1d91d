"""Activations of feed-forward layers, by the names of Hugging Face's `hidden_act`."""

from __future__ import annotations

import functools
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


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    # By the hyperbolic tangent.
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), jax.nn.gelu),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
