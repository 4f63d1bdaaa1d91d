"""Products, norms, log-sum-exp and e4m3 numbers of rows whose bits depend on the row alone: by keywords, and in jnp."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jattn.bridge import native
from jattn.bridge.calls import array_spec
from jattn.ops.activations import activated
from jattn.ops.arguments import documented
from jattn.ops.choose import launches_kernels
from jattn.ops.quantise import e4m3_rows
from jattn.ops.run import run
from jattn.ops.softmax import wide_dtype
from jattn.ops.tiles import in_tiles
from jattn.ops.xla import JaxOp, register
from torch_core.base.specs import E4M3_ARCH, ArraySpec
from torch_core.launch.serves import unserved
from torch_core.rowwise.call import GATE_ACTIVATIONS, RowLogSumExpCall, RowNormCall, RowProductCall, RowQuantizeCall


@documented(RowProductCall)
def row_product(
    x: jax.Array,
    kernel: jax.Array,
    *,
    transposed: bool = False,
    out_dtype: str | None = None,
    activation: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies rows by a kernel; a row's bits do not depend on the number of rows, nor on its place among them.

    The derivative is that of a plain product, at its speed.

    Returns:
        [num_rows, out].
    """
    call = RowProductCall(x=x, kernel=kernel, transposed=transposed, out_dtype=out_dtype, activation=activation)
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
    """
    call = RowNormCall(x=x, weight=weight, bias=bias, epsilon=epsilon, norm_type=norm_type)
    return run(call, implementation)["out"]


@documented(RowLogSumExpCall)
def row_logsumexp(x: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Returns float32[num_rows], the log-sum-exp of each row; its bits do not depend on the number of rows."""
    return run(RowLogSumExpCall(x=x), implementation)["out"]


class QuantizedRows(NamedTuple):
    """Rows as e4m3 numbers; see `row_quantize`.

    Attributes:
        values: float8_e4m3fn[padded_rows, features]; rows from `num_rows` on, up to a multiple of 16, are undefined.
        scale: float32[num_rows].
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        """[num_rows, features]."""
        return self.scale.shape[0], self.values.shape[1]


@documented(RowQuantizeCall)
def row_quantize(
    x: jax.Array,
    *,
    row_scale: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    weight: jax.Array | None = None,
    epsilon: float = 0.0,
    norm_type: str = "rms_norm",
    implementation: str | None = None,
) -> tuple[QuantizedRows, Any]:
    """Rounds rows to e4m3 with a scale each, after an activation, or a sum and a norm; a row is read once.

    Returns:
        The rows, and `residual` plus the rows; None without a residual.
    """
    call = RowQuantizeCall(
        x=x,
        row_scale=row_scale,
        column_scale=column_scale,
        activation=activation,
        residual=residual,
        weight=weight,
        epsilon=epsilon,
        norm_type=norm_type,
    )
    found = run(call, implementation)
    return QuantizedRows(found["values"], found["scale"]), found.get("stream")


def quantizes_rows(*widths: int, activation: str | None = None, implementation: str | None = None) -> bool:
    """Returns whether `row_quantize` is a kernel launch here.

    Args:
        *widths: features of rows in bfloat16.
        activation, implementation: as in `row_quantize`; with an activation that it does not know it is not.
    """
    if activation not in (None, *GATE_ACTIVATIONS) or not launches_kernels(implementation):
        return False
    calls = (RowQuantizeCall(x=ArraySpec((1, width), "bfloat16"), activation=activation) for width in widths)
    return native.device_limits().arch >= E4M3_ARCH and all(unserved(call, "triton") is None for call in calls)


def gates_rows(x: jax.Array, kernel: jax.Array, implementation: str | None = None) -> bool:
    """Returns whether `row_product` of these arrays with an activation is a kernel launch here, and worth it."""
    if not launches_kernels(implementation):
        return False
    # Imports Triton; this module must load without it.
    from torch_core.rowwise.kernels.gated_product_hopper.plan import is_hopper

    call = RowProductCall(x=x, kernel=kernel, activation="silu").map(array_spec)
    return is_hopper(call, native.device_limits())


def _row_product(call: RowProductCall[jax.Array]) -> dict[str, jax.Array]:
    axes = (((1,), (1 if call.transposed else 0,)), ((), ()))
    dtype, activation = jnp.dtype(call.result_dtype), call.activation
    added = dtype if activation is None else wide_dtype(dtype)
    product = functools.partial(jax.lax.dot_general, dimension_numbers=axes, preferred_element_type=added)

    def gated(x: jax.Array, kernel: jax.Array) -> jax.Array:
        gate, up = jnp.split(product(x, kernel), 2, axis=1)
        return (activated(cast(str, activation), gate) * up).astype(dtype)

    return {"out": in_tiles(product if activation is None else gated, call.x, call.kernel)}


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


def _row_quantize(call: RowQuantizeCall[jax.Array]) -> dict[str, jax.Array]:
    dtype, wide = jnp.dtype(call.rounded_dtype), jnp.float32
    row = call.x[: call.num_rows].astype(wide)
    if call.row_scale is not None:
        row = row * call.row_scale[:, None]
    if call.column_scale is not None:
        row = row * call.column_scale[None]
    if call.activation is not None:
        gate, up = jnp.split(row, 2, axis=1)
        row = activated(call.activation, gate) * up
    results = {}
    if call.residual is not None:
        results["stream"] = (call.residual.astype(wide) + row).astype(dtype)
        row = results["stream"].astype(wide)
    if call.weight is not None:
        row = row * jax.lax.rsqrt(jnp.mean(row * row, axis=-1, keepdims=True) + call.epsilon)
        row = row.astype(dtype).astype(wide) if call.norm_type == "rms_norm" else row
        weight = call.weight.astype(wide)[None]
        row = row * (1 + weight if call.norm_type == "gemma_rms_norm" else weight)
    values, scale = e4m3_rows(row)
    padding = call.outputs()["values"].shape[0] - call.num_rows
    return {"values": jnp.pad(values, ((0, padding), (0, 0))), "scale": scale[:, 0], **results}


def _row_logsumexp(call: RowLogSumExpCall[jax.Array]) -> dict[str, jax.Array]:
    return {"out": in_tiles(functools.partial(jax.nn.logsumexp, axis=-1), call.x)}


register(JaxOp(call=RowProductCall, jnp=_row_product, jnp_derivative=True))
register(JaxOp(call=RowNormCall, jnp=_row_norm, jnp_derivative=True))
register(JaxOp(call=RowLogSumExpCall, jnp=_row_logsumexp, jnp_derivative=True))
register(JaxOp(call=RowQuantizeCall, jnp=_row_quantize, jnp_derivative=True))
