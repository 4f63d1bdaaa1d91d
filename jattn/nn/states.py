"""Layers that keep a recurrent state: Gated DeltaNet (Qwen3-Next) and the gated short convolution (LFM2)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn import ops
from jattn.metadata import AttentionMetadata
from jattn.nn.checks import check_packed
from jattn.nn.norms import normalised
from jattn.nn.options import ConvSize, DType, Epsilon, Implementation, Size
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import checked
from torch_core.base.specs import StateCacheSpec


class GatedDeltaNet(nnx.Module):
    """The layer of Qwen3-Next and Qwen 3.5 (arXiv 2412.06464).

    The products with the input are one: queries, keys, values, the gates of results, the step sizes and the decays, in
    this order, and unused columns up to a multiple of 16. Other parameters are named and arranged as in Hugging Face's
    models.

    - `y = layer(x)` takes a batch `[batch..., length, features]`, with padding at the end of rows. It is
      differentiable.
    - `y, states = layer(x, states=states, metadata=metadata)` takes packed tokens `[tokens, features]` and the layer's
      states, and returns the updated states. One call takes prompts, chunks of prompts and decoded tokens.

    Args:
        num_heads: number of value heads.
        in_features: width of the input.
        num_kv_heads: number of query and key heads; it divides num_heads.
        key_dim, value_dim: elements of a key and of a value head.
        conv_size: tokens that the convolution sees, 2 to 8.
        out_features: width of the output; in_features by default.
        allow_neg_eigval: step sizes are from 0 to 2 instead of 0 to 1 (Grazzi et al. 2024, arXiv:2411.12537).
        epsilon: term that the norm of the results adds to the mean square.
        dtype, param_dtype, kernel_init, dot_general: as in flax's modules; `A_log` and `dt_bias` are float32.
        implementation: as in `jattn.ops.gated_delta_rule`.
        rngs: source of the initial values.

    Raises:
        InvalidInput: an option of the wrong type or out of range.

    Example:
        >>> layer = GatedDeltaNet(4, 12, num_kv_heads=2, key_dim=8, value_dim=6, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 5, 12))).shape, layer.state_spec().shapes
        ((3, 5, 12), ((3, 56), (4, 6, 8)))
    """

    @checked
    def __init__(
        self,
        num_heads: Size,
        in_features: Size,
        *,
        num_kv_heads: Size,
        key_dim: Size,
        value_dim: Size,
        conv_size: ConvSize = 4,
        out_features: Size | None = None,
        allow_neg_eigval: bool = False,
        epsilon: Epsilon = 1e-6,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        kernel_init: Callable[..., Any] = nnx.initializers.lecun_normal(),  # noqa: B008
        dot_general: Callable[..., Any] = jax.lax.dot_general,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        if num_heads % num_kv_heads:
            wanted = f"it must be a multiple of num_kv_heads {num_kv_heads}"
            raise InvalidInput("num_heads", value=num_heads, wanted=wanted)
        self.num_heads, self.num_kv_heads, self.in_features = num_heads, num_kv_heads, in_features
        self.key_dim, self.value_dim, self.epsilon = key_dim, value_dim, epsilon
        self.allow_neg_eigval = allow_neg_eigval
        self.dtype, self.implementation = dtype, implementation
        keys, values = num_kv_heads * key_dim, num_heads * value_dim
        linear = linears(dtype, param_dtype, kernel_init, dot_general, rngs)
        columns = 2 * keys + 2 * values + 2 * num_heads
        self.in_proj = linear(in_features, columns + (unused := unused_columns(columns)))
        if unused:
            kernel = self.in_proj.kernel[...]
            self.in_proj.kernel[...] = kernel.at[:, columns:].set(0)
        self.conv1d = ConvWeights(2 * keys + values, conv_size, param_dtype=param_dtype, rngs=rngs)
        self.dt_bias = nnx.Param(jnp.ones(num_heads, jnp.float32))
        decays = jax.random.uniform(rngs.params(), (num_heads,), jnp.float32, 0.01, 16.0)
        self.A_log = nnx.Param(jnp.log(decays))
        self.norm = nnx.RMSNorm(value_dim, epsilon=epsilon, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)
        self.out_proj = linear(values, out_features or in_features)

    def state_spec(self, dtype: str = "float32") -> StateCacheSpec:
        """Returns the layout of the layer's states: of the convolution in `dtype`, and matrices in float32."""
        return self.conv1d.state_spec((self.num_heads, self.value_dim, self.key_dim), dtype=dtype)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        states: tuple[jax.Array, jax.Array] | None = None,
        metadata: AttentionMetadata | None = None,
    ) -> Any:
        """Computes the layer within each row, or from and to the states of the sequences.

        Args:
            inputs: float[batch..., length, in_features]; with states, packed tokens float[tokens, in_features].
            states: arrays of `state_spec`, [num_slots, ...] each. They are consumed; use the returned ones.
            metadata: the batch of the step, built with `num_slots`; with states.

        Returns:
            float[batch..., length, out_features] or float[tokens, out_features]; with states, a pair of this and the
            updated states.

        Raises:
            InvalidInput: states without metadata or the reverse, or shapes that do not match.
        """
        sequences, longest = packed_sequences(inputs, self.in_features, states, metadata, num_states=2)
        conv_states, matrices = (None, None) if states is None else states
        keys, values = self.num_kv_heads * self.key_dim, self.num_heads * self.value_dim
        projected = self.in_proj(inputs.reshape(-1, self.in_features))
        beta, gates, factors = self._read(projected)
        mixed, conv_states = self.conv1d(
            projected,
            conv_states,
            sequences,
            first_column=0,
            out_sizes=(keys, keys, values),
            activation="silu",
            implementation=self.implementation,
        )
        counts = (self.num_kv_heads, self.num_kv_heads, self.num_heads)
        query, key, value = (x.reshape(len(x), heads, -1) for x, heads in zip(mixed, counts, strict=True))
        out, matrices = ops.gated_delta_rule(
            query,
            key,
            value,
            beta,
            states=matrices,
            max_query_len=longest,
            scale=self.key_dim**-0.5,
            use_qk_l2norm_in_kernel=True,
            implementation=self.implementation,
            **gates,
            **sequences,
        )
        out = (normalised(self.norm, out) * factors.reshape(out.shape)).astype(projected.dtype)
        out = self.out_proj(out.reshape(len(out), -1)).reshape(*inputs.shape[:-1], -1)
        return out if states is None else (out, (conv_states, matrices))

    def _read(self, projected: jax.Array) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
        """Returns step sizes, the logarithms of decays by the rule's keyword, and factors of the normalised results."""
        keys, values = self.num_kv_heads * self.key_dim, self.num_heads * self.value_dim
        ends = np.cumsum((2 * keys + values, values, 2 * self.num_heads))
        _, z, steps, _ = jnp.split(projected, ends, axis=-1)
        steps = steps.reshape(-1, 2, self.num_heads).astype(jnp.float32)
        gates = -jnp.exp(self.A_log[...])[None] * jax.nn.softplus(steps[:, 1] + self.dt_bias[...][None])
        beta = jax.nn.sigmoid(steps[:, 0]) * (1 + self.allow_neg_eigval)
        return beta, {"g": gates}, jax.nn.silu(z.astype(jnp.float32))


