"""The building blocks of a decoder layer: linear, norms and the feed-forward part."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.late_norm import product, takes_late_rows
from jattn.llm.models.tensor_parallel import TensorParallel
from jattn.ops import QuantizedRows, gates_rows, launches_kernels, quantizes_rows, row_norm, row_product, rowwise
from jattn.ops.activations import activated, gated
from jattn.parallel import all_reduce_norm

#: Of embeddings and kernels, as Llama was initialised.
INITIALIZER = jax.nn.initializers.normal(0.02)

# If row and weights have fewer elements, XLA's GPU compiler (jax 0.10.2 to 0.11.2; ShouldStrengthReduceDotToReduce)
# computes the product of one row as a multiplication and a sum, with the intermediate in memory: 21 us for 16 MiB on an
# H200. For two rows it uses one kernel. For a float32 result of 16-bit numbers it copies all weights to float32 in some
# programs: a head of 1 GiB takes 1.72 ms on an H100, and 0.35 ms for two rows.
_FEW_ELEMENTS = 10_000_000
# From this many weights on it is then the sum of four products: the one kernel of XLA's choice, timed with weights in
# the cache, has too few programs. A decode step of Falcon-H1 7B takes 4.82 ms whole and 4.47 in parts on an H200, 5.94
# and 5.88 on an H100; of Llama 3.2 1B 1.265 and 1.256.
_SPLITS, _LEAST_SPLIT = 4, 1 << 22
# XLA's CPU backend (jaxlib 0.10.2) adds the products of an output one after the other, which rounds 1.6 times as much
# as torch's order, and 2 times as much in the logits of 30 layers. Parts of this many inputs round as torch does.
_PART_SIZE, _MOST_PARTS = 256, 8
# Up to this many rows one batched product of all parts takes no longer than a whole product. For more rows it takes up
# to twice as long, and separate products do not; for few rows, they copy their part of the kernel.
_FEW_ROWS = 64
# From this number of rows on a norm is a launch of its own, which reads them once. XLA's (jaxlib 0.11.2) reads them
# twice, and takes 3 us longer for 512 rows of 4,096 on an H100, 28 us for 8,192.
_MANY_ROWS = 512
# From this number of rows on, where the compiler's own choice of products ends, SwiGLU is part of the product: a decode
# step of 64 rows of an 8B model takes 8.33 instead of 8.45 ms on an H200 (11.66 and 11.68 on an H100), of 256 11.64
# instead of 11.79, of 512 24.9 instead of 25.1 on an H100, a prompt's of 8,192 rows 172.8 instead of 178.6.
_GATED_ROWS = 64


def linear(in_features: int, out_features: int, *, use_bias: bool, rngs: nnx.Rngs, **options: Any) -> nnx.Linear:
    """Returns `x @ kernel + bias`, the kernel stored `[in, out]`; `options` are those of `nnx.Linear`.

    That order is the fast one for a few rows on XLA's CPU backend: at 8 rows a step with `[out, in]` kernels
    (the order of a Hugging Face file) took 1.6 times as long.

    The bits of a row do not depend on the other rows, but they do depend on how many there are: that backend
    (jaxlib 0.10.2) has one order of summation for 2 to 32 rows and another for a single row and for 64 or more.
    """
    options = {"use_bias": use_bias, "kernel_init": INITIALIZER, "dot_general": dot_general, "rngs": rngs, **options}
    return nnx.Linear(in_features, out_features, **options)


def dot_general(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Any, *, few_elements: int = _FEW_ELEMENTS, **options: Any
) -> jax.Array:
    """`jax.lax.dot_general` of `[..., in]` and `[in, out]`, in parts and shapes that a platform rounds or runs well."""

    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, kernel, dimension_numbers, **options)

    def twice(x: jax.Array, kernel: jax.Array) -> jax.Array:
        rows, size = jnp.broadcast_to(x, (2, *x.shape[1:])), x.shape[-1]
        if widens or x.ndim != 2 or kernel.size < _LEAST_SPLIT or size % _SPLITS or _is_sharded(x, kernel):
            return product(rows, kernel)[:1]
        parts = rows.reshape(2, _SPLITS, -1).swapaxes(0, 1)
        batched = (((2,), (1,)), ((0,), (0,)))
        kernels = kernel.reshape(_SPLITS, -1, kernel.shape[1])
        wide = {**options, "preferred_element_type": jnp.promote_types(x.dtype, jnp.float32)}
        sums = jax.lax.dot_general(parts, kernels, batched, **wide)
        return sums.sum(0)[:1].astype(x.dtype)

    by_platform: dict[str, Any] = {}
    widens = jnp.dtype(options.get("preferred_element_type") or x.dtype).itemsize > x.dtype.itemsize
    if x.ndim > 1 and x.size == x.shape[-1] and (x.size + kernel.size < few_elements or widens):
        by_platform["cuda"] = twice
    if (count := _num_parts(x, kernel)) > 1:
        by_platform["cpu"] = functools.partial(_in_parts, count=count, options=options)
    return jax.lax.platform_dependent(x, kernel, default=product, **by_platform) if by_platform else product(x, kernel)


def batch_invariant_dot_general(x: jax.Array, kernel: jax.Array, dimension_numbers: Any, **options: Any) -> jax.Array:
    """The same of the last axes of `x` and the first of `kernel`, by `jattn.ops.row_product`."""
    count = len(dimension_numbers[0][0])
    leading, outer = x.shape[: x.ndim - count], kernel.shape[count:]
    wide = options.get("preferred_element_type")
    rows, flat = x.reshape(math.prod(leading), -1), kernel.reshape(math.prod(kernel.shape[:count]), -1)
    out = row_product(rows, flat, out_dtype=None if wide is None else jnp.dtype(wide).name)
    return out.reshape(*leading, *outer)


def _num_parts(x: jax.Array, kernel: jax.Array) -> int:
    """Returns the number of parts of the inputs that a CPU multiplies separately; 1 for all inputs together."""
    if _is_sharded(x, kernel) or not x.dtype == kernel.dtype == jnp.float32:
        return 1
    size = kernel.shape[0]
    least = min(-(-size // _PART_SIZE), _MOST_PARTS)
    return next((count for count in range(least, _MOST_PARTS + 1) if size % count == 0), 1)


def _is_sharded(*arrays: jax.Array) -> bool:
    return any(any(jax.typeof(each).sharding.spec) for each in arrays)


def _in_parts(x: jax.Array, kernel: jax.Array, *, count: int, options: dict[str, Any]) -> jax.Array:
    """Returns `x @ kernel` as the sum of the products of `count` parts of the inputs."""
    size, outputs = kernel.shape
    rows = x.reshape(math.prod(x.shape[:-1]), size)
    if len(rows) <= _FEW_ROWS:
        batched = (((2,), (1,)), ((1,), (0,)))
        kernels = kernel.reshape(count, size // count, outputs)
        parts = list(jax.lax.dot_general(rows.reshape(-1, count, size // count), kernels, batched, **options))
    else:
        halves = zip(jnp.split(rows, count, axis=1), jnp.split(kernel, count), strict=True)
        parts = [jax.lax.dot_general(each, part, (((1,), (0,)), ((), ())), **options) for each, part in halves]
    return functools.reduce(jnp.add, parts).reshape(*x.shape[:-1], outputs)


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, in float32 (Zhang and Sennrich 2019, arXiv:1910.07467).

    It rounds to the model's dtype if the models were trained to: Llama before the weight, OLMo 2 and Gemma after
    it. In bfloat16 every bit of Llama's is Hugging Face's; of `nnx.RMSNorm`, which always rounds after, a quarter of
    them differ. With `parallel`, the mean is over the heads of all devices.
    """

    batch_invariant: bool = False
    # Set by a decoder.
    row_implementation: str | None = None

    def __init__(
        self,
        features: int | tuple[int, ...],
        *,
        epsilon: float,
        dtype: str,
        norm_type: str = "rms_norm",
        parallel: TensorParallel | None = None,
    ) -> None:
        self.weight = nnx.Param(jnp.full(features, norm_type != "gemma_rms_norm", jnp.dtype(dtype)))
        self.epsilon = epsilon
        self.norm_type = norm_type
        self.parallel = parallel

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises `[..., features]`; keeps shape and dtype."""
        # The rows of a step; those of training come by sequences.
        has_many = x.ndim == 2 and len(x) >= _MANY_ROWS and x.dtype == self.weight.dtype
        has_many = has_many and self.parallel is None and launches_kernels(self.row_implementation)
        if self.batch_invariant or has_many:
            return _by_row(x, self.weight[...], epsilon=self.epsilon, norm_type=self.norm_type)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(_mean(wide * wide, self.parallel) + self.epsilon)
        weight = jax.lax.broadcast_to_rank(self.weight[...], x.ndim)
        if self.norm_type == "rms_norm":
            return wide.astype(x.dtype) * weight
        weight = weight.astype(jnp.float32)
        return (wide * (1 + weight if self.norm_type == "gemma_rms_norm" else weight)).astype(x.dtype)

    def of_sum(
        self, x: jax.Array, residual: jax.Array, axis_name: str, peers: jax.Array
    ) -> tuple[jax.Array, jax.Array] | None:
        """Returns residual + the sum of x over a mesh axis, and its norm, by `jattn.parallel.all_reduce_norm`.

        It returns None for a mean over the heads of all devices, and for operands that the kernel does not take.
        """
        if self.parallel is not None:
            return None
        return all_reduce_norm(
            x,
            residual,
            self.weight[...],
            axis_name,
            peers,
            epsilon=self.epsilon,
            round_first=self.norm_type == "rms_norm",
            add_one=self.norm_type == "gemma_rms_norm",
        )


class LayerNorm(nnx.Module):
    """Subtracts the mean and divides by the deviation, in float32 (Ba et al. 2016, arXiv:1607.06450).

    `nnx.LayerNorm` takes the variance as a difference of two means, which loses digits if the mean is large.
    """

    batch_invariant: bool = False

    def __init__(
        self,
        features: int | tuple[int, ...],
        *,
        epsilon: float,
        dtype: str,
        use_bias: bool,
        add_one: bool = False,
        parallel: TensorParallel | None = None,
    ) -> None:
        self.weight = nnx.Param(jnp.full(features, not add_one, jnp.dtype(dtype)))
        self.bias = nnx.Param(jnp.zeros(features, jnp.dtype(dtype))) if use_bias else None
        self.epsilon, self.add_one = epsilon, add_one
        self.parallel = parallel

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises `[..., features]`; keeps shape and dtype."""
        weight = self.weight[...] + 1 if self.add_one else self.weight[...]
        if self.batch_invariant:
            bias = None if self.bias is None else self.bias[...]
            return _by_row(x, weight, bias, epsilon=self.epsilon, norm_type="layer_norm")
        wide = x.astype(jnp.float32)
        wide = wide - _mean(wide, self.parallel)
        wide = wide * jax.lax.rsqrt(_mean(wide * wide, self.parallel) + self.epsilon)
        wide = wide * jax.lax.broadcast_to_rank(weight.astype(jnp.float32), x.ndim)
        if self.bias is not None:
            wide = wide + jax.lax.broadcast_to_rank(self.bias[...].astype(jnp.float32), x.ndim)
        return wide.astype(x.dtype)


