"""Linear maps with weights in fewer bits: products of E4M3 numbers, and kernels that are dequantised in a product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.fp8_rows import UnscaledProduct
from jattn.llm.models.layers import dot_general
from jattn.ops import QuantizedRows
from jattn.ops.quantise import e4m3_rows
from torch_core.base.errors import InvalidInput

#: Modules whose kernels may be in fewer bits.
_MODULES = ("qkv_proj", "o_proj", "gate_up_proj", "up_proj", "down_proj", "in_proj", "out_proj")

#: The values of the four bits of an MXFP4 number (OCP Microscaling Formats 1.0, E2M1), the sign in the highest.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Fp8Linear(nnx.Module):
    """`x @ weight.T + bias` of E4M3 numbers: the rows of x are rounded to them, each with a scale of its own.

    The product runs on the matrix units of 8-bit numbers if a device has them, at twice the speed of 16-bit ones
    (vLLM's `quantization="fp8"`; Micikevicius et al. 2022, arXiv:2209.05433). Weights lie with an output's in a row, as
    cuBLAS wants them.

    Args:
        weight: float8_e4m3fn[out, in].
        scale: float32[out].
        bias: [out], or None.
        preferred_element_type: dtype of the result; that of `x` if None.
    """

    def __init__(
        self, weight: jax.Array, scale: jax.Array, bias: Any = None, preferred_element_type: Any = None
    ) -> None:
        self.weight, self.scale = nnx.Param(weight), nnx.Param(scale)
        self.bias = None if bias is None else nnx.Param(bias)
        self.preferred_element_type = preferred_element_type

    def __call__(self, x: jax.Array | QuantizedRows) -> jax.Array:
        """Maps `[..., in]` to `[..., out]`."""
        if isinstance(x, QuantizedRows):
            out = self.product(x).scaled()
            return out if self.bias is None else out + self.bias[...]
        rows, unit = e4m3_rows(x)
        dtype = jnp.dtype(self.preferred_element_type or x.dtype)
        # Sums are float32. bfloat16 covers their range, and halves the memory of products that wait for their scale.
        product = functools.partial(_fp8_product, dtype=dtype if dtype == jnp.bfloat16 else jnp.float32)
        if x.size == x.shape[-1]:
            among_others = functools.partial(_row_among_others, product)
            out = jax.lax.platform_dependent(rows, self.weight[...], cuda=among_others, default=product)
        else:
            out = product(rows, self.weight[...])
        out = (out.astype(jnp.float32) * unit * self.scale[...]).astype(dtype)
        return out if self.bias is None else out + self.bias[...]

    def product(self, x: QuantizedRows) -> UnscaledProduct:
        """Multiplies rows in bfloat16, without scales and bias."""
        values = _fp8_product(x.values, self.weight[...], dtype=jnp.bfloat16)
        return UnscaledProduct(values, x.scale, self.scale[...])


class Fp8Kernel(NamedTuple):
    """The parts of an `Fp8Linear`; see there."""

    weight: jax.Array
    scale: jax.Array


def round_to_fp8(kernel: jax.Array) -> Fp8Kernel:
    """Rounds a kernel [in, out] to float8_e4m3fn[out, in] and float32[out], the scales of outputs; see `Fp8Linear`.

    Of a kernel that is split over a mesh each device rounds its part to the same numbers. If inputs are split, each has
    all scales.
    """
    return _part_by_part(_round_part, kernel.sharding)(kernel)


def widened_from_fp8(weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the float32[in, out] kernel that the parts of an `Fp8Linear` represent, with the same sharding."""
    return _part_by_part(_widen_part, kernel_sharding(weight), is_inverse=True)(weight, scale)


def kernel_sharding(weight: jax.Array) -> Any:
    """Returns how the kernel is stored of which `round_to_fp8` made the weight of an `Fp8Linear`."""
    if not isinstance(weight.sharding, NamedSharding):
        return weight.sharding
    return NamedSharding(weight.sharding.mesh, PartitionSpec(*reversed(_axes(weight.sharding))))


def dequantize(kernel: Any, scale: Any, xp: Any = jnp) -> Any:
    """Returns the dequantised kernel, float32[..., in, out], by numpy or jax.numpy.

    The kernel is float8_e4m3fn[..., in, out], or 4 bits as uint8[..., in / 2, out], an even row in the lower ones. The
    scale of E4M3 is float32[..., groups, out], of equally many rows each but the last. A uint8 scale, exponents of two
    with a bias of 127 for 32 rows each, makes it MXFP4; float32[..., 2 x groups, out], scales and then zero points,
    makes the bits integers.
    """
    if kernel.dtype != np.uint8:
        values = kernel.astype(np.float32)
    else:
        pairs = xp.stack([kernel & 15, kernel >> 4], -2)
        numbers = pairs.reshape(*kernel.shape[:-2], -1, kernel.shape[-1])
        if scale.dtype == np.uint8:
            values, scale = xp.asarray(_E2M1)[numbers], _powers_of_two(scale, xp)
        else:
            scale, zeros = xp.split(scale, 2, -2)
            values = numbers.astype(np.float32) - _by_row(zeros, numbers.shape[-2], xp)
    return values * _by_row(scale, values.shape[-2], xp)


def _by_row(scale: Any, rows: int, xp: Any) -> Any:
    return xp.repeat(scale, group_rows(rows, scale.shape[-2]), -2)[..., :rows, :]


def _powers_of_two(exponents: Any, xp: Any) -> Any:
    """Returns float32 2^(e - 127) of uint8 exponents, by their bits: exp2 is not exact on a GPU."""
    bits = exponents.astype(np.int32) << 23
    # 2^-127 is below the normal numbers, whose exponents begin at 1: half of the smallest of them.
    bits = xp.where(bits == 0, np.int32(1 << 22), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32) if xp is jnp else bits.view(np.float32)


def group_rows(num_rows: int, num_groups: int) -> int:
    """Returns the number of rows that share a scale: all, or the power of two that gives this number of groups."""
    return num_rows if num_groups == 1 else 1 << (-(-num_rows // num_groups) - 1).bit_length()


class QuantizedLinear(nnx.Module):
    """`x @ kernel + bias` with a kernel of `dequantize`, which is read as it is stored.

    With one scale for each output the product is scaled; with more of them the kernel is, and rounded to the dtype of
    `x` as a kernel that was dequantised before would be. XLA fuses that into the product's operand if it can.

    Args:
        kernel, scale: as in `dequantize`.
        bias: [out], or None.
        preferred_element_type: dtype of the result; that of `x` if None.
        rest: [in, more], the kernel of the last outputs, which is not in fewer bits; None if all are.
    """

    def __init__(
        self,
        kernel: jax.Array,
        scale: jax.Array,
        bias: Any = None,
        preferred_element_type: Any = None,
        rest: jax.Array | None = None,
    ) -> None:
        self.kernel, self.scale = nnx.Param(kernel), nnx.Param(scale)
        self.rest = None if rest is None else nnx.Param(rest)
        self.bias = None if bias is None else nnx.Param(bias)
        self.preferred_element_type = preferred_element_type

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., in]` to `[..., out]`."""
        kernel, scale, dtype = self.kernel[...], self.scale[...], self.preferred_element_type or x.dtype
        sums = ((x.ndim - 1,), (0,)), ((), ())
        if kernel.dtype != np.uint8 and scale.shape[-2] == 1:
            out = jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
            out = (out * scale[0]).astype(dtype)
        else:
            # The bits of a layer with the dequantised weights.
            out = dot_general(x, dequantize(kernel, scale).astype(x.dtype), sums, preferred_element_type=dtype)
        if self.rest is not None:
            out = jnp.concatenate([out, dot_general(x, self.rest[...], sums, preferred_element_type=dtype)], axis=-1)
        return out if self.bias is None else out + self.bias[...]


def quantize_fp8(model: Any) -> None:
    """Rounds the linear layers of a decoder's attention and feed-forward parts to E4M3, in place; see `Fp8Linear`.

    This does the same as `load_model(quantization="fp8")` to a model in memory. Embeddings, heads, experts, routers and
    latent attention are unchanged.

    Args:
        model: a model of `jattn.llm.models`, whole or split over devices.

    Raises:
        InvalidInput: another module.
    """
    if not isinstance(getattr(model, "config", None), ModelConfig):
        raise InvalidInput(f"model is a {type(model).__name__}; it must be a decoder of jattn.llm.models.")
    for path, module in list(nnx.iter_modules(model)):
        for name in _MODULES:
            old = getattr(module, name, None)
            if type(old) is nnx.Linear and may_be_quantized(model.config, (*path, name, "kernel")):
                bias = None if old.bias is None else old.bias[...]
                setattr(module, name, Fp8Linear(*round_to_fp8(old.kernel[...]), bias, old.preferred_element_type))


def quantized_linear(old: Any, parts: tuple[jax.Array, ...], bias: Any) -> tuple[nnx.Module, tuple[str, ...]]:
    """Returns the module that replaces a linear one, or one per expert, and the names of its arrays.

    `parts` is an `Fp8Kernel`, or a kernel and its scale as in `dequantize`, and of some `QuantizedLinear` the rest.
    """
    kernel, scale, *rest = parts
    if isinstance(parts, Fp8Kernel):
        return Fp8Linear(kernel, scale, bias, old.preferred_element_type), Fp8Kernel._fields
    if isinstance(old, nnx.Linear):
        names = ("kernel", "scale", "rest")[: len(parts)]
        return QuantizedLinear(kernel, scale, bias, old.preferred_element_type, *rest), names
    return QuantizedExpertLinear(kernel, scale, bias), ("kernel", "scale")


def may_be_quantized(config: ModelConfig, path: Sequence[Any]) -> bool:
    """Returns whether the parameter at a path of a model is a kernel that may be in fewer bits."""
    # Latent attention reads kernels itself.
    is_latent = config.latent is not None and "self_attn" in path
    return path[-1] == "kernel" and path[-2] in _MODULES and not is_latent


class QuantizedExpertLinear(nnx.Module):
    """One linear map for each expert, as `ExpertLinear`, with kernels of `dequantize`; bias is [experts, out]."""

    def __init__(self, kernel: jax.Array, scale: jax.Array, bias: Any = None) -> None:
        self.kernel, self.scale = nnx.Param(kernel), nnx.Param(scale)
        self.bias = None if bias is None else nnx.Param(bias)

    def grouped(self, x: jax.Array, experts: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Maps rows `[rows, in]` that are sorted by expert: one ragged product, over all experts in the dtype of x."""
        kernel = dequantize(self.kernel[...], self.scale[...]).astype(x.dtype)
        return self._biased(jax.lax.ragged_dot(x, kernel, group_sizes), experts)

    def gathered(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Maps rows `[rows, in]` one by one: reads the experts that are hit, as they are stored."""
        kernels, scales = self.kernel[...], self.scale[...]

        def one_row(arguments: tuple[jax.Array, jax.Array]) -> jax.Array:
            row, expert = arguments
            kernel, scale = (jax.lax.dynamic_index_in_dim(each, expert, keepdims=False) for each in (kernels, scales))
            return row @ dequantize(kernel, scale).astype(row.dtype)

        return self._biased(jax.lax.map(one_row, (x, experts)), experts)

    def _biased(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        return x if self.bias is None else x + self.bias[...][experts]


@functools.lru_cache(maxsize=64)
def _part_by_part(function: Callable[..., Any], sharding: Any, *, is_inverse: bool = False) -> Callable[..., Any]:
    """Returns a compiled function of each device's part of a kernel with this sharding, or its inverse."""
    if not isinstance(sharding, NamedSharding):
        return jax.jit(function)
    inputs, outputs = _axes(sharding)
    if not is_inverse:
        function = functools.partial(function, summed_axis=inputs)
    kernel = PartitionSpec(inputs, outputs)
    parts = Fp8Kernel(PartitionSpec(outputs, inputs), PartitionSpec(outputs or inputs))  # pyright: ignore[reportArgumentType]
    in_specs, out_specs = (tuple(parts), kernel) if is_inverse else (kernel, parts)
    return jax.jit(jax.shard_map(function, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def _axes(sharding: NamedSharding) -> tuple[Any, Any]:
    rows, columns = (*sharding.spec, None, None)[:2]
    return rows, columns


def _round_part(kernel: jax.Array, summed_axis: str | None = None) -> Fp8Kernel:
    weight, scale = e4m3_rows(kernel.T, summed_axis)
    return Fp8Kernel(weight, scale[..., 0])


def _widen_part(weight: jax.Array, scale: jax.Array) -> jax.Array:
    return weight.T.astype(jnp.float32) * scale


def _fp8_product(rows: jax.Array, weight: jax.Array, *, dtype: Any) -> jax.Array:
    inputs = (((rows.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(rows, weight, inputs, preferred_element_type=dtype)


def _row_among_others(product: Callable[..., jax.Array], rows: jax.Array, weight: jax.Array) -> jax.Array:
    # Of a single row XLA's GPU compiler (jax 0.11.2) makes a product of float32 numbers, and widens all weights for it.
    return product(jnp.broadcast_to(rows, (*rows.shape[:-2], 2, rows.shape[-1])), weight)[..., :1, :]
