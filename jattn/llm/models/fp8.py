"""Linear maps that multiply E4M3 numbers: the map, its kernel, and how numbers become one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

_FP8_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)


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

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., in]` to `[..., out]`."""
        rows, unit = _rounded(x)
        dtype = jnp.dtype(self.preferred_element_type or x.dtype)
        # Sums are float32. bfloat16 covers their range, and halves the memory of products that wait for their scale.
        product = functools.partial(_product, dtype=dtype if dtype == jnp.bfloat16 else jnp.float32)
        if x.size == x.shape[-1]:
            among_others = functools.partial(_row_among_others, product)
            out = jax.lax.platform_dependent(rows, self.weight[...], cuda=among_others, default=product)
        else:
            out = product(rows, self.weight[...])
        out = (out.astype(jnp.float32) * unit * self.scale[...]).astype(dtype)
        return out if self.bias is None else out + self.bias[...]


class Fp8Kernel(NamedTuple):
    """The parts of an `Fp8Linear`; see there."""

    weight: jax.Array
    scale: jax.Array


def round_to_fp8(kernel: jax.Array) -> Fp8Kernel:
    """Rounds a kernel to the operands of `Fp8Linear`.

    Args:
        kernel: [in, out]. Of one that is split over a mesh each device rounds its part to the same numbers; if inputs
            are split each has all scales.

    Returns:
        float8_e4m3fn[out, in] and float32[out], the largest weight of each output over the largest E4M3 number; of a
        cut kernel the devices' parts, side by side.

    Example:
        >>> weight, scale = round_to_fp8(jnp.array([[1.0, -3.0], [0.5, 448.0]]))
        >>> weight.tolist(), scale.tolist()
        ([[448.0, 224.0], [-3.0, 448.0]], [0.0022321429569274187, 1.0])
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
    weight, scale = _rounded(kernel.T, summed_axis)
    return Fp8Kernel(weight, scale[..., 0])


def _widen_part(weight: jax.Array, scale: jax.Array) -> jax.Array:
    return weight.T.astype(jnp.float32) * scale


def _product(rows: jax.Array, weight: jax.Array, *, dtype: Any) -> jax.Array:
    inputs = (((rows.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(rows, weight, inputs, preferred_element_type=dtype)


def _row_among_others(product: Callable[..., jax.Array], rows: jax.Array, weight: jax.Array) -> jax.Array:
    # Of a single row XLA's GPU compiler (jax 0.11.2) makes a product of float32 numbers, and widens all weights for it.
    return product(jnp.broadcast_to(rows, (*rows.shape[:-2], 2, rows.shape[-1])), weight)[..., :1, :]


def _rounded(x: jax.Array, axis: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns rows, or parts of rows along a mesh axis, as E4M3 numbers, and their float32 scales."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    if axis is not None:
        largest = jax.lax.pmax(largest, axis)
    # Not 0, for rows of zeros or tiny values. Values that are not finite stay so: an infinity makes its whole row NaN.
    unit = jnp.maximum(largest / _FP8_MAX, jnp.finfo(jnp.float32).tiny)
    return (wide / unit).astype(jnp.float8_e4m3fn), unit
