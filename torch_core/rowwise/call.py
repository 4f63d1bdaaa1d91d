"""The calls of operations on rows: each row's result is computed in one order, however many rows there are."""

from __future__ import annotations

import numbers
import sys
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Float32

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import A, Call, check_one_dtype, dtype_name

#: The norms, by the names of `ModelConfig.norm_type`.
NORM_TYPES = ("rms_norm", "rms_norm_wide", "gemma_rms_norm", "layer_norm")
#: The activations of gates, by the names of `ModelConfig.hidden_act`.
GATE_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# XLA and cuBLAS multiply e4m3 rows in multiples of 16, and copy others to pad them.
_ROW_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class _RowCall(Call[A]):
    """An op on rows.

    Attributes:
        x: the rows.
    """

    x: Float[A, "num_rows features"]

    @property
    def num_rows(self) -> int:
        """Rows of the result."""
        return self.x.shape[0]

    @property
    def is_empty(self) -> bool:
        """Whether there is no row."""
        return self.num_rows == 0

    @property
    def work(self) -> int:
        """Elements."""
        return self.x.size


@dataclass(frozen=True, kw_only=True)
class RowProductCall(_RowCall[A]):
    """A matrix product whose sums over the inputs have one order for any number of rows.

    Attributes:
        kernel: the weights, `[in, out]`.
        transposed: the weights are `[out, in]`, as an embedding is.
        out_dtype: "float32", or None for that of `x`; sums are float32 in both.
        activation: "silu": the outputs are `[gate | up]`, and the result is `silu(gate) * up`, rounded once. A kernel
            has it on Hopper alone, for 16 bits and sizes that `jattn.ops.gates_rows` tells; None for no activation.
    """

    name: ClassVar[str] = "row_product"

    x: Float[A, "num_rows in_features"]
    kernel: Float[A, "kernel_rows kernel_columns"]
    transposed: bool = False
    out_dtype: str | None = None
    activation: str | None = None

    @property
    def out_features(self) -> int:
        """Elements of a row of the result."""
        return self.kernel.shape[0 if self.transposed else 1] // (1 if self.activation is None else 2)

    @property
    def work(self) -> int:
        """The products."""
        return self.x.shape[0] * self.kernel.size

    @property
    def result_dtype(self) -> str:
        """Element type of the result."""
        return self.out_dtype or dtype_name(self.x)

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out`."""
        return {"out": ArraySpec((self.x.shape[0], self.out_features), self.result_dtype)}

    def check_options(self) -> None:
        """Checks sizes and dtypes."""
        if 0 in self.kernel.shape:
            raise InvalidInput("kernel", f"has shape {list(self.kernel.shape)}", "no size may be 0")
        if self.kernel.shape[1 if self.transposed else 0] != self.x.shape[1]:
            wanted = f"its {'second' if self.transposed else 'first'} axis must be {self.x.shape[1]}, as x has features"
            raise InvalidInput("kernel", f"has shape {list(self.kernel.shape)}", wanted)
        check_one_dtype(self, "x", "kernel")
        if self.out_dtype not in (None, "float32", dtype_name(self.x)):
            raise InvalidInput("out_dtype", value=self.out_dtype, wanted="use 'float32', or None for the dtype of x")
        if self.activation not in (None, "silu"):
            raise InvalidInput("activation", value=self.activation, wanted="use 'silu', or None")
        if self.activation is not None and (self.transposed or self.kernel.shape[1] % 2):
            wanted = "with an activation it is [in, gate | up]: two halves of one size"
            raise InvalidInput("kernel", f"has shape {list(self.kernel.shape)}", wanted)


@dataclass(frozen=True, kw_only=True)
class RowNormCall(_RowCall[A]):
    """A norm over the last axis, in float32; root mean square (arXiv:1910.07467) or layer norm (arXiv:1607.06450).

    Attributes:
        weight: row `r` has the weights `r % num_weights`.
        bias: of a layer norm, or None.
        epsilon: added to the mean square, or to the variance.
        norm_type: "rms_norm" rounds to the dtype of `x` before the weight, "rms_norm_wide" after it; "gemma_rms_norm"
            multiplies by 1 + weight; "layer_norm" also subtracts the mean.
    """

    name: ClassVar[str] = "row_norm"

    weight: Float[A, "num_weights features"]
    bias: Float[A, "num_weights features"] | None = None
    epsilon: float
    norm_type: str = "rms_norm"

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out`."""
        return {"out": ArraySpec(tuple(self.x.shape), dtype_name(self.x))}

    def check_options(self) -> None:
        """Checks sizes, dtypes and options."""
        if 0 in self.weight.shape:
            raise InvalidInput("weight", f"has shape {list(self.weight.shape)}", "no size may be 0")
        if self.x.shape[0] % self.weight.shape[0]:
            wanted = f"there must be a multiple of the {self.weight.shape[0]} rows of weights"
            raise InvalidInput("x", f"has {self.x.shape[0]} rows", wanted)
        check_one_dtype(self, "x", "weight", "bias")
        if self.norm_type not in NORM_TYPES:
            raise InvalidInput("norm_type", value=self.norm_type, wanted=f"use one of {', '.join(NORM_TYPES)}")
        _check_epsilon(self.epsilon)


@dataclass(frozen=True, kw_only=True)
class RowLogSumExpCall(_RowCall[A]):
    """The natural logarithm of the sum of exponentials of each row."""

    name: ClassVar[str] = "row_logsumexp"

    x: Float32[A, "num_rows features"]

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out`."""
        return {"out": ArraySpec((self.x.shape[0],), "float32")}

    def check_options(self) -> None:
        """Checks the size of a row."""
        if self.x.shape[1] == 0:
            raise InvalidInput("x", "has rows without an element", "there must be at least one")


