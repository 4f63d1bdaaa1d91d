"""Linear maps whose weights stay in fewer bits: they become numbers of the model's dtype when they are multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.fp8 import Fp8Kernel, Fp8Linear, round_to_fp8
from torch_core.base.errors import InvalidInput

#: Modules whose kernels may be in fewer bits.
_MODULES = ("qkv_proj", "o_proj", "gate_up_proj", "up_proj", "down_proj")

#: The values of the four bits of an MXFP4 number (OCP Microscaling Formats 1.0, E2M1), the sign in the highest.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def dequantize(kernel: Any, scale: Any, xp: Any = jnp) -> Any:
    """Returns the dequantised kernel: float32[..., in, out].

    Args:
        kernel: float8_e4m3fn[..., in, out], or MXFP4 as uint8[..., in / 2, out], an even row in the lower four bits.
        scale: float32[..., groups, out] of E4M3, of equally many rows each but the last; of MXFP4 uint8, exponents of
            two with a bias of 127, for 32 rows each.
        xp: numpy or jax.numpy: where the arithmetic runs.

    Example:
        >>> kernel = np.array([[0x21], [0x43]], np.uint8)
        >>> dequantize(kernel, np.array([[128]], np.uint8), np).ravel().tolist()
        [1.0, 2.0, 3.0, 4.0]
    """
    if kernel.dtype == np.uint8:
        pairs = xp.stack([kernel & 15, kernel >> 4], -2)
        values = xp.asarray(_E2M1)[pairs.reshape(*kernel.shape[:-2], -1, kernel.shape[-1])]
        scale = _powers_of_two(scale, xp)
    else:
        values = kernel.astype(np.float32)
    rows = values.shape[-2]
    return values * xp.repeat(scale, group_rows(rows, scale.shape[-2]), -2)[..., :rows, :]


def _powers_of_two(exponents: Any, xp: Any) -> Any:
    """Returns float32 2^(e - 127) of uint8 exponents, by their bits: exp2 is not exact on a GPU."""
    bits = exponents.astype(np.int32) << 23
    # 2^-127 is below the normal numbers, whose exponents begin at 1: half of the smallest of them.
    bits = xp.where(bits == 0, np.int32(1 << 22), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32) if xp is jnp else bits.view(np.float32)


def group_rows(num_rows: int, num_groups: int) -> int:
    """Returns the number of rows that share a scale: all, or the power of two that gives this number of groups.

    Example:
        >>> group_rows(200, 1), group_rows(200, 2), group_rows(64, 2)
        (200, 128, 32)
    """
    return num_rows if num_groups == 1 else 1 << (-(-num_rows // num_groups) - 1).bit_length()


class QuantizedLinear(nnx.Module):
    """`x @ kernel + bias` with a kernel of `dequantize`, which is read as it is stored.

    With one scale for each output the product is scaled; with more of them the kernel is, and rounded to the dtype of
    `x` as a kernel that was dequantised before would be. XLA fuses that into the product's operand if it can.

    Args:
        kernel, scale: as in `dequantize`.
        bias: [out], or None.
        preferred_element_type: dtype of the result; that of `x` if None.
    """

    def __init__(
        self, kernel: jax.Array, scale: jax.Array, bias: Any = None, preferred_element_type: Any = None
    ) -> None:
        self.kernel, self.scale = nnx.Param(kernel), nnx.Param(scale)
        self.bias = None if bias is None else nnx.Param(bias)
        self.preferred_element_type = preferred_element_type

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., in]` to `[..., out]`."""
        kernel, scale, dtype = self.kernel[...], self.scale[...], self.preferred_element_type or x.dtype
        if kernel.dtype != np.uint8 and scale.shape[-2] == 1:
            out = jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
            out = (out * scale[0]).astype(dtype)
        else:
            out = jnp.matmul(x, dequantize(kernel, scale).astype(x.dtype), preferred_element_type=dtype)
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


def quantized_linear(old: Any, parts: tuple[jax.Array, jax.Array], bias: Any) -> tuple[nnx.Module, tuple[str, ...]]:
    """Returns the module that replaces a linear one, or one per expert, and the names of its two arrays.

    Args:
        old: the module to replace.
        parts: an `Fp8Kernel`, or a kernel and its scale as in `dequantize`.
        bias: bias of the old module, or None.
    """
    kernel, scale = parts
    if isinstance(parts, Fp8Kernel):
        return Fp8Linear(kernel, scale, bias, old.preferred_element_type), Fp8Kernel._fields
    if isinstance(old, nnx.Linear):
        return QuantizedLinear(kernel, scale, bias, old.preferred_element_type), ("kernel", "scale")
    return QuantizedExpertLinear(kernel, scale, bias), ("kernel", "scale")


def may_be_quantized(config: ModelConfig, path: Sequence[Any]) -> bool:
    """Returns whether the parameter at a path of a model is a kernel that may be in fewer bits."""
    # Latent attention reads kernels itself.
    is_latent = config.latent is not None and "self_attn" in path
    return path[-1] == "kernel" and path[-2] in _MODULES and not is_latent


class QuantizedExpertLinear(nnx.Module):
    """One linear map for each expert, as `ExpertLinear`, with kernels of `dequantize`.

    Args:
        kernel, scale: as in `dequantize`, experts on the first axis.
        bias: [experts, out], or None.
    """

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
