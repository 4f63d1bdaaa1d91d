"""The keywords of attention's public functions, for torch and for JAX.

A keyword is written in two places: as a field of its call (`torch_core.attention.call`), with shape, dtype, default and
meaning, and here, with its type. Public functions take `**options: Unpack[PagedOptions[torch.Tensor]]` and hand them to
the call as they are, so type checkers and editors know every keyword, and check on both ways that call and options
agree. `torch_core.launch.public` gives each function the whole signature and the meanings for `help()`.
"""

from __future__ import annotations

import inspect
from typing import Any, Generic, TypedDict

import numpy as np

from torch_core.base.checks import INT32_MAX
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec
from torch_core.launch.call import A


class _SpecOptions(TypedDict, total=False):
    spec: AttentionSpec
    scale: float | None


class _CommonOptions(TypedDict, Generic[A], total=False):
    causal: bool
    sliding_window: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    sinks: A | None
    out_scale: A | float | None
    batch_invariant: bool


class ScoreOptions(TypedDict, Generic[A], total=False):
    """Arrays that change single scores."""

    alibi_slopes: A | None
    mm_prefix_range: A | None
    relative_bias: A | None
    qq_bias: A | None
    seq_causal: A | None


class _BiasOptions(ScoreOptions[A], total=False):
    attention_chunk: int | None
    use_alibi_sqrt: bool


class _CacheOptions(TypedDict, Generic[A], total=False):
    q_scale: A | float | None
    k_scale: A | float | None
    kv_chunk_size: int | None


class DenseOptions(_SpecOptions, _CommonOptions[A], _BiasOptions[A], total=False):
    """Keywords of `attention`."""

    segment_ids: A | None
    key_segment_ids: A | None
    max_segments: int | None
    max_segment_len: int | None
    dropout_rate: float
    dropout_seeds: A | None
    deterministic: bool


class PagedOptions(_SpecOptions, _CommonOptions[A], _BiasOptions[A], _CacheOptions[A], total=False):
    """Keywords of `paged_attention`."""

    v_scale: A | float | None
    k_scale_cache: A | None
    v_scale_cache: A | None


class LatentOptions(_CommonOptions[A], _CacheOptions[A], total=False):
    """Keywords of `mla_attention` of JAX arrays, where the scale must be given."""


class LatentSpecOptions(_SpecOptions, LatentOptions[A], total=False):
    """Keywords of `mla_attention` of torch tensors, where a spec may be given instead of the scale."""


def attention_spec(
    query: Any,
    scale: Any = None,
    causal: Any = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: Any = None,
    attention_chunk: int | None = None,
    use_alibi_sqrt: Any = False,
) -> AttentionSpec:
    """Returns the static options of a call by the keywords of the public functions.

    Args:
        query: float[..., head_size]; the scale is head_size ** -0.5 unless it is given.
        scale, causal, sliding_window, logits_soft_cap, attention_chunk, use_alibi_sqrt: see `AttentionCall`.

    Raises:
        InvalidInput: a value is not a static number of the right type, or is out of range.
    """
    causal = _static_bool("causal", causal)
    left, right = _window(sliding_window, causal)
    # A query of no size is refused with the rest of the call.
    shape = getattr(query, "shape", ())
    return AttentionSpec(
        scale=max(1, shape[-1] if shape else 1) ** -0.5 if scale is None else _static_float("scale", scale),
        causal=causal,
        window_left=left,
        window_right=right,
        logits_soft_cap=None if logits_soft_cap is None else _static_float("logits_soft_cap", logits_soft_cap),
        attention_chunk=_static_int(attention_chunk),
        use_alibi_sqrt=_static_bool("use_alibi_sqrt", use_alibi_sqrt),
    )


#: The keywords that `AttentionSpec` stands for.
MASK_OPTIONS = tuple(name for name in inspect.signature(attention_spec).parameters if name != "query")
#: Their defaults.
NO_MASK = tuple(inspect.signature(attention_spec).parameters[name].default for name in MASK_OPTIONS)


def _static_float(name: str, value: Any) -> float:
    if not isinstance(value, (int, float, np.generic)):
        raise InvalidInput(name, value=value, wanted="it must be a float")
    return float(value)


def _static_int(value: Any) -> Any:
    """Returns a number of numpy as an int, and what else was given as it is."""
    return int(value) if isinstance(value, np.integer) else value


def _static_bool(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidInput(name, value=value, wanted="it must be True or False")
    return bool(value)


def _window(sliding_window: Any, causal: bool) -> tuple[int | None, int | None]:
    sliding_window = _static_int(sliding_window)
    if sliding_window is None:
        return None, None
    if isinstance(sliding_window, tuple):
        sides = tuple(map(_static_int, sliding_window))
        if len(sides) != 2 or not all(side is None or _is_int(side, 0) for side in sides):
            wanted = f"a tuple must be (left, right), each an int from 0 to {INT32_MAX}, or None for all tokens there"
            raise InvalidInput("sliding_window", value=sliding_window, wanted=wanted)
        return sides
    if not _is_int(sliding_window, 1):
        wanted = f"it must be an int from 1 (the query's own token) to {INT32_MAX}, a tuple (left, right), or None"
        raise InvalidInput("sliding_window", value=sliding_window, wanted=wanted)
    return sliding_window - 1, None if causal else sliding_window - 1


def _is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= INT32_MAX
