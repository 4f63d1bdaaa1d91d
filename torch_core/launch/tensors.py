"""The facts of a torch tensor that a plan may depend on, and the results of an empty call."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call


def array_spec(tensor: torch.Tensor) -> ArraySpec:
    """Returns the spec of a tensor; contiguous ones get `strides=None`, so that equal layouts share plans."""
    strides = None if tensor.is_contiguous() else tensor.stride()
    return layout_spec(tuple(tensor.shape), tensor.dtype, strides, tensor.data_ptr() % 16 == 0)


@lru_cache(maxsize=8192)
def layout_spec(
    shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None, aligned: bool
) -> ArraySpec:
    """Returns the spec of a layout; `strides` is None for a contiguous one."""
    return ArraySpec(tuple(shape), dtype_name(dtype), strides, aligned)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name that torch_core.base.specs uses for a torch dtype.

    Example:
        >>> dtype_name(torch.float8_e4m3fn)
        'float8_e4m3fn'
    """
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of a name of torch_core.base.specs."""
    return getattr(torch, name)


def empty_results(call: Call[Tensor], arrays: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Returns the results of a call of nothing: zeros, and -inf for a log-sum-exp."""
    results = {name: arrays[name] for name in ("out", "lse") if name in call.written}
    for name, spec in call.outputs().items():
        results[name] = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
    return {name: tensor.fill_(-torch.inf) if name == "lse" else tensor.zero_() for name, tensor in results.items()}