class ShortConv(nnx.Module):
    """The gated short convolution of LFM2; parameters are named as in Hugging Face's model. Calls are as those of
    `GatedDeltaNet`, with one array of states.

    Args:
        in_features: width of the input and of the output.
        conv_size: tokens that the convolution sees, 2 to 8.
        num_channels: channels of the convolution; in_features by default.
        use_bias: add biases to projections and convolution.
        dtype, param_dtype, kernel_init, dot_general: as in flax's modules.
        implementation: as in `jattn.ops.causal_conv1d`.
        rngs: source of the initial values.

    Raises:
        InvalidInput: an option of the wrong type or out of range.

    Example:
        >>> layer = ShortConv(12, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 5, 12))).shape, layer.state_spec().shapes
        ((3, 5, 12), ((2, 12),))
    """

    @checked
    def __init__(
        self,
        in_features: Size,
        *,
        conv_size: ConvSize = 3,
        num_channels: Size | None = None,
        use_bias: bool = False,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        kernel_init: Callable[..., Any] = nnx.initializers.lecun_normal(),  # noqa: B008
        dot_general: Callable[..., Any] = jax.lax.dot_general,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.in_features, self.implementation = in_features, implementation
        linear = linears(dtype, param_dtype, kernel_init, dot_general, rngs)
        channels = num_channels or in_features
        self.in_proj = linear(in_features, 3 * channels, use_bias=use_bias)
        self.conv = ConvWeights(channels, conv_size, use_bias=use_bias, param_dtype=param_dtype, rngs=rngs)
        self.out_proj = linear(channels, in_features, use_bias=use_bias)

    def state_spec(self, dtype: str = "float32") -> StateCacheSpec:
        """Returns the layout of the layer's states."""
        return self.conv.state_spec(dtype=dtype)

    def __call__(
        self, inputs: jax.Array, *, states: jax.Array | None = None, metadata: AttentionMetadata | None = None
    ) -> Any:
        """Computes the layer within each row, or from and to the states of the sequences; see `GatedDeltaNet`."""
        sequences, _ = packed_sequences(inputs, self.in_features, states, metadata)
        before, after, x = jnp.split(self.in_proj(inputs.reshape(-1, self.in_features)), 3, axis=-1)
        out, states = self.conv(before * x, states, sequences, implementation=self.implementation)
        out = self.out_proj((after * out).reshape(*inputs.shape[:-1], -1))
        return out if metadata is None else (out, states)


class ConvWeights(nnx.Module):
    """The weights [channels, width] and the bias of a depthwise convolution, at first as torch draws them."""

    def __init__(self, channels: int, width: int, *, use_bias: bool = False, param_dtype: Any, rngs: nnx.Rngs) -> None:
        def uniform(*shape: int) -> nnx.Param[jax.Array]:
            most = width**-0.5
            return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-most, maxval=most).astype(param_dtype))

        # Not the weights' own: those of a model that is cut are of all devices.
        self.sizes = (channels, width)
        self.weight = uniform(channels, width)
        self.bias = uniform(channels) if use_bias else None

    def state_spec(self, *matrices: tuple[int, ...], dtype: str) -> StateCacheSpec:
        """Returns the layout of a layer's states: of this convolution in `dtype`, and matrices in float32."""
        channels, width = self.sizes
        shapes = ((width - 1, channels), *matrices)
        dtypes, split_axes = (dtype, *["float32"] * len(matrices)), (1, *[0] * len(matrices))
        return StateCacheSpec(shapes=shapes, dtypes=dtypes, split_axes=split_axes)

    def __call__(
        self,
        x: jax.Array,
        states: jax.Array | None,
        sequences: dict[str, Any],
        *,
        implementation: str | None,
        activation: str | None = None,
        first_column: int | None = None,
        out_sizes: tuple[int, ...] | None = None,
    ) -> tuple[Any, Any]:
        """Convolves packed tokens [tokens, channels]; returns them and the updated states, None without.

        The channels are columns of x from the first one on; None for all of x. With `out_sizes` a tuple of arrays of so
        many channels is returned.
        """
        return ops.causal_conv1d(
            x,
            self.weight[...].astype(x.dtype),
            bias=None if self.bias is None else self.bias[...].astype(x.dtype),
            conv_states=states,
            first_column=first_column,
            out_sizes=out_sizes,
            activation=activation,
            implementation=implementation,
            **sequences,
        )


