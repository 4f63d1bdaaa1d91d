"""The specification of the ops of layers with a state, in plain torch: token by token."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torch_core.state.conv_call import CausalConvCall


def causal_conv1d(call: CausalConvCall[Tensor], *, compute_dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns `[num_tokens, num_channels]`, and replaces the states in place.

    Raises:
        InvalidInput: the call is inconsistent, or a slot is beyond the states or belongs to two sequences.

    Example:
        >>> states = torch.tensor([[[1.0]], [[2.0]]])
        >>> call = CausalConvCall(x=torch.tensor([[3.0], [4.0]]), weight=torch.tensor([[10.0, 1.0]]),
        ...                       query_start_loc=torch.tensor([0, 2], dtype=torch.int32), conv_states=states,
        ...                       cache_indices=torch.tensor([1], dtype=torch.int32))
        >>> causal_conv1d(call).tolist(), states.tolist()
        ([[23.0], [34.0]], [[[1.0]], [[4.0]]])
    """
    call.check()
    call.check_values()
    out = torch.zeros(call.x.shape, dtype=compute_dtype)
    weight = call.weight.to(compute_dtype)
    for seq, (start, end) in enumerate(pairwise(call.query_start_loc.tolist())):
        if start == end:
            continue
        inputs = torch.cat([_history(call, seq), call.x[start:end]]).to(compute_dtype)
        for token in range(end - start):
            total = (weight * inputs[token : token + call.width].T).sum(1)
            if call.bias is not None:
                total = total + call.bias.to(compute_dtype)
            out[start + token] = total if call.activation is None else total / (1 + (-total).exp())
        slot = _slot(call, seq)
        if slot >= 0:
            call.conv_states[slot] = inputs[end - start :].to(call.conv_states.dtype)  # type: ignore[index, union-attr]
    return out


def _history(call: CausalConvCall[Tensor], seq: int) -> Tensor:
    slot = _slot(call, seq)
    if slot < 0 or (call.has_initial_state is not None and not call.has_initial_state[seq]):
        return torch.zeros(call.width - 1, call.x.shape[1])
    return call.conv_states[slot]  # type: ignore[index]


def _slot(call: CausalConvCall[Tensor], seq: int) -> int:
    if call.conv_states is None:
        return -1
    return seq if call.cache_indices is None else int(call.cache_indices[seq])
