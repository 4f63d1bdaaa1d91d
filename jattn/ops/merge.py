"""The merge of partial results on JAX arrays: by keywords, and in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn.ops.arguments import documented
from jattn.ops.quantise import quantised
from jattn.ops.run import run
from jattn.ops.xla import JaxOp, register
from torch_core.attention.merge_call import MergeCall


@documented(MergeCall)
def merge_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Joins two results over disjoint keys, as if the queries had seen all keys at once.

    The formula of "FlashInfer" (Ye et al. 2025, section 2.2) and of vLLM's merge_attn_states; natural logarithms. A
    side with lse -inf (or +inf, as some kernels mark an empty row) is ignored, with any output.

    Returns:
        The joined output in the dtype of out_a, and its LSE; zeros and -inf if both sides are empty.

    Example:
        >>> import jax.numpy as jnp
        >>> ones, lse = jnp.ones((1, 1, 2)), jnp.zeros((1, 1))
        >>> out, _ = merge_states(ones, lse, 3 * ones, lse)
        >>> out.tolist()
        [[[2.0, 2.0]]]
    """
    results = run(MergeCall(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b), implementation)
    return results["out"], results["lse"]


def _merge_states(call: MergeCall[jax.Array]) -> dict[str, jax.Array]:
    lse_a, lse_b = (jnp.where(jnp.isposinf(lse), -jnp.inf, lse) for lse in (call.lse_a, call.lse_b))
    if call.num_tokens_a is not None:
        lse_a = jnp.where(jnp.arange(lse_a.shape[0], dtype=jnp.int32)[:, None] < call.num_tokens_a, lse_a, -jnp.inf)
    maximum = jnp.maximum(lse_a, lse_b)
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    weight_a, weight_b = jnp.exp(lse_a - shift), jnp.exp(lse_b - shift)
    total = weight_a + weight_b
    safe = jnp.where(total == 0, 1, total)
    # An empty side's output may be anything, NaN included.
    parts = [
        jnp.where(weight[..., None] > 0, out.astype(lse_a.dtype), 0) * (weight / safe)[..., None]
        for out, weight in ((call.out_a, weight_a), (call.out_b, weight_b))
    ]
    out = quantised(parts[0] + parts[1], call.out_scale, call.result_dtype)
    return {"out": out, "lse": jnp.where(total == 0, -jnp.inf, shift + jnp.log(safe))}


register(JaxOp(call=MergeCall, jnp=_merge_states))
