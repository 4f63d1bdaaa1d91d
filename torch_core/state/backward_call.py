"""The calls of the derivatives of ops with a state, and what they have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from jaxtyping import Float

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import A, dtype_name
from torch_core.launch.call import A as Array  # Mamba-2 has a field A.
from torch_core.state.call import StateCall
from torch_core.state.delta_call import GatedDeltaCall
from torch_core.state.mamba_call import MambaChunkScanCall


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


@dataclass(frozen=True, kw_only=True)
class GatedDeltaBackwardCall(StateBackwardCall[A], GatedDeltaCall[A]):
    """The gradients of a `GatedDeltaCall`'s inputs, given those of its results; see `StateBackwardCall`.

    Attributes:
        d_out: the gradient of `out`, in its dtype.
        d_last: the gradient of the state after each sequence, in float32; None if it is not differentiated.
    """

    name: ClassVar[str] = "gated_delta_backward"
    values_in: ClassVar[str] = "value"
    differentiated: ClassVar[tuple[str, ...]] = ("query", "key", "value", "beta", "g", "gk")

    d_out: Float[A, "num_tokens num_heads value_size"]
    d_last: Float[A, "num_seqs num_heads value_size key_size"] | None = None


@dataclass(frozen=True, kw_only=True)
class MambaChunkScanBackwardCall(StateBackwardCall[Array], MambaChunkScanCall[Array]):
    """The gradients of a `MambaChunkScanCall`'s inputs, given those of its results; see `StateBackwardCall`.

    A step size at a limit has the gradient of one within.

    Attributes:
        d_out: the gradient of `out`, in its dtype.
        d_last: the gradient of the state after each sequence, in float32; None if it is not differentiated.
    """

    name: ClassVar[str] = "mamba_chunk_scan_backward"
    values_in: ClassVar[str] = "x"
    differentiated: ClassVar[tuple[str, ...]] = ("x", "dt", "A", "B", "C", "D", "dt_bias")

    d_out: Float[Array, "num_tokens num_heads head_dim"]
    d_last: Float[Array, "num_seqs num_heads head_dim state_size"] | None = None

    def check_options(self) -> None:
        """Runs the other checks, and refuses what `of_heads` resolves."""
        super().check_options()
        if not self.is_resolved:
            raise InvalidInput("dt", "or A is not of the heads alone", "give those of the call's of_heads")
