"""GatedDeltaBackwardCall: the derivative of the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from jaxtyping import Float

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import A, dtype_name
from torch_core.state.delta_call import GatedDeltaCall

#: The fields that have gradients, besides the states.
DIFFERENTIATED = ("query", "key", "value", "beta", "g", "gk")


@dataclass(frozen=True, kw_only=True)
class GatedDeltaBackwardCall(GatedDeltaCall[A]):
    """The gradients of a `GatedDeltaCall`'s inputs, given those of its results.

    All else is as in the forward call, whose states are those from before it, and are only read here. Sums over the
    heads of a key have a fixed order. Rows past the last sequence have gradients of 0, and `d_out` is not read there.

    Attributes:
        d_out: the gradient of `out`, in its dtype.
        d_last: the gradient of the state after each sequence, in float32; None if it is not differentiated.
    """

    name: ClassVar[str] = "gated_delta_backward"

    d_out: Float[A, "num_tokens num_heads value_size"]
    d_last: Float[A, "num_seqs num_heads value_size key_size"] | None = None

    @property
    def written(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns d_query, d_key, d_value, d_beta, d_g or d_gk; and d_initial, of the state before each sequence."""
        given = ((name, getattr(self, name)) for name in DIFFERENTIATED)
        found = {f"d_{name}": ArraySpec(tuple(x.shape), dtype_name(x)) for name, x in given if x is not None}
        if self.states is not None:
            wide = "float64" if dtype_name(self.query) == "float64" else "float32"
            found["d_initial"] = ArraySpec((self.num_seqs, *self.states.shape[1:]), wide)
        return found

    def check_options(self) -> None:
        """Runs the forward call's checks, and checks the gradients' dtypes."""
        super().check_options()
        if self.out is not None:
            raise InvalidInput("out", "is given", "the gradients do not depend on it")
        if dtype_name(self.d_out) != dtype_name(self.value):
            raise InvalidInput(
                "d_out", f"is {dtype_name(self.d_out)}", f"it must be {dtype_name(self.value)}, as value is"
            )
        self.check_dtypes("d_last")


def backward_of(call: GatedDeltaCall[A], *, d_out: A, d_last: A | None = None) -> GatedDeltaBackwardCall[A]:
    """Returns the derivative's call for a forward call.

    Args:
        call: the forward call, with the states from before it.
        d_out: the gradient of its results.
        d_last: the gradient of the state after each sequence.
    """
    same = {field.name: getattr(call, field.name) for field in fields(call) if field.name != "out"}
    return GatedDeltaBackwardCall(**same, d_out=d_out, d_last=d_last)
