"""GatedDeltaBackwardCall: the derivative of the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float

from torch_core.launch.call import A
from torch_core.state.backward_call import StateBackwardCall
from torch_core.state.delta_call import GatedDeltaCall


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
