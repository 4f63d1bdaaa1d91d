"""What the plans share: checks of operands' specs, scales as kernel arguments, integer arithmetic."""

from __future__ import annotations

from typing import TypeAlias

from torch_core.errors import InvalidInput
from torch_core.plan.plan import ABSENT, Argument, ArraySpec, Pointer, Scalar

__all__ = [
    "ScaleSpec",
    "ceil_div",
    "check_cache",
    "check_contiguous",
    "check_last_stride",
    "power_of_two",
    "scale_inputs",
    "scale_pointer",
    "scale_value",
]

#: A per-tensor scale: a number known when planning, a one-element float32 array, or none.
ScaleSpec: TypeAlias = float | ArraySpec | None


def check_cache(kv_cache: ArraySpec) -> None:
    """Raises InvalidInput unless the spec is that of a paged KV cache with unit stride in its last axis."""
    if len(kv_cache.shape) != 5 or kv_cache.shape[1] != 2:
        raise InvalidInput(
            f"kv_cache has shape {list(kv_cache.shape)}; it must be "
            "[num_blocks, 2, block_size, num_kv_heads, head_size]."
        )
    check_last_stride("kv_cache", kv_cache)


def check_last_stride(name: str, array: ArraySpec) -> None:
    """Raises InvalidInput unless elements of the last axis lie side by side."""
    if array.size and array.element_strides[-1] != 1:
        raise InvalidInput(f"{name} has strides {array.element_strides}; the last one must be 1.")


def check_contiguous(name: str, array: ArraySpec) -> None:
    """Raises InvalidInput unless the array is contiguous."""
    if array.strides is not None:
        raise InvalidInput(f"{name} has strides {array.strides}; it must be contiguous.")


def scale_inputs(**scales: ScaleSpec) -> tuple[tuple[str, ArraySpec], ...]:
    """Returns the scales that are arrays, as inputs of a plan."""
    return tuple((name, scale) for name, scale in scales.items() if isinstance(scale, ArraySpec))


def scale_pointer(name: str, scale: ScaleSpec) -> Argument:
    """Returns the pointer argument of a scale; absent unless the scale is an array.

    Raises:
        InvalidInput: the array does not hold exactly one float32.
    """
    if not isinstance(scale, ArraySpec):
        return ABSENT
    if scale.size != 1 or scale.dtype != "float32":
        raise InvalidInput(f"{name} is {scale.dtype}{list(scale.shape)}; it must be a number or one float32.")
    return Pointer(name)


def scale_value(scale: ScaleSpec) -> Scalar:
    """Returns the by-value argument of a scale; 1 unless the scale is a number."""
    return Scalar(1.0 if scale is None or isinstance(scale, ArraySpec) else float(scale), "fp32")


def ceil_div(a: int, b: int) -> int:
    """Returns a / b rounded up.

    Example:
        >>> ceil_div(7, 4)
        2
    """
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n.

    Example:
        >>> power_of_two(80)
        128
    """
    return 1 << max(0, n - 1).bit_length()
