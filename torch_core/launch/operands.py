"""Shared parts of the plans: scales and strides as kernel arguments, a program's search, integer arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import ABSENT, Argument, LaunchPlan, Pointer, Scalar

# Few sizes, so that few variants are compiled.
_BLOCK_SEQS = (1, 32, 256, 1024)


def named_launch(
    kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Argument], constexprs: Mapping[str, Any], **options: Any
) -> LaunchPlan:
    """Builds a launch from named arguments; names unknown to the kernel are ignored. Options are LaunchPlan's."""
    names = kernel.arg_names
    return LaunchPlan(
        kernel=kernel,
        grid=grid,
        arguments=tuple((name, arguments[name]) for name in names if name in arguments and name not in constexprs),
        constexprs=tuple((name, constexprs[name]) for name in names if name in constexprs),
        **options,
    )


def scale_pointer(name: str, scale: ArraySpec | float | None) -> Argument:
    """Returns the pointer argument of a scale; absent unless the scale is an array."""
    return Pointer(name) if isinstance(scale, ArraySpec) else ABSENT


def scale_number(scale: ArraySpec | float | None) -> float:
    """Returns a scale that is a number; 1 if it is absent or an array, which the kernel reads."""
    return 1.0 if scale is None or isinstance(scale, ArraySpec) else float(scale)


def scale_value(scale: ArraySpec | float | None) -> Scalar:
    """Returns `scale_number` as an argument by value."""
    return Scalar(scale_number(scale), "fp32")


def strides(prefix: str, axes: tuple[str, ...], array: ArraySpec) -> dict[str, Argument]:
    """Returns an array's leading strides as by-value arguments, named after their axes.

    Example:
        >>> list(strides("key", ("token", "head"), ArraySpec((4, 2, 8), "float32")))
        ['key_token_stride', 'key_head_stride']
    """
    named = zip(axes, array.element_strides, strict=False)
    return {f"{prefix}_{axis}_stride": Scalar(stride, "i64") for axis, stride in named}


def block_seqs(num_seqs: int) -> int:
    """Returns the number of sequences that a program looks at together when it searches for its own.

    Example:
        >>> block_seqs(3)
        32
    """
    return next((size for size in _BLOCK_SEQS if size >= num_seqs), _BLOCK_SEQS[-1])


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
