"""A router: the scores of each token, and the best of them."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.experts.routing_call import RouteCall


def route_experts(call: RouteCall[Tensor], *, compute_dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Returns weights `[num_tokens, top_k]` and experts int64 `[num_tokens, top_k]`, the best first.

    Example:
        >>> call = RouteCall(hidden_states=torch.ones(1, 1), kernel=torch.tensor([[0.0, 2.0, 1.0]]), top_k=2)
        >>> route_experts(call)[1].tolist()
        [[1, 2]]
    """
    weights = torch.zeros(call.num_tokens, call.top_k, dtype=compute_dtype)
    experts = torch.zeros(call.num_tokens, call.top_k, dtype=torch.int64)
    for token, row in enumerate(call.hidden_states):
        scores = router_scores(call, row, compute_dtype)
        choice = scores if call.correction_bias is None else scores + call.correction_bias.to(compute_dtype)
        # A stable order: of equal scores the first expert's comes first.
        order = choice.argsort(descending=True, stable=True).tolist()
        allowed = _of_best_groups(call, choice.tolist())
        best = [expert for expert in order if expert in allowed][: call.top_k]
        found = scores[best]
        if call.norm_topk_prob:
            found = found / (found.sum() + 1e-20)
        weights[token], experts[token] = found * call.routed_scaling_factor, torch.tensor(best)
    return weights, experts


def router_scores(call: RouteCall[Tensor], row: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Returns the scores of all experts for a row of `hidden_states`."""
    logits = row.to(compute_dtype) @ call.kernel.to(compute_dtype)
    if call.bias is not None:
        logits = logits + call.bias.to(compute_dtype)
    return logits.softmax(-1) if call.scoring_func == "softmax" else 1 / (1 + (-logits).exp())


def _of_best_groups(call: RouteCall[Tensor], choice: list[float]) -> list[int]:
    size = call.num_experts // call.n_group
    groups = [sorted(choice[first : first + size]) for first in range(0, call.num_experts, size)]
    values = [sum(group[-2 if call.sums_two else -1 :]) for group in groups]
    kept = sorted(range(call.n_group), key=lambda group: (-values[group], group))[: call.topk_group]
    return [expert for expert in range(call.num_experts) if expert // size in kept]
