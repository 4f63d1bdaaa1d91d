"""The derivative of dense attention for CPU tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.cpu.masks import Extras, additive_mask, key_range

#: Elements of one matrix of weights: 4M float32 are 16 MiB.
_MAX_ELEMENTS = 1 << 22


def attention_backward(call: DenseBackwardCall[Tensor]) -> dict[str, Tensor]:
    """Returns the gradients by name, computed in float32 sequence by sequence. Nothing is checked."""
    heads = (call.num_kv_heads, call.group)
    query_starts, key_starts = call.query_start_loc.tolist(), call.key_start_loc.tolist()
    found = {
        name: torch.zeros(spec.shape, dtype=torch.float64 if len(spec.shape) == 1 else torch.float32)
        for name, spec in call.outputs().items()
    }
    query, d_query = call.query.float().unflatten(1, heads), found["d_query"].unflatten(1, heads)
    out, d_out = (x.unflatten(1, heads) for x in (call.out, call.d_out))  # type: ignore[union-attr]
    lse = call.lse.unflatten(1, heads)
    d_lse = None if call.d_lse is None else call.d_lse.unflatten(1, heads)
    all_extras = Extras.of(call)
    for seq in range(call.num_seqs):
        extras = all_extras.of_sequence(call, seq)
        key_len, query_len = (starts[seq + 1] - starts[seq] for starts in (key_starts, query_starts))
        step = max(1, _MAX_ELEMENTS // max(1, key_len * call.num_heads))
        for first in range(0, query_len, step):
            rows = slice(query_starts[seq] + first, query_starts[seq] + min(first + step, query_len))
            context = key_len - query_len
            positions = (context + first, context + first + rows.stop - rows.start)
            near = (0, key_len)
            if not extras.irregular:
                near = key_range(positions[0], positions[1] - 1, key_len, extras.is_causal(call.spec), call.spec)
            if near[0] >= near[1]:
                continue
            keys = slice(key_starts[seq] + near[0], key_starts[seq] + near[1])
            # -inf marks rows that saw nothing: no weight of theirs may come from it.
            seen = lse[rows] > -torch.inf
            row_lse = lse[rows].masked_fill(~seen, torch.inf).permute(1, 2, 0)[..., None]
            row_d_out = d_out[rows].float()
            delta = (row_d_out * out[rows].float()).sum(-1)
            if d_lse is not None:
                delta -= d_lse[rows]
            delta = delta.masked_fill(~seen, 0).permute(1, 2, 0)[..., None]
            mask = torch.from_numpy(additive_mask(positions, near, context, call.spec, extras))
            unseen = (mask[0] == -torch.inf).all(0)[:, None, None]
            key, value = (x[keys].float().masked_fill(unseen, 0) for x in (call.key, call.value))
            weights, scores_by = _weights(call, query[rows], key, mask, row_lse)
            d_scores = torch.einsum("qhgd,khd->hgqk", row_d_out, value)
            kept, dropout = weights, extras.dropped((first, first + rows.stop - rows.start), near)
            if dropout is not None:
                dropout = dropout.unflatten(0, heads)
                kept, d_scores = weights * dropout, d_scores * dropout
            d_scores = d_scores.sub_(delta).mul_(weights)
            found["d_value"][keys] += torch.einsum("hgqk,qhgd->khd", kept, row_d_out)
            if "d_sinks" in found:
                sinks = call.sinks.float().view(*heads, 1, 1)  # type: ignore[union-attr]
                found["d_sinks"] -= (torch.exp(sinks - row_lse) * delta).double().sum((2, 3)).flatten()
            if "d_alibi_slopes" in found and extras.by_distance is not None:
                distance = np.arange(*near)[None, :] - np.arange(*positions)[:, None]
                form = torch.from_numpy(extras.by_distance.alibi_form(distance.astype(np.float32)))
                found["d_alibi_slopes"] += (d_scores * form).double().sum((2, 3)).flatten()
            d_scores *= scores_by
            d_query[rows] += torch.einsum("hgqk,khd->qhgd", d_scores, key)
            found["d_key"][keys] += torch.einsum("hgqk,qhgd->khd", d_scores, query[rows])
    specs = call.outputs()
    return {name: gradient.to(getattr(torch, specs[name].dtype)) for name, gradient in found.items()}


def _weights(
    call: DenseBackwardCall[Tensor], query: Tensor, key: Tensor, mask: Tensor, row_lse: Tensor
) -> tuple[Tensor, Tensor | float]:
    """Returns the softmax weights `[num_kv_heads, group, rows, keys]`, and the derivative of scores by products."""
    scores = torch.einsum("qhgd,khd->hgqk", query, key).mul_(call.spec.scale)
    scores_by: Tensor | float = call.spec.scale
    cap = call.spec.logits_soft_cap
    if cap is not None:
        capped = scores.div_(cap).tanh_()
        scores_by = (1 - capped * capped).mul_(call.spec.scale)
        scores = capped.mul_(cap)
    scores += mask.view(call.num_kv_heads, call.group, *mask.shape[1:]) if mask.shape[0] > 1 else mask
    return scores.sub_(row_lse).exp_(), scores_by
