"""The activation of a gated layer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Returns `act(gate) * up` in float32."""
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        gate = gate * (0.5 + 0.5 * tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_new" or ACTIVATION == "gelu_pytorch_tanh":
        # 0.5 + 0.5 * tanh(u) is sigmoid(2 * u).
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif ACTIVATION == "swigluoai":
        gate = tl.minimum(gate, 7.0)
        gate = gate * tl.sigmoid(1.702 * gate)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
    else:
        gate = tl.maximum(gate, 0.0)
        if ACTIVATION == "relu2":
            gate = gate * gate
    return gate * up
