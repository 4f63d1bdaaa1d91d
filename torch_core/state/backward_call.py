"""The derivatives of ops with a state: what their calls have in common."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import A, dtype_name
from torch_core.state.call import StateCall


class StateBackwardCall(StateCall[A]):
    """The gradients of a state op's inputs, given those of its results.

    A subclass is one of the forward call too. All else is as in that call, whose states are those from before it, and
    are only read here. Sums have a fixed order. Rows past the last sequence have gradients of 0, and `d_out` is not
    read there.
    """

    #: The array with the dtype and axes of the results.
    values_in: ClassVar[str]
    #: The fields that have gradients, besides the states.
    differentiated: ClassVar[tuple[str, ...]]

    @property
    def written(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns the gradient d_NAME of each field, and d_initial, of the state before each sequence."""
        given = ((name, getattr(self, name)) for name in self.differentiated)
        found = {f"d_{name}": ArraySpec(tuple(x.shape), dtype_name(x)) for name, x in given if x is not None}
        states = getattr(self, self.states_in)
        if states is not None:
            wide = "float64" if dtype_name(getattr(self, self.tokens_in)) == "float64" else "float32"
            found["d_initial"] = ArraySpec((self.num_seqs, *states.shape[1:]), wide)
        return found

    def check_options(self) -> None:
        """Runs the forward call's checks, and checks the gradients' dtypes."""
        super().check_options()
        if getattr(self, "out", None) is not None:
            raise InvalidInput("out", "is given", "the gradients do not depend on it")
        given, values = dtype_name(getattr(self, "d_out")), dtype_name(getattr(self, self.values_in))  # noqa: B009
        if given != values:
            raise InvalidInput("d_out", f"is {given}", f"it must be {values}, as {self.values_in} is")
        self.check_dtypes("d_last")

    @classmethod
    def for_call(cls, call: Any, *, d_out: Any, d_last: Any = None) -> Any:
        """Returns the derivative's call for a forward call.

        Args:
            call: the forward call, with the states from before it.
            d_out: the gradient of its results.
            d_last: the gradient of the state after each sequence.
        """
        same = {field.name: getattr(call, field.name) for field in fields(call) if field.name != "out"}
        return cls(**{**same, "d_out": d_out, "d_last": d_last})