def norm(
    config: ModelConfig,
    features: int | tuple[int, ...] | None = None,
    *,
    use_bias: bool = True,
    parallel: TensorParallel | None = None,
) -> Any:
    """Returns the model's kind of norm, over its residual stream unless `features` says otherwise."""
    features = config.hidden_size if features is None else features
    options = {"epsilon": config.rms_norm_eps, "dtype": config.dtype, "parallel": parallel}
    if config.norm_type.startswith("layer_norm"):
        options["add_one"] = config.norm_type == "layer_norm_1p"
        return LayerNorm(features, use_bias=config.norm_bias and use_bias, **options)
    return RMSNorm(features, norm_type=config.norm_type, **options)


class MLP(nnx.Module):
    """The feed-forward layer: plain, or gated as SwiGLU is (Shazeer 2020, arXiv:2002.05202).

    Gate and up share one matrix product.
    """

    batch_invariant: bool = False
    # Set by a decoder.
    row_implementation: str | None = None

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, intermediate_size: int | None = None) -> None:
        width, inner = config.hidden_size, intermediate_size or config.intermediate_size
        options = {"use_bias": config.mlp_bias, "param_dtype": jnp.dtype(config.dtype), "rngs": rngs}
        self.hidden_act, self.multipliers = config.hidden_act, config.mlp_multipliers
        # One or the other, and their names in a checkpoint.
        if config.gated_mlp:
            self.gate_up_proj: Any = linear(width, 2 * inner, **options)
        else:
            self.up_proj = linear(width, inner, **options)
        self.is_gated = config.gated_mlp
        # Computes gate_up_proj and the activation together; set where a batch has adapters.
        self.gated_product: Any = None
        self.act_fn = XIELU(config.dtype) if config.hidden_act == "xielu" else None
        self.down_proj: Any = linear(inner, width, **options)

    def __call__(self, x: Any) -> Any:
        """Maps `[..., hidden]` to `[..., hidden]`; `QuantizedRows`, where it takes them, to an `UnscaledProduct`."""
        if isinstance(x, QuantizedRows):
            return self.down_proj.product(self.gate_up_proj.product(x).gated(self.hidden_act))
        if self.gated_product is not None:
            return scaled(self.down_proj(self.gated_product(x)), self.multipliers[1])
        if self._gates_rows(x):
            kernel = self.gate_up_proj.kernel[...]
            inner = row_product(x, kernel, activation="silu", implementation=self.row_implementation)
            return scaled(self.down_proj(inner), self.multipliers[1])
        inner = product(self.gate_up_proj if self.is_gated else self.up_proj, x)
        out = self.down_proj(rowwise(self._activated, inner) if self.batch_invariant else self._activated(inner))
        return scaled(out, self.multipliers[1])

    @property
    def takes_quantized_rows(self) -> bool:
        """Both products are of e4m3 numbers, and one kernel computes what is between them."""
        if not self.is_gated or self.act_fn is not None or self.multipliers != (1, 1):
            return False
        if not (multiplies_rows(self.gate_up_proj) and multiplies_rows(self.down_proj)):
            return False
        return quantizes_rows(self.gate_up_proj.weight.shape[0], activation=self.hidden_act)

    def _gates_rows(self, x: Any) -> bool:
        """The first product and the activation are one launch, so that gates are not written and read again."""
        # The rows of a step; those of training come by sequences.
        is_step = isinstance(x, jax.Array) and x.ndim == 2 and len(x) >= _GATED_ROWS
        if not is_step or self.batch_invariant or not self.is_swiglu:
            return False
        layer = self.gate_up_proj
        is_product = is_plain(layer) and layer.bias is None and layer.kernel.dtype == x.dtype
        return is_product and gates_rows(x, layer.kernel[...], self.row_implementation)

    @property
    def takes_late_rows(self) -> bool:
        """Its first product takes `LateRows`."""
        return takes_late_rows(self.gate_up_proj if self.is_gated else self.up_proj)

    @property
    def is_swiglu(self) -> bool:
        """The activation is `silu(gate) * up`, without factors."""
        return self.is_gated and self.hidden_act == "silu" and self.act_fn is None and self.multipliers[0] == 1

    def _activated(self, inner: jax.Array) -> jax.Array:
        factor = self.multipliers[0]
        if self.act_fn is not None:
            return self.act_fn(inner)
        if not self.is_gated:
            return activated(self.hidden_act, scaled(inner, factor))
        if factor != 1:
            gate, up = jnp.split(inner, 2, axis=-1)
            inner = jnp.concatenate([gate * factor, up], axis=-1)
        return gated(self.hidden_act, inner)


