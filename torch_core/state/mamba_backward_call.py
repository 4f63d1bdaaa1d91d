"""MambaChunkScanBackwardCall: the derivative of Mamba-2's state space model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float

from torch_core.launch.call import A as Array
from torch_core.state.backward_call import StateBackwardCall
from torch_core.state.mamba_call import MambaChunkScanCall


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
