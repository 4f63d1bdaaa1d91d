"""The building blocks of a decoder layer: linear, RMS norm and gated feed-forward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.models.config import ModelConfig

__all__ = ["INITIALIZER", "GatedMLP", "RMSNorm", "linear"]

#: Of embeddings and kernels, as Llama was initialised.
INITIALIZER = jax.nn.initializers.normal(0.02)


def linear(in_features: int, out_features: int, *, use_bias: bool, rngs: nnx.Rngs, **options: Any) -> nnx.Linear:
    """Returns `x @ kernel + bias`, the kernel stored `[in, out]`.

    That order is the fast one for a few rows on XLA's CPU backend: at 8 rows a step with `[out, in]` kernels
    (the order of a Hugging Face file) took 1.6 times as long.

    The bits of a row do not depend on the other rows, but they do depend on how many there are: that backend
    (jaxlib 0.10.2) has one order of summation for 2 to 32 rows and another for a single row and for 64 or more.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        use_bias: whether there is one.
        rngs: source of the initial values.
        **options: of `nnx.Linear`; `param_dtype` is the dtype of the parameters.
    """
    return nnx.Linear(in_features, out_features, use_bias=use_bias, kernel_init=INITIALIZER, rngs=rngs, **options)


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, in float32 (Zhang and Sennrich 2019, arXiv:1910.07467).

    It rounds to the model's dtype before it multiplies by the weight, as the models were trained: in bfloat16 every
    bit is that of Hugging Face's. `nnx.RMSNorm` rounds once, after the weight, and a quarter of its bits differ.
    """

    def __init__(self, features: int, *, epsilon: float, dtype: str) -> None:
        self.weight = nnx.Param(jnp.ones((features,), jnp.dtype(dtype)))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises `[..., features]`; keeps shape and dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return wide.astype(x.dtype) * self.weight[...]


class GatedMLP(nnx.Module):
    """The SwiGLU feed-forward layer (Shazeer 2020, arXiv:2002.05202); gate and up share one matrix product."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        options = {"use_bias": config.mlp_bias, "param_dtype": jnp.dtype(config.dtype), "rngs": rngs}
        self.gate_up_proj = linear(width, 2 * inner, **options)
        self.down_proj = linear(inner, width, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., hidden]` to `[..., hidden]`."""
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)