def is_plain(layer: Any) -> bool:
    """Whether a layer multiplies by its kernel and adds its bias as `linear` does; one of a caller may do more."""
    return type(layer) is nnx.Linear and layer.dot_general is dot_general


def multiplies_rows(linear: Any, *, bias: bool = False) -> bool:
    """Returns whether a linear layer is an `Fp8Linear` of the model's dtype; without a bias, unless it may have one."""
    return hasattr(linear, "product") and linear.preferred_element_type is None and (bias or linear.bias is None)


def unweighted_norm(x: jax.Array, epsilon: float) -> jax.Array:
    """Divides by the root mean square over the last axis, in float32; keeps shape and dtype."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """Returns x times a number of the config."""
    # A Python number is rounded to the array's dtype first, as Gemma was trained.
    return x if scale == 1 else x * scale


def _by_row(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, **options: Any) -> jax.Array:
    features = x.shape[-1]
    bias = None if bias is None else bias.reshape(-1, features)
    return row_norm(x.reshape(-1, features), weight.reshape(-1, features), bias=bias, **options).reshape(x.shape)


class XIELU(nnx.Module):
    """The activation of Apertus (arXiv:2411.13010): a square above 0, an exponential below, with weights of a layer."""

    def __init__(self, dtype: str) -> None:
        # At first 0.8 on both sides; a weight is positive by its softplus.
        starts = (jnp.full(1, value, dtype) for value in (0.8, 0.3))
        self.alpha_p, self.alpha_n = (nnx.Param(jnp.log(jnp.expm1(start))) for start in starts)
        self.beta, self.eps = (nnx.Param(jnp.full(1, value, dtype)) for value in (0.5, -1e-6))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps each element."""
        each = (self.alpha_p, self.alpha_n, self.beta, self.eps)
        alpha_p, alpha_n, beta, eps = (jax.lax.broadcast_to_rank(weight[...], x.ndim) for weight in each)
        above = jax.nn.softplus(alpha_p) * x * x
        below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + jax.nn.softplus(alpha_n))
        return jnp.where(x > 0, above, below) + beta * x


def _mean(x: jax.Array, parallel: TensorParallel | None) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    if parallel is None or parallel.parts("heads") == 1:
        return mean
    # Devices have as many elements each, and key heads that several have count as often in the sum as in its number.
    return jax.lax.pmean(mean, parallel.axis)
