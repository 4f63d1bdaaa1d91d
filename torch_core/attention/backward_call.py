"""DenseBackwardCall: the derivative of dense attention, from the results of the forward pass."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from jaxtyping import Float

from torch_core.attention.call import DenseCall
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import FP8_DTYPES, ArraySpec
from torch_core.launch.call import A, dtype_name

#: The fields that attention has gradients for.
DIFFERENTIATED = ("query", "key", "value", "alibi_slopes", "sinks")


@dataclass(frozen=True, kw_only=True)
class DenseBackwardCall(DenseCall[A]):
    """The gradients of a `DenseCall`'s inputs, given those of its results (FlashAttention-2, arXiv 2307.08691).

    Everything else is as in the forward call, whose results `out` and `lse` are only read here. Rows that see nothing
    and rows past the last offset have no gradient, and the values of `d_out` and `d_lse` past it are never read.

    Attributes:
        lse: log-sum-exp of the forward pass; -inf in rows that saw nothing.
        d_out: the gradient of `out`, in its dtype.
        d_lse: the gradient of `lse`; None if it is not differentiated.
    """

    name: ClassVar[str] = "attention_backward"

    lse: Float[A, "num_tokens num_heads"]
    d_out: Float[A, "num_tokens num_heads value_head_size"]
    d_lse: Float[A, "num_tokens num_heads"] | None = None

    @property
    def written(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns d_query, d_key, d_value, and d_alibi_slopes and d_sinks as far as those are given."""
        given = ((name, getattr(self, name)) for name in DIFFERENTIATED)
        return {f"d_{name}": ArraySpec(tuple(x.shape), dtype_name(x)) for name, x in given if x is not None}

    def check_options(self) -> None:
        """Runs the forward call's checks, and checks that its results and their gradients fit together."""
        if self.out is None:
            raise InvalidInput("out", "is missing", "give the forward pass's output")
        super().check_options()
        out_dtype, lse_dtype = dtype_name(self.out), dtype_name(self.lse)
        if out_dtype in FP8_DTYPES:
            raise Unsupported("out", f"is {out_dtype}", "an 8-bit output has no derivative: ask for a wider out_dtype")
        if dtype_name(self.d_out) != out_dtype:
            raise InvalidInput("d_out", f"is {dtype_name(self.d_out)} and out {out_dtype}", "they must be equal")
        wanted = "float64" if dtype_name(self.query) == "float64" else "float32"
        for name, found in (("lse", lse_dtype), ("d_lse", lse_dtype if self.d_lse is None else dtype_name(self.d_lse))):
            if found != wanted:
                raise InvalidInput(name, f"is {found}", f"it must be {wanted}")


def backward_of(call: DenseCall[A], *, out: A, lse: A, d_out: A, d_lse: A | None = None) -> DenseBackwardCall[A]:
    """Returns the backward call of a forward call, given its results and their gradients."""
    given = {**_fields(call), "with_lse": False, "out_dtype": None, "out": out}
    return DenseBackwardCall(**given, lse=lse, d_out=d_out, d_lse=d_lse)


def forward_of(call: DenseBackwardCall[A]) -> DenseCall[A]:
    """Returns the forward call whose derivative a backward call is, with its lse if that is differentiated."""
    given = {**_fields(call), "out": None, "out_dtype": call.result_dtype, "with_lse": call.d_lse is not None}
    return DenseCall(**given)


def _fields(call: DenseCall[A]) -> dict[str, object]:
    return {field.name: getattr(call, field.name) for field in fields(DenseCall)}
