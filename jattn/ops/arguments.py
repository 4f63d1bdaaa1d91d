"""From the ops' keyword arguments to the static description of a call."""

from __future__ import annotations

import inspect

import jax
import numpy as np
from jax.core import Tracer

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec


def attention_spec(
    query: jax.Array,
    *,
    scale: float | None,
    causal: bool,
    sliding_window: int | tuple[int | None, int | None] | None,
    logits_soft_cap: float | None,
    attention_chunk: int | None,
    use_alibi_sqrt: bool,
) -> AttentionSpec:
    """Returns the static options of a call; the scale is head_size ** -0.5 unless it is given.

    Raises:
        InvalidInput: a tracer or a value of another type if a static number must be; a query without a head size.
    """
    causal = _static_bool("causal", causal)
    left, right = _window(sliding_window, causal)
    # A query of no size is refused with the rest of the call.
    head_size = max(1, query.shape[-1]) if getattr(query, "ndim", 0) else 1
    return AttentionSpec(
        scale=head_size**-0.5 if scale is None else _static_float("scale", scale),
        causal=causal,
        window_left=left,
        window_right=right,
        logits_soft_cap=None if logits_soft_cap is None else _static_float("logits_soft_cap", logits_soft_cap),
        attention_chunk=attention_chunk,
        use_alibi_sqrt=_static_bool("use_alibi_sqrt", use_alibi_sqrt),
    )


#: The keywords that say how scores are masked and scaled.
MASK_OPTIONS = tuple(name for name in inspect.signature(attention_spec).parameters if name != "query")


def _static_float(name: str, value: float) -> float:
    if isinstance(value, Tracer):
        raise InvalidInput(name, "is a tracer", "it must be a static float (mark it static, or multiply query by it)")
    if not isinstance(value, (int, float, np.generic)):
        raise InvalidInput(name, value=value, wanted="it must be a float")
    return float(value)


def _static_bool(name: str, value: bool) -> bool:
    if isinstance(value, Tracer):
        raise InvalidInput(name, "is a tracer", "it must be a static True or False (mark it static)")
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidInput(name, value=value, wanted="it must be True or False")
    return bool(value)


def _window(sliding_window: int | tuple[int | None, int | None] | None, causal: bool) -> tuple[int | None, int | None]:
    if sliding_window is None:
        return None, None
    if isinstance(sliding_window, tuple):
        if len(sliding_window) != 2:
            raise InvalidInput("sliding_window", f"is {sliding_window}", "a tuple must be (left, right)")
        return sliding_window
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int) or sliding_window < 1:
        raise InvalidInput(
            f"sliding_window is {sliding_window!r}; it must be an int of at least 1 (the query's own token counts), a "
            "tuple (left, right), or None."
        )
    return sliding_window - 1, None if causal else sliding_window - 1
