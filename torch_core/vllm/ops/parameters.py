"""The parameters of vLLM's operations: what their annotations allow, and their names in errors."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from torch_core.base.errors import ArgumentError, InvalidInput

_P = ParamSpec("_P")
_R = TypeVar("_R")
# An operand of this project's calls, and vLLM's names for it.
_NAMES = {
    "query": ("q",),
    "key": ("k",),
    "value": ("v",),
    "out": ("o", "output"),
    "key_cache": ("k", "k_buffer", "k_cache"),
    "value_cache": ("v", "v_buffer", "v_cache"),
    "query_start_loc": ("cu_seqlens_q", "b_start_loc"),
    "seq_lens": ("seqused_k", "b_seq_len"),
    "block_tables": ("block_table", "req_to_token", "b_loc"),
    "scale": ("softmax_scale", "sm_scale"),
    "k_scale": ("k_descale",),
    "v_scale": ("v_descale",),
    "max_query_len": ("max_seqlen_q", "max_input_len"),
    "logits_soft_cap": ("softcap", "logit_cap"),
    "window_left": ("sliding_window", "sliding_window_q", "window_size"),
    "window_right": ("sliding_window_k",),
    "q_scale": ("q_descale",),
    "out_scale": ("output_scale", "fp8_out_scale"),
    "seq_causal": ("causal",),
    "out_a": ("prefix_output",),
    "lse_a": ("prefix_lse",),
    "out_b": ("suffix_output",),
    "lse_b": ("suffix_lse",),
    "lse": ("output_lse",),
    "num_tokens_a": ("prefill_tokens_with_context",),
    "states": ("initial_state", "initial_states", "state"),
    "conv_states": ("conv_state",),
    "cache_indices": ("conv_state_indices", "ssm_state_indices", "state_batch_indices"),
}


def as_in_vllm(**axes: int | tuple[int, ...]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates an operation: it refuses arguments of another type than their annotations, except for `Any`.

    Its errors name the parameter of the operation, where this project's call has another name.

    Args:
        **axes: numbers of axes of the arrays that the operation itself looks at.
    """

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        parameters = inspect.signature(function).parameters
        names: dict[str, str] = {}
        for synonyms in ((ours, *theirs) for ours, theirs in _NAMES.items()):
            own = next((name for name in synonyms if name in parameters), None)
            if own is not None:
                names.update({name: own for name in synonyms if name not in {**parameters, **names}})
        kinds = {name: _kind(str(each.annotation), axes.get(name)) for name, each in parameters.items()}

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name, value in (*zip(kinds, args, strict=False), *kwargs.items()):
                if (kind := kinds.get(name)) is not None:
                    _check_kind(name, value, kind)
            try:
                return function(*args, **kwargs)
            except ArgumentError as error:
                if error.root not in names:
                    raise
                raise error.renamed(names[error.root]) from None

        return call

    return decorated


class _Kind(NamedTuple):
    types: tuple[type, ...]
    wanted: str
    is_optional: bool = False
    num_items: int = 0
    axes: tuple[int, ...] = ()


_KINDS = {
    "Tensor": _Kind((Tensor,), "it must be a torch tensor"),
    "Scale": _Kind((Tensor, float, numbers.Real), "it must be a torch tensor or a number", is_optional=True),
    "bool | str": _Kind((bool, str), "it must be a name, True or False"),
    "bool": _Kind((bool,), "it must be True or False"),
    "int": _Kind((int, numbers.Integral), "it must be an int"),
    "float": _Kind((float, numbers.Real), "it must be a number"),
    "str": _Kind((str,), "it must be a name"),
    "torch.dtype": _Kind((torch.dtype,), "it must be a torch dtype"),
    "tuple[int, int]": _Kind((int, numbers.Integral), "it must be two ints", num_items=2),
}


def _kind(annotation: str, axes: int | tuple[int, ...] | None) -> _Kind | None:
    """Returns what an annotation allows; None for all."""
    kind = _KINDS.get(annotation.removesuffix(" | None"))
    if kind is None:
        return None
    is_optional = kind.is_optional or annotation.endswith(" | None")
    return kind._replace(is_optional=is_optional, axes=(axes,) if isinstance(axes, int) else axes or ())


def _check_kind(name: str, value: Any, kind: _Kind) -> None:
    if value is None and kind.is_optional:
        return
    if isinstance(value, kind.types) and not kind.num_items:
        if kind.axes and isinstance(value, Tensor) and value.ndim not in kind.axes:
            wanted = f"it must have {' or '.join(map(str, kind.axes))} axes"
            raise InvalidInput(name, f"has shape {list(value.shape)}", wanted)
        return
    if isinstance(value, Tensor) and value.numel() == 1:
        # A bound that the caller computed on a device.
        value = value.item()
    items = value if kind.num_items and isinstance(value, tuple | list) else (value,)
    if len(items) != max(1, kind.num_items) or not all(isinstance(each, kind.types) for each in items):
        if Tensor in kind.types and value is not None:
            raise InvalidInput(name, f"is a {type(value).__name__}", kind.wanted)
        raise InvalidInput(name, value=value, wanted=kind.wanted)
