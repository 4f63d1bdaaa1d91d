"""Joining attention results over disjoint sets of keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn.ops import arguments, transforms, xla
from jattn.ops.choose import bridged, choose
from torch_core.errors import InvalidInput, Unsupported
from torch_core.specs import QUERY_DTYPES

__all__ = ["merge_states"]


def merge_states(
    out_a: jax.Array,
    lse_a: jax.Array,
    out_b: jax.Array,
    lse_b: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Joins two results over disjoint keys, as if the queries had seen all keys at once.

    The formula of "FlashInfer" (Ye et al. 2025, section 2.2) and of vLLM's merge_attn_states; natural logarithms. A
    side with lse -inf (or +inf, as some kernels mark an empty row) counts for nothing, whatever its output holds.

    Args:
        out_a, out_b: float[num_tokens, num_heads, head_size].
        lse_a, lse_b: float32[num_tokens, num_heads].
        implementation: "triton", "torch", "xla", or None for the fastest that runs here.

    Returns:
        The joined output in the dtype of out_a, and its LSE; zeros and -inf where both sides are empty.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit.
        Unsupported: a dtype without an implementation, or an implementation that cannot run here.
    """
    for name, out in (("out_a", out_a), ("out_b", out_b)):
        arguments.check_array(name, out, ("num_tokens", "num_heads", "head_size"))
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        arguments.check_array(name, lse, ("num_tokens", "num_heads"))
        if lse.dtype != (required := jnp.promote_types(out_a.dtype, jnp.float32)):
            raise InvalidInput(f"{name} has dtype {lse.dtype.name}; {required.name} is required.")
        if lse.shape != out_a.shape[:2]:
            raise InvalidInput(f"{name} has shape {lse.shape}; out_a of shape {out_a.shape} needs {out_a.shape[:2]}.")
    if out_a.shape != out_b.shape or out_a.dtype != out_b.dtype:
        raise InvalidInput(
            f"out_a is {out_a.dtype.name}{out_a.shape} and out_b {out_b.dtype.name}{out_b.shape}; they must be alike."
        )
    if out_a.dtype.name not in (*QUERY_DTYPES, "float64"):
        raise Unsupported(f"out_a has dtype {out_a.dtype.name}; use one of {', '.join(QUERY_DTYPES)}.")
    chosen = choose(implementation)
    arguments.check_float64("out_a", out_a, chosen)
    operands = arguments.as_jax(out_a, lse_a, out_b, lse_b)
    if chosen == "xla":
        return xla.merge_states(*operands)
    return transforms.opaque(bridged(chosen).merge_states, "merge_states", chosen)(*operands)
