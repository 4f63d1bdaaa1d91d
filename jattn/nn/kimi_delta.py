"""KimiDeltaAttention: the gated delta rule with a gate for each key channel, as a Flax module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.nn.options import ConvSize, DType, Epsilon, Implementation, Size
from jattn.nn.states import ConvWeights, GatedDeltaNet, linears
from torch_core.base.limits import Limits, checked


class KimiDeltaAttention(GatedDeltaNet):
    """The layer of Kimi Linear (arXiv:2510.26692). Calls are as those of `GatedDeltaNet`.

    The products with the input are one: queries, keys, values, the compressed gates of channels and of results, and the
    step sizes, in this order.

    Args:
        num_heads: number of heads.
        in_features: width of the input and of the output.
        head_dim: elements of a head of queries, keys and values, and width of the compressed gates.
        conv_size: tokens that the convolution sees, 2 to 8.
        full_rank_gates: gates come from one product each, not from compressed ones.
        lower_bound: channels decay by `exp(lower_bound * sigmoid(rate * x))`; None for `exp(-rate * softplus(x))`.
        epsilon: term that the norm of the results adds to the mean square.
        dtype, param_dtype, kernel_init, dot_general: as in flax's modules; `A_log` and `dt_bias` are float32.
        implementation: as in `jattn.ops.gated_delta_rule`.
        rngs: source of the initial values.

    Raises:
        InvalidInput: an option of the wrong type or out of range.

    Example:
        >>> layer = KimiDeltaAttention(2, 12, head_dim=8, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 5, 12))).shape, layer.state_spec().shapes
        ((3, 5, 12), ((3, 48), (2, 8, 8)))
    """

    @checked
    def __init__(
        self,
        num_heads: Size,
        in_features: Size,
        *,
        head_dim: Size,
        conv_size: ConvSize = 4,
        full_rank_gates: bool = False,
        lower_bound: Annotated[float | None, Limits(-1e3, -1e-3, also=", or None")] = None,
        epsilon: Epsilon = 1e-5,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        kernel_init: Callable[..., Any] = nnx.initializers.lecun_normal(),  # noqa: B008
        dot_general: Callable[..., Any] = jax.lax.dot_general,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.num_heads = self.num_kv_heads = num_heads
        self.head_dim = self.key_dim = self.value_dim = head_dim
        self.in_features = in_features
        self.implementation, self.lower_bound = implementation, lower_bound
        size = num_heads * head_dim
        self.gate_size = size if full_rank_gates else head_dim
        linear = linears(dtype, param_dtype, kernel_init, dot_general, rngs)
        self.in_proj = linear(in_features, 3 * size + 2 * self.gate_size + num_heads)
        self.f_b_proj, self.g_b_proj = (None if full_rank_gates else linear(head_dim, size) for _ in range(2))
        self.conv1d = ConvWeights(3 * size, conv_size, param_dtype=param_dtype, rngs=rngs)
        self.dt_bias = nnx.Param(jnp.ones(size, jnp.float32))
        decays = jax.random.uniform(rngs.params(), (num_heads,), jnp.float32, 1.0, 16.0)
        self.A_log = nnx.Param(jnp.log(decays))
        self.norm = nnx.RMSNorm(head_dim, epsilon=epsilon, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)
        self.out_proj = linear(size, in_features)

    def _read(self, projected: jax.Array) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
        inner = self.gate_size
        ends = np.cumsum((3 * self.num_heads * self.head_dim, inner, inner, self.num_heads))
        # A device's part of a model may have unused columns at the end.
        _, forget, gate, beta, _ = jnp.split(projected, ends, axis=-1)
        forget = forget if self.f_b_proj is None else self.f_b_proj(forget)
        gate = gate if self.g_b_proj is None else self.g_b_proj(gate)
        decays = self._decays(self._heads(forget.astype(jnp.float32) + self.dt_bias[...][None]))
        return jax.nn.sigmoid(beta.astype(jnp.float32)), {"gk": decays}, jax.nn.sigmoid(gate.astype(jnp.float32))

    def _decays(self, x: jax.Array) -> jax.Array:
        """Returns the logarithms of the factors of the state, [tokens, heads, head_dim]."""
        rate = jnp.exp(self.A_log[...])[None, :, None]
        if self.lower_bound is None:
            return -rate * jax.nn.softplus(x)
        return self.lower_bound * jax.nn.sigmoid(rate * x)

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], self.num_heads, self.head_dim)
