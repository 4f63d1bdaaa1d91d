"""A linear map with what stands before and behind it, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn.ops.activations import gated
from torch_core.calls import LinearCall

__all__ = ["fused_linear"]


def fused_linear(call: LinearCall[jax.Array]) -> dict[str, jax.Array]:
    """Computes a checked call, rounded to its dtype behind each part; the norm in float32."""
    x = call.hidden_states
    if call.norm_weight is not None:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + call.norm_epsilon)
        x = wide.astype(x.dtype) * call.norm_weight
    out = x @ call.kernel
    if call.bias is not None:
        out = out + call.bias
    if call.activation is not None:
        out = gated(call.activation, out)
    return {"out": out if call.residual is None else call.residual + out}
