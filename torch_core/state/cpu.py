"""The ops of layers with a state on CPU tensors: all sequences together, and without any check."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torch_core.state.conv_call import CausalConvCall


def causal_conv1d(call: CausalConvCall[Tensor]) -> dict[str, Tensor]:
    """Convolves in float32, and replaces the states in place."""
    # Every sequence's inputs follow its state in one array: then one shift of that array serves all sequences.
    past, starts, seqs = call.width - 1, call.query_start_loc.long(), torch.arange(call.num_seqs)
    lens = starts.diff()
    first = starts[:-1] + past * seqs
    total = int(starts[-1])
    rows = torch.arange(total) + past * (seqs.repeat_interleave(lens) + 1)
    inputs = torch.zeros(total + past * call.num_seqs, call.x.shape[1])
    inputs[rows] = call.x[:total].float()
    window = torch.arange(past)
    if call.conv_states is not None:
        slots = seqs if call.cache_indices is None else call.cache_indices.long()
        known = slots >= 0 if call.has_initial_state is None else (slots >= 0) & call.has_initial_state
        inputs[first[known, None] + window] = call.conv_states[slots[known]].float()
        kept = (slots >= 0) & (lens > 0)
        call.conv_states[slots[kept]] = inputs[(first + lens)[kept, None] + window].to(call.conv_states.dtype)
    sums = inputs.new_zeros(len(inputs) - past, inputs.shape[1])
    if call.bias is not None:
        sums += call.bias.float()
    for tap, weight in enumerate(call.weight.float().unbind(1)):
        sums.addcmul_(weight, inputs[tap : tap + len(sums)])
    found = sums[rows - past]
    if call.activation == "silu":
        found = functional.silu(found)
    out = torch.empty_like(call.x) if call.out is None else call.out
    out[:total] = found
    out[total:] = 0
    return {"out": out}