def unused_columns(columns: int, multiple: int = 1) -> int:
    """Returns how many columns of zeros a matrix needs behind its own, to be multiplied where it lies.

    All of them are a multiple of `multiple`, too.

    XLA's GPU compiler (jaxlib 0.10) copies a matrix in every step that cuBLAS does not take: columns of 8-bit
    numbers must be a multiple of 16, of 16-bit ones of 8.
    """
    return -columns % math.lcm(16, multiple)


def packed_sequences(
    inputs: jax.Array, features: int, states: Any, metadata: AttentionMetadata | None, *, num_states: int = 1
) -> tuple[dict[str, Any], int]:
    """Checks the arguments of a call; returns the keywords of the ops and the most tokens of a sequence."""
    check_packed(inputs, features, "states", states, metadata)
    if inputs.size == 0:
        raise InvalidInput("inputs", f"has shape {inputs.shape}", "no size may be 0")
    if metadata is not None:
        given = len(states) if isinstance(states, (tuple, list)) else 1
        if given != num_states:
            wanted = f"the layer has {num_states}, as in its state_spec"
            raise InvalidInput("states", f"has {given} arrays", wanted)
        tokens = metadata.slot_mapping.shape[0]
        if tokens > len(inputs):
            raise InvalidInput("inputs", f"has {len(inputs)} tokens", f"metadata is for a step of {tokens}")
        return metadata.states, metadata.max_query_len
    length = inputs.shape[-2]
    return {"query_start_loc": jnp.arange(0, inputs.size // features + 1, length, dtype=jnp.int32)}, length


def linears(dtype: Any, param_dtype: Any, kernel_init: Any, dot_general: Any, rngs: nnx.Rngs) -> Callable[..., Any]:
    """Returns what makes the linear layers of a layer from their sizes; they have no biases by default."""
    options: Any = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init, "rngs": rngs}
    return functools.partial(nnx.Linear, use_bias=False, dot_general=dot_general, **options)
