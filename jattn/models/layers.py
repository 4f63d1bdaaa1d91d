"""The building blocks of a decoder layer: linear, RMS norm, gated feed-forward and dense causal attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.models.config import ModelConfig

__all__ = ["GatedMLP", "Linear", "RMSNorm", "dense_causal_attention"]


class Linear(nnx.Module):
    """`x @ kernel + bias`, the kernel stored `[in, out]`.

    That order is the fast one for a few rows on XLA's CPU backend: at 8 rows a step with `[out, in]` kernels
    (the order of a Hugging Face file) took 1.6 times as long.

    The bits of a row do not depend on the other rows, but they do depend on how many there are: that backend
    (jaxlib 0.10.2) has one order of summation for 2 to 32 rows and another for a single row and for 64 or more.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        use_bias: whether there is one.
        dtype: of the parameters, by name.
        rngs: source of the initial values.
    """

    def __init__(self, in_features: int, out_features: int, *, use_bias: bool, dtype: str, rngs: nnx.Rngs) -> None:
        init = jax.nn.initializers.normal(0.02)
        self.kernel = nnx.Param(init(rngs.params(), (in_features, out_features), jnp.dtype(dtype)))
        self.bias = nnx.Param(jnp.zeros((out_features,), jnp.dtype(dtype))) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Projects `[..., in]` to `[..., out]`."""
        y = x @ self.kernel[...]
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, in float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

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
        options = {"use_bias": config.mlp_bias, "dtype": config.dtype, "rngs": rngs}
        self.gate_up_proj = Linear(width, 2 * inner, **options)
        self.down_proj = Linear(inner, width, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., hidden]` to `[..., hidden]`."""
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)


def dense_causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float, sliding_window: int | None = None
) -> jax.Array:
    """Attends within each row of a batch, without a cache; differentiable.

    Args:
        query: [batch, tokens, num_heads, head_dim].
        key: [batch, tokens, num_kv_heads, head_dim].
        value: the same shape as `key`.
        scale: factor on the scores.
        sliding_window: tokens that a query sees, its own included; None for all before it.

    Returns:
        [batch, tokens, num_heads, head_dim] in the dtype of `query`; scores and softmax are float32.
    """
    batch, tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    grouped = query.reshape(batch, tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=jnp.float32) * scale
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None, :]
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(query.shape)
