"""Types of the options that the attention modules share, with the checks of their values, and a check of operands."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn.ops import CallOptions
from jattn.ops.arguments import attention_spec
from jattn.ops.choose import check_implementation
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import Limits

_ANY_QUERY: Any = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)


def check_arrays(**operands: Any) -> None:
    """Raises InvalidInput for the first operand that is no array, by its name."""
    for name, operand in operands.items():
        if not hasattr(operand, "shape"):
            raise InvalidInput(name, f"is a {type(operand).__name__}", "it must be an array (jnp.asarray)")


def _check_score_option(name: str, value: Any) -> None:
    """Checks one option of masks and scores with the check of the ops."""
    if isinstance(value, jax.Array):
        wanted = f"it is part of the program: give a number, such as float({name})"
        raise InvalidInput(argument=name, problem="is a JAX array", wanted=wanted)
    attention_spec(_ANY_QUERY, **{name: value})


def _check_slopes(name: str, value: Any) -> None:
    try:
        fits = not isinstance(value, str) and all(isinstance(float(slope), float) for slope in value)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise InvalidInput(argument=name, value=value, wanted="it must be a sequence with a number for each head")


def _check_cache_scale(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real | jax.Array | np.ndarray):
        raise InvalidInput(argument=name, value=value, wanted="it must be a number or an array of one element")


def _check_dtype(name: str, value: Any) -> None:
    try:
        jnp.dtype(value)
    except TypeError:
        raise InvalidInput(argument=name, value=value, wanted="it must be a dtype, such as jnp.bfloat16") from None


#: Far above the sizes of published models; XLA ends the process for arrays whose number of bytes is no int64.
MAX_SIZE = 1 << 16
Size: TypeAlias = Annotated[int, Limits(1, MAX_SIZE)]
ConvSize: TypeAlias = Annotated[int, Limits(2, 8)]
Epsilon: TypeAlias = Annotated[float, Limits(0.0)]
Scale: TypeAlias = Annotated[float | None, _check_score_option]
SlidingWindow: TypeAlias = Annotated[int | tuple[int | None, int | None] | None, _check_score_option]
AttentionChunk: TypeAlias = Annotated[int | None, _check_score_option]
LogitsSoftCap: TypeAlias = Annotated[float | None, _check_score_option]
AlibiSlopes: TypeAlias = Annotated[Sequence[float] | None, _check_slopes]
KVChunkSize: TypeAlias = Annotated[int | None, Limits(128, wanted="a power of two, 128 or more")]
Implementation: TypeAlias = Annotated[str | None, check_implementation]
CacheScale: TypeAlias = Annotated[float | jax.Array | None, _check_cache_scale]
DType: TypeAlias = Annotated[DTypeLike, _check_dtype]
Rope: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array] | None


class _MaskOptions(TypedDict, total=False):
    scale: float | None
    sliding_window: int | tuple[int | None, int | None] | None
    attention_chunk: int | None
    logits_soft_cap: float | None
    use_alibi_sqrt: bool


class LayerOptions(_MaskOptions, total=False):
    """The options that `PagedAttention` passes to both paged and dense attention."""

    alibi_slopes: jax.Array | None
    implementation: str | None
    batch_invariant: bool


class DenseOptions(_MaskOptions, CallOptions, total=False):
    """The keywords of `attention_fn` that `jattn.attention` has too; see there."""

    batch_invariant: bool


class FlaxOptions(TypedDict, total=False):
    """The keywords that `MultiHeadAttention` passes on to `nnx.MultiHeadAttention`; the defaults are flax's."""

    dtype: DType | None
    param_dtype: DType
    broadcast_dropout: bool
    dropout_rate: Annotated[float, Limits(0, 1)]
    deterministic: bool | None
    precision: Any
    kernel_init: Callable[..., Any]
    out_kernel_init: Callable[..., Any] | None
    bias_init: Callable[..., Any]
    out_bias_init: Callable[..., Any] | None
    use_bias: bool
    decode: bool | None
    normalize_qk: bool
    qkv_promote_dtype: Callable[..., Any]
    out_promote_dtype: Callable[..., Any]
    ln_promote_dtype: Callable[..., Any]
    qkv_dot_general: Callable[..., Any] | None
    out_dot_general: Callable[..., Any] | None
    qkv_dot_general_cls: Any
    out_dot_general_cls: Any
    keep_rngs: bool
    kernel_metadata: Mapping[str, Any]
    out_kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]
    out_bias_metadata: Mapping[str, Any]
    query_ln_scale_metadata: Mapping[str, Any]
    key_ln_scale_metadata: Mapping[str, Any]
