"""The layer of Mamba-2: projections, a short convolution, the state space model and a gated norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn import ops
from jattn.metadata import AttentionMetadata
from jattn.nn.options import ConvSize, DType, Epsilon, Implementation, Size
from jattn.nn.states import ConvWeights, linears, packed_sequences
from torch_core.base.checks import check_bounds
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import checked
from torch_core.base.specs import StateCacheSpec


class Mamba2(nnx.Module):
    """The layer of Mamba-2 (arXiv 2405.21060); parameters are named and arranged as in Hugging Face's models. Calls are
    as those of `GatedDeltaNet`.

    Args:
        num_heads: number of heads of the state space model.
        in_features: width of the input and of the output.
        head_dim: rows of a head's state.
        state_size: columns of a head's state.
        num_groups: groups of heads that share B and C; it divides num_heads. The norm is over each group, too.
        conv_size: tokens that the convolution sees, 2 to 8.
        use_bias, conv_bias, out_bias: add biases to the first projection, the convolution and the last projection.
        norm: "gated" normalises the results times the gate, "before_gate" the results; None only multiplies them.
        dt_limit: the least and the largest step size.
        multipliers: factors of the gate, x, B, C and dt after the first projection; None for none.
        epsilon: term that the norm adds to the mean square.
        dtype, param_dtype, kernel_init, dot_general: as in flax's modules; `A_log`, `D` and `dt_bias` are float32.
        implementation: as in `jattn.ops.mamba_chunk_scan`.
        rngs: source of the initial values.

    Raises:
        InvalidInput: an option of the wrong type or out of range.

    Example:
        >>> layer = Mamba2(4, 12, head_dim=6, state_size=8, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 5, 12))).shape, layer.state_spec().shapes
        ((3, 5, 12), ((3, 40), (4, 6, 8)))
    """

    @checked
    def __init__(
        self,
        num_heads: Size,
        in_features: Size,
        *,
        head_dim: Size,
        state_size: Size,
        num_groups: Size = 1,
        conv_size: ConvSize = 4,
        use_bias: bool = False,
        conv_bias: bool = True,
        out_bias: bool = False,
        norm: str | None = "gated",
        dt_limit: Annotated[tuple[float, float], check_bounds] = (0.0, float("inf")),
        multipliers: tuple[float, float, float, float, float] | None = None,
        epsilon: Epsilon = 1e-5,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        kernel_init: Callable[..., Any] = nnx.initializers.lecun_normal(),  # noqa: B008
        dot_general: Callable[..., Any] = jax.lax.dot_general,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        if num_heads % num_groups:
            raise InvalidInput("num_heads", value=num_heads, wanted=f"it must be a multiple of num_groups {num_groups}")
        if norm not in (None, "gated", "before_gate"):
            raise InvalidInput("norm", value=norm, wanted="it must be 'gated', 'before_gate' or None")
        self.num_heads, self.num_groups, self.in_features = num_heads, num_groups, in_features
        self.head_dim, self.state_size, self.epsilon = head_dim, state_size, epsilon
        self.dt_limit, self.multipliers, self.norm_kind = dt_limit, multipliers, norm
        self.implementation = implementation
        linear = linears(dtype, param_dtype, kernel_init, dot_general, rngs)
        inner, mixed = self._sizes
        self.in_proj = linear(in_features, self._num_columns, use_bias=use_bias)
        self.conv1d = ConvWeights(mixed, conv_size, use_bias=conv_bias, param_dtype=param_dtype, rngs=rngs)
        steps = jax.random.uniform(rngs.params(), (num_heads,), jnp.float32, math.log(1e-3), math.log(0.1))
        steps = jnp.exp(steps)
        # The inverse of softplus.
        self.dt_bias = nnx.Param(steps + jnp.log(-jnp.expm1(-steps)))
        self.A_log = nnx.Param(jnp.log(jnp.arange(1, num_heads + 1, dtype=jnp.float32)))
        self.D = nnx.Param(jnp.ones(num_heads, jnp.float32))
        self.norm = None if norm is None else _GroupNorm(inner, param_dtype)
        self.out_proj = linear(inner, in_features, use_bias=out_bias)

    @property
    def _num_columns(self) -> int:
        """Columns of the first projection."""
        inner, mixed = self._sizes
        return inner + mixed + self.num_heads

    @property
    def _first_column(self) -> int:
        """The column of the first projection that is the gate's first; those before it and behind are not read."""
        return 0

    @property
    def _sizes(self) -> tuple[int, int]:
        """Channels of the gate and of x, and of the convolution."""
        inner = self.num_heads * self.head_dim
        return inner, inner + 2 * self.num_groups * self.state_size

    def state_spec(self, dtype: str = "float32") -> StateCacheSpec:
        """Returns the layout of the layer's states: of the convolution in `dtype`, and matrices in float32."""
        return self.conv1d.state_spec((self.num_heads, self.head_dim, self.state_size), dtype=dtype)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        states: tuple[jax.Array, jax.Array] | None = None,
        metadata: AttentionMetadata | None = None,
    ) -> Any:
        """Computes the layer within each row, or from and to the states of the sequences; see `GatedDeltaNet`."""
        found = packed_sequences(inputs, self.in_features, states, metadata, num_states=2)
        return self._mixed(self.in_proj(inputs), states, *found)

    def _mixed(self, projected: jax.Array, states: Any, sequences: dict[str, Any], longest: int) -> Any:
        """Computes the layer from the results [..., columns] of the first projection."""
        conv_states, matrices = (None, None) if states is None else states
        (inner, channels), first, front = self._sizes, self._first_column, projected.shape[:-1]
        projected = projected.reshape(-1, projected.shape[-1])
        groups = (channels - inner) // 2
        sizes = (inner, groups, groups)
        if self.multipliers is not None and any(factor != 1 for factor in self.multipliers):
            # A device's part of a model may have unused columns behind.
            unused = projected.shape[1] - first - inner - channels - self.num_heads
            counts = (first, inner, *sizes, self.num_heads, unused)
            factors = np.repeat(np.array((1.0, *self.multipliers, 1.0), projected.dtype), counts)
            projected = projected * factors[None]
        mixed, conv_states = self.conv1d(
            projected,
            conv_states,
            sequences,
            first_column=first + inner,
            out_sizes=sizes,
            activation="silu",
            implementation=self.implementation,
        )
        counts = (self.num_heads, self.num_groups, self.num_groups)
        x, weights, reads = (part.reshape(len(part), heads, -1) for part, heads in zip(mixed, counts, strict=True))
        out, matrices = ops.mamba_chunk_scan(
            x,
            projected,
            self.A_log[...],
            weights,
            reads,
            D=self.D[...],
            dt_bias=self.dt_bias[...],
            states=matrices,
            max_query_len=longest,
            dt_column=first + inner + channels,
            log_rates=True,
            dt_softplus=True,
            dt_limit=self.dt_limit,
            implementation=self.implementation,
            **sequences,
        )
        # XLA's GPU compiler (jaxlib 0.10) makes one kernel of gate and norm if it sees no heads in their operand.
        out = jax.lax.optimization_barrier(out.reshape(len(out), -1))
        out = self._gated(out.astype(jnp.float32), projected[:, first : first + inner].astype(jnp.float32))
        out = self.out_proj(out.astype(projected.dtype).reshape(*front, -1))
        return out if states is None else (out, (conv_states, matrices))

    def _gated(self, out: jax.Array, gate: jax.Array) -> jax.Array:
        """Returns float32[tokens, channels], the results after gate and norm."""
        gate = jax.nn.silu(gate)
        if self.norm is None:
            return out * gate
        before = self.norm_kind == "before_gate"
        groups = (out if before else out * gate).reshape(len(out), self.num_groups, -1)
        groups = groups * jax.lax.rsqrt(self._mean_squares(groups) + self.epsilon)
        out = groups.reshape(out.shape) * self.norm.weight[...].astype(jnp.float32)[None]
        return out * gate if before else out

    def _mean_squares(self, groups: jax.Array) -> jax.Array:
        """Returns float32[tokens, groups, 1] of float32[tokens, groups, channels]."""
        return (groups * groups).mean(-1, keepdims=True)


class _GroupNorm(nnx.Module):
    """The weight of a norm over groups of channels."""

    def __init__(self, channels: int, param_dtype: Any) -> None:
        self.weight = nnx.Param(jnp.ones(channels, param_dtype))