@dataclass(frozen=True, kw_only=True)
class RowQuantizeCall(_RowCall[A]):
    """Rows as e4m3 numbers with a float32 scale each, after an activation, or a sum and a norm, of the same rows.

    `values * scale` is about the row; the scale is the row's largest magnitude / 448. A row with a value that is not
    finite has such values. Only the sum, and "rms_norm" before its weight, are rounded to the dtype of `residual`, or
    of `x` without one.

    Attributes:
        x: the rows. With `row_scale` there may be more of them, which are not read.
        row_scale: factors of rows, for a product of e4m3 numbers that was not scaled; None for 1.
        column_scale: the same for columns.
        activation: one of GATE_ACTIVATIONS: the row is `activation(gate) * up` of the halves `gate | up` of x.
        residual: added to the row; the sum is the result `stream`.
        weight: of the norm that follows; None for no norm.
        epsilon: added to the mean square.
        norm_type: a norm of `RowNormCall` but "layer_norm".
    """

    name: ClassVar[str] = "row_quantize"

    x: Float[A, "num_product_rows in_features"]
    row_scale: Float32[A, "num_rows"] | None = None
    column_scale: Float32[A, "in_features"] | None = None
    residual: Float[A, "num_rows features"] | None = None
    weight: Float[A, "features"] | None = None
    activation: str | None = None
    epsilon: float = 0.0
    norm_type: str = "rms_norm"

    @property
    def num_rows(self) -> int:
        """Rows of the result."""
        return (self.x if self.row_scale is None else self.row_scale).shape[0]

    @property
    def features(self) -> int:
        """Elements of a row of the result."""
        return self.x.shape[1] // (1 if self.activation is None else 2)

    @property
    def rounded_dtype(self) -> str:
        """Element type that steps round to."""
        return dtype_name(self.x if self.residual is None else self.residual)

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `values`, with undefined rows up to a multiple of 16, `scale`, and `stream` of a residual."""
        padded = -(-self.num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
        outputs = {
            "values": ArraySpec((padded, self.features), "float8_e4m3fn"),
            "scale": ArraySpec((self.num_rows,), "float32"),
        }
        if self.residual is not None:
            outputs["stream"] = ArraySpec((self.num_rows, self.features), self.rounded_dtype)
        return outputs

    def check_options(self) -> None:
        """Checks sizes, dtypes and options."""
        check_one_dtype(self, "x" if self.residual is None else "residual", "weight")
        if self.x.shape[0] < self.num_rows:
            raise InvalidInput("x", f"has {self.x.shape[0]} rows", f"there are {self.num_rows} scales of rows")
        if self.activation is not None:
            if self.activation not in GATE_ACTIVATIONS:
                wanted = f"use None or one of {', '.join(GATE_ACTIVATIONS)}"
                raise InvalidInput("activation", value=self.activation, wanted=wanted)
            if self.x.shape[1] % 2:
                raise InvalidInput("x", f"has {self.x.shape[1]} features", "with an activation they are two halves")
        if self.features == 0:
            raise InvalidInput("x", "has rows without an element", "there must be at least one")
        wanted = (self.num_rows, self.features)
        if self.residual is not None and tuple(self.residual.shape) != wanted:
            raise InvalidInput("residual", f"has shape {list(self.residual.shape)}", f"it must be {list(wanted)}")
        if self.weight is not None and self.weight.shape[0] != self.features:
            raise InvalidInput("weight", f"has shape {list(self.weight.shape)}", f"it must be [{self.features}]")
        if self.norm_type not in NORM_TYPES or self.norm_type == "layer_norm":
            wanted = ", ".join(NORM_TYPES[:-1])
            raise InvalidInput("norm_type", value=self.norm_type, wanted=f"use one of {wanted}")
        _check_epsilon(self.epsilon)


def _check_epsilon(epsilon: float) -> None:
    is_number = isinstance(epsilon, numbers.Real) and not isinstance(epsilon, bool)
    if not is_number or not 0 <= epsilon <= sys.float_info.max:
        raise InvalidInput("epsilon", value=epsilon, wanted="it must be finite and not negative")
