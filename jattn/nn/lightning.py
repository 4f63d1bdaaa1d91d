"""The layer of MiniMax-Text-01: linear attention whose state decays at a rate of each head, a norm and a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn import ops
from jattn.metadata import AttentionMetadata
from jattn.nn.options import DType, Epsilon, Implementation, Size
from jattn.nn.states import linears, packed_sequences
from torch_core.base.limits import checked
from torch_core.base.specs import StateCacheSpec


class LightningAttention(nnx.Module):
    """Lightning attention (arXiv 2401.04658); parameters are named and arranged as in Hugging Face's MiniMax. Calls are
    as those of `GatedDeltaNet`, with one array of states.

    It is Mamba-2's scan with step sizes of 1, whose B, x and C are the keys, values and queries of each head.

    Args:
        num_heads: number of heads.
        in_features: width of the input and of the output.
        head_dim: elements of a head of queries, keys and values.
        epsilon: term that the norm of the results, over all heads, adds to the mean square.
        dtype, param_dtype, kernel_init, dot_general: as in flax's modules; `slope_rate`, the heads' rates of decay, is
            float32 and has no gradient.
        implementation: as in `jattn.ops.mamba_chunk_scan`.
        rngs: source of the initial values.

    Raises:
        InvalidInput: an option of the wrong type or out of range.

    Example:
        >>> layer = LightningAttention(4, 12, head_dim=6, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 5, 12))).shape, layer.state_spec().shapes
        ((3, 5, 12), ((4, 6, 6),))
    """

    @checked
    def __init__(
        self,
        num_heads: Size,
        in_features: Size,
        *,
        head_dim: Size,
        epsilon: Epsilon = 1e-6,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        kernel_init: Callable[..., Any] = nnx.initializers.lecun_normal(),  # noqa: B008
        dot_general: Callable[..., Any] = jax.lax.dot_general,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.num_heads, self.in_features, self.head_dim = num_heads, in_features, head_dim
        self.implementation = implementation
        inner = num_heads * head_dim
        linear = linears(dtype, param_dtype, kernel_init, dot_general, rngs)
        self.qkv_proj = linear(in_features, 3 * inner)
        self.output_gate = linear(in_features, inner)
        self.out_proj = linear(inner, in_features)
        self.norm = nnx.RMSNorm(inner, epsilon=epsilon, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)
        self.slope_rate = nnx.Param(2.0 ** (-8 * jnp.arange(1, num_heads + 1, dtype=jnp.float32) / num_heads))

    def state_spec(self, dtype: str = "float32") -> StateCacheSpec:
        """Returns the layout of the layer's states, which are float32 for every `dtype` of the model."""
        shape = self.num_heads, self.head_dim, self.head_dim
        return StateCacheSpec(shapes=(shape,), dtypes=("float32",), split_axes=(0,))

    def __call__(
        self, inputs: jax.Array, *, states: jax.Array | None = None, metadata: AttentionMetadata | None = None
    ) -> Any:
        """Computes the layer within each row, or from and to the states of the sequences; see `GatedDeltaNet`."""
        sequences, longest = packed_sequences(inputs, self.in_features, states, metadata)
        rows = inputs.reshape(-1, self.in_features)
        heads = jax.nn.silu(self.qkv_proj(rows)).reshape(len(rows), self.num_heads, -1)
        query, key, value = jnp.split(heads, 3, axis=-1)
        out, states = ops.mamba_chunk_scan(
            value,
            jnp.ones(value.shape[:2], value.dtype),
            -jax.lax.stop_gradient(self.slope_rate[...]),
            key,
            query,
            states=states,
            max_query_len=longest,
            implementation=self.implementation,
            **sequences,
        )
        out = self.norm(out.reshape(len(rows), -1)).astype(rows.dtype) * jax.nn.sigmoid(self.output_gate(rows))
        out = self.out_proj(out.reshape(*inputs.shape[:-1], -1))
        return out if metadata is None else (out, states)
