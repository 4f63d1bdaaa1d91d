"""A feed-forward layer of experts and its router on JAX arrays: by keywords, and in plain jnp."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jattn.ops.arguments import documented
from jattn.ops.expert_adapters import ExpertAdapters
from jattn.ops.expert_products import ExpertKernels
from jattn.ops.routed import chosen_experts, routed_experts
from jattn.ops.run import run
from jattn.ops.xla import JaxOp, register
from torch_core.experts.call import ExpertsCall
from torch_core.experts.routing_call import RouteCall

_CHOICE = (
    "correction_bias", "top_k", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group",
)  # fmt: skip


@documented(ExpertsCall)
def fused_experts(
    hidden_states: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    gate_up_kernel: jax.Array,
    down_kernel: jax.Array,
    *,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    activation: str = "silu",
    out_dtype: str | None = None,
    adapters: ExpertAdapters | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Sends each token to the experts that a router chose, and returns the weighted sum of their outputs.

    `out[t] = sum over k of topk_weights[t, k] * down(act(gate(x[t])) * up(x[t]))` (Shazeer et al. 2017,
    arXiv:1701.06538), or of `down(act(up(x[t])))` without a gate. No token is dropped, for any number of tokens per
    expert, and an expert without tokens is not read. Differentiable with implementation None or "xla", by jnp.

    Args:
        out_dtype: that of hidden_states when None, or "float32".
        adapters: low-rank adapters of the rows; None for none. Their products are added by further launches.

    Returns:
        [num_tokens, hidden_size].
    """
    wide = jnp.float64 if hidden_states.dtype == jnp.float64 else jnp.float32
    call = ExpertsCall(
        hidden_states=hidden_states,
        topk_weights=topk_weights.astype(wide),
        topk_ids=topk_ids,
        gate_up_kernel=gate_up_kernel,
        down_kernel=down_kernel,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
        out_dtype=out_dtype,
    )
    if adapters is None:
        return run(call, implementation)["out"]

    def routed(added: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        results = run(replace(call, gate_up_added=added, out_dtype=wide.__name__, with_activated=True), implementation)
        return results["out"], results["activated"]

    operands = (hidden_states, topk_weights, topk_ids, call.num_experts)
    return adapters.around(routed, *operands, implementation=implementation).astype(call.result_dtype)


@documented(RouteCall)
def route_experts(
    hidden_states: jax.Array,
    kernel: jax.Array,
    *,
    top_k: int,
    bias: jax.Array | None = None,
    correction_bias: jax.Array | None = None,
    scoring_func: str = "softmax",
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts of each token, those with the largest scores, and returns their weights.

    Scores are `scoring_func(hidden_states @ kernel + bias)` in float32 for every dtype: in fewer bits a router would
    choose other experts. Of equal scores the expert that comes first wins. Differentiable with implementation None or
    "xla", by jnp.

    Returns:
        Weights float32[num_tokens, top_k] and experts int32[num_tokens, top_k], the best expert first.
    """
    call = RouteCall(
        hidden_states=hidden_states,
        kernel=kernel,
        bias=bias,
        correction_bias=correction_bias,
        top_k=top_k,
        scoring_func=scoring_func,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
        n_group=n_group,
        topk_group=topk_group,
    )
    results = run(call, implementation)
    return results["topk_weights"], results["topk_ids"]


def _fused_experts(call: ExpertsCall[jax.Array]) -> dict[str, jax.Array]:
    """Computes a checked call."""
    gate_up = ExpertKernels(call.gate_up_kernel, call.gate_up_bias)
    down = ExpertKernels(call.down_kernel, call.down_bias)
    out, activated = routed_experts(
        gate_up, down, call.activation, call.hidden_states, call.topk_weights, call.topk_ids, call.num_experts,
        is_gated=call.is_gated, added=call.gate_up_added,
    )  # fmt: skip
    return {"out": out.astype(call.result_dtype), **({"activated": activated} if call.with_activated else {})}


def _route_experts(call: RouteCall[jax.Array]) -> dict[str, jax.Array]:
    """Computes a checked call."""
    logits = jnp.dot(call.hidden_states, call.kernel, preferred_element_type=jnp.float32)
    options = {name: getattr(call, name) for name in _CHOICE}
    weights, experts = chosen_experts(logits if call.bias is None else logits + call.bias[None], **options)
    return {"topk_weights": weights, "topk_ids": experts}


register(JaxOp(call=ExpertsCall, jnp=_fused_experts))
register(JaxOp(call=RouteCall, jnp=_route_experts))
