"""fused_linear: a linear map of a few rows in one launch, with the norm in front and the sum behind."""

from __future__ import annotations

import jax

from jattn.ops.choose import launches_kernels
from jattn.ops.run import run
from torch_core.calls import MAX_FUSED_ROWS, LinearCall

__all__ = ["fused_linear", "fuses_linear"]


def fused_linear(
    hidden_states: jax.Array,
    kernel: jax.Array,
    *,
    bias: jax.Array | None = None,
    norm_weight: jax.Array | None = None,
    norm_epsilon: float = 1e-6,
    activation: str | None = None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns `residual + act(rms_norm(hidden_states) @ kernel + bias)`, parts that are not given left out.

    For decoding: the kernels read `kernel` once, and nothing in between is written. Differentiable with implementation
    None or "xla", by jnp.

    Args:
        hidden_states: float[num_tokens, in_size].
        kernel: float[in_size, out_size], or float[in_size, 2 * out_size] with an activation: gate and then up.
        bias: float[out_size], or of gate and up; or None.
        norm_weight: float[in_size] of a root mean square norm (Zhang and Sennrich 2019, arXiv:1910.07467) in front; or
            None for none.
        norm_epsilon: added to the mean square.
        activation: of the gate, one of `torch_core.calls.ACTIVATIONS`: the result is `act(gate) * up`. None for none.
        residual: float[num_tokens, out_size], added behind; or None.
        implementation: "triton", "torch", "xla", or None for the fastest that runs here.

    Returns:
        [num_tokens, out_size], in the dtype that all arrays have.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here, or has no kernel for so many rows.
    """
    call = LinearCall(
        hidden_states=hidden_states,
        kernel=kernel,
        bias=bias,
        norm_weight=norm_weight,
        residual=residual,
        norm_epsilon=norm_epsilon,
        activation=activation,
    )
    return run(call, implementation)["out"]


def fuses_linear(num_tokens: int, implementation: str | None = None) -> bool:
    """Returns whether `fused_linear` is one launch for so many rows, which reads the kernel once."""
    return 0 < num_tokens <= MAX_FUSED_ROWS and launches_kernels(implementation)
