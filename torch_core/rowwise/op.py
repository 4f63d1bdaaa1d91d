"""The ops on rows whose bits depend on the row alone."""

from __future__ import annotations

from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call
from torch_core.launch.op import Op, Served, register
from torch_core.launch.serves import ALL, compute_dtype, strides
from torch_core.rowwise.call import RowLogSumExpCall, RowNormCall, RowProductCall, RowQuantizeCall

_MAX_FEATURES = 1 << 15
# A row is in registers, and the two halves of a gated one.
_MAX_QUANTIZED, _MAX_GATED = 1 << 15, 1 << 14


def _norm_limit(call: RowNormCall[ArraySpec], implementation: str) -> str | None:
    if implementation == "triton" and call.x.shape[1] > _MAX_FEATURES:
        return f"x has {call.x.shape[1]} features and the limit is {_MAX_FEATURES}"
    return None


def _quantize_limit(call: RowQuantizeCall[ArraySpec], implementation: str) -> str | None:
    limit = _MAX_QUANTIZED if call.activation is None else _MAX_GATED
    if implementation == "triton" and call.features > limit:
        return f"a row has {call.features} features and the limit is {limit}"
    return None


_ROWS = Served("products, norms and log-sum-exp of rows (row_product, row_norm, row_logsumexp, row_quantize)", ALL)

register(
    Op(
        call=RowProductCall,
        reference="torch_core.rowwise.reference:row_product",
        cpu="torch_core.rowwise.reference:row_product",
        plan="torch_core.rowwise.plan:plan_product",
        serves=(compute_dtype("x"), strides(free=("kernel",)), _ROWS),
    ),
    Op(
        call=RowNormCall,
        reference="torch_core.rowwise.reference:row_norm",
        cpu="torch_core.rowwise.reference:row_norm",
        plan="torch_core.rowwise.kernels.norm.plan:plan_row_norm",
        serves=(compute_dtype("x"), strides(contiguous=("weight", "bias")), _ROWS._replace(limit=_norm_limit)),
    ),
    Op(
        call=RowLogSumExpCall,
        reference="torch_core.rowwise.reference:row_logsumexp",
        cpu="torch_core.rowwise.reference:row_logsumexp",
        plan="torch_core.rowwise.kernels.logsumexp.plan:plan_row_logsumexp",
        serves=(strides(), _ROWS),
    ),
    Op(
        call=RowQuantizeCall,
        reference="torch_core.rowwise.reference:row_quantize",
        cpu="torch_core.rowwise.reference:row_quantize",
        plan="torch_core.rowwise.kernels.quantize.plan:plan_row_quantize",
        serves=(
            compute_dtype("x"),
            strides(contiguous=("row_scale", "column_scale", "weight")),
            _ROWS._replace(limit=_quantize_limit),
        ),
    ),
)


def calls_in_use() -> dict[str, Call[ArraySpec]]:
    """Returns calls of specs by label, which names the op and the differences from its most frequent use.

    Representative calls of Llama 3.1 8B.
    """
    return {
        "row product": _product(8192),
        "row product decode": _product(64),
        "row product float32": _product(64, "float32"),
        "row product gated": RowProductCall(
            x=ArraySpec((8192, 4096), "bfloat16"), kernel=ArraySpec((4096, 28672), "bfloat16"), activation="silu"
        ),
        "row norm": _norm(64),
        "row norm float32": _norm(64, "float32"),
        "row logsumexp": RowLogSumExpCall(x=ArraySpec((64, 128256), "float32")),
        "row quantize": RowQuantizeCall(x=ArraySpec((64, 4096), "bfloat16")),
        "row quantize norm": _quantize_normed(64),
        "row quantize gated": _quantize_gated(64),
    }


def _product(num_rows: int, dtype: str = "bfloat16") -> RowProductCall[ArraySpec]:
    return RowProductCall(x=ArraySpec((num_rows, 4096), dtype), kernel=ArraySpec((4096, 6144), dtype))


def _quantize_normed(num_rows: int) -> RowQuantizeCall[ArraySpec]:
    rows = ArraySpec((num_rows, 4096), "bfloat16")
    weight, scales = ArraySpec((4096,), "bfloat16"), _scales(num_rows, 4096)
    return RowQuantizeCall(x=rows, residual=rows, weight=weight, epsilon=1e-5, **scales)


def _quantize_gated(num_rows: int) -> RowQuantizeCall[ArraySpec]:
    x = ArraySpec((num_rows, 2 * 14336), "bfloat16")
    return RowQuantizeCall(x=x, activation="silu", **_scales(num_rows, 2 * 14336))


def _scales(num_rows: int, features: int) -> dict[str, Any]:
    return {"row_scale": ArraySpec((num_rows,), "float32"), "column_scale": ArraySpec((features,), "float32")}


def _norm(num_rows: int, dtype: str = "bfloat16") -> RowNormCall[ArraySpec]:
    return RowNormCall(x=ArraySpec((num_rows, 4096), dtype), weight=ArraySpec((1, 4096), dtype), epsilon=1e-5)
