"""Products, norms and log-sum-exp of rows whose bits depend on the row alone: by keywords, and in jnp."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jattn.ops.arguments import documented
from jattn.ops.run import run
from jattn.ops.softmax import wide_dtype
from jattn.ops.tiles import in_tiles
from jattn.ops.xla import JaxOp, register
from torch_core.rowwise.call import RowLogSumExpCall, RowNormCall, RowProductCall


@documented(RowProductCall)
def row_product(
    x: jax.Array,
    kernel: jax.Array,
    *,
    transposed: bool = False,
    out_dtype: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies rows by a kernel; a row's bits do not depend on the number of rows, nor on its place among them.

    The derivative is that of a plain product, at its speed.

    Returns:
        [num_rows, out].

    Raises:
        InvalidInput: shapes or dtypes do not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here.
    """
    call = RowProductCall(x=x, kernel=kernel, transposed=transposed, out_dtype=out_dtype)
    return run(call, implementation)["out"]


@documented(RowNormCall)
def row_norm(
    x: jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None = None,
    epsilon: float,
    norm_type: str = "rms_norm",
    implementation: str | None = None,
) -> jax.Array:
    """Normalises rows; a row's bits do not depend on the number of rows.

    Returns:
        [num_rows, features], in the dtype of `x`.

    Raises:
        InvalidInput: shapes, dtypes or options do not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here.
    """
    call = RowNormCall(x=x, weight=weight, bias=bias, epsilon=epsilon, norm_type=norm_type)
    return run(call, implementation)["out"]


@documented(RowLogSumExpCall)
def row_logsumexp(x: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Returns float32[num_rows], the log-sum-exp of each row; its bits do not depend on the number of rows.

    Raises:
        InvalidInput: a shape or dtype does not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here.
    """
    return run(RowLogSumExpCall(x=x), implementation)["out"]


def _row_product(call: RowProductCall[jax.Array]) -> dict[str, jax.Array]:
    axes = (((1,), (1 if call.transposed else 0,)), ((), ()))
    product = functools.partial(
        jax.lax.dot_general, dimension_numbers=axes, preferred_element_type=jnp.dtype(call.result_dtype)
    )
    return {"out": in_tiles(product, call.x, call.kernel)}


def _row_norm(call: RowNormCall[jax.Array]) -> dict[str, jax.Array]:
    weights = (call.weight, *(() if call.bias is None else (call.bias,)))
    normed = functools.partial(_normed, epsilon=call.epsilon, norm_type=call.norm_type)
    grouped = call.x.reshape(-1, *call.weight.shape)
    return {"out": in_tiles(normed, grouped, *weights).reshape(call.x.shape)}


def _normed(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, epsilon: float, norm_type: str
) -> jax.Array:
    wide = x.astype(wide_dtype(x.dtype))
    if norm_type == "layer_norm":
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    if norm_type == "rms_norm":
        return wide.astype(x.dtype) * weight[None]
    factor = weight.astype(wide.dtype)[None]
    wide = wide * (1 + factor if norm_type == "gemma_rms_norm" else factor)
    return (wide if bias is None else wide + bias.astype(wide.dtype)[None]).astype(x.dtype)


def _row_logsumexp(call: RowLogSumExpCall[jax.Array]) -> dict[str, jax.Array]:
    return {"out": in_tiles(functools.partial(jax.nn.logsumexp, axis=-1), call.x)}


register(JaxOp(call=RowProductCall, jnp=_row_product, jnp_derivative=True))
register(JaxOp(call=RowNormCall, jnp=_row_norm, jnp_derivative=True))
register(JaxOp(call=RowLogSumExpCall, jnp=_row_logsumexp, jnp_derivative=True))
