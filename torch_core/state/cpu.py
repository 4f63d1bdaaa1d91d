"""The ops of layers with a state on CPU tensors: all sequences together, and without any check."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from torch_core.state.call import StateCall
from torch_core.state.conv_call import OUTS, CausalConvCall
from torch_core.state.delta_call import L2NORM_EPSILON, GatedDeltaCall
from torch_core.state.mamba_call import MambaChunkScanCall


def causal_conv1d(call: CausalConvCall[Tensor]) -> dict[str, Tensor]:
    """Convolves in float32, and replaces the states in place."""
    call = call.of_channels()
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
        slots, known = _slots(call)
        inputs[first[known, None] + window] = call.conv_states[slots[known]].float()
        lasts = lens if call.num_kept_tokens is None else call.num_kept_tokens.long()
        kept = (slots >= 0) & (lasts > 0)
        call.conv_states[slots[kept]] = inputs[(first + lasts)[kept, None] + window].to(call.conv_states.dtype)
    sums = inputs.new_zeros(len(inputs) - past, inputs.shape[1])
    if call.bias is not None:
        sums += call.bias.float()
    for tap, weight in enumerate(call.weight.float().unbind(1)):
        sums.addcmul_(weight, inputs[tap : tap + len(sums)])
    found = sums[rows - past]
    if call.activation == "silu":
        found = functional.silu(found)
    out = torch.empty_like(call.x) if call.out is None or call.out_sizes is not None else call.out
    out[:total] = found
    out[total:] = 0
    if call.out_sizes is None:
        return {"out": out}
    parts: dict[str, Tensor] = dict(zip(OUTS, map(Tensor.contiguous, out.split(call.out_sizes, 1)), strict=False))
    # A program has a place for the first part, with the name of the field.
    return parts if call.out is None else {**parts, "out": call.out.copy_(parts["out"])}


def gated_delta_rule(call: GatedDeltaCall[Tensor]) -> dict[str, Tensor]:
    """Updates the states of all sequences together, token by token, in float32; replaces them in place."""
    group = call.num_heads // call.num_kv_heads
    query, key, value, beta = (x.float() for x in (call.query, call.key, call.value, call.beta))
    if call.use_qk_l2norm_in_kernel:
        query, key = (x * (x.square().sum(-1, keepdim=True) + L2NORM_EPSILON).rsqrt() for x in (query, key))
    query, key = (x.repeat_interleave(group, 1) for x in (query * call.scale, key))
    gate = call.gk if call.g is None else call.g[..., None]
    decay = None if gate is None else gate.float().exp()

    def advance(held: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        if decay is not None:
            held *= decay[rows, :, None]
        error = (value[rows] - (held * key[rows, :, None]).sum(-1)) * beta[rows, :, None]
        held += error[..., None] * key[rows, :, None]
        return held, (held * query[rows, :, None]).sum(-1)

    return _token_by_token(call, call.value, call.key.shape[2], advance)


def mamba_chunk_scan(call: MambaChunkScanCall[Tensor]) -> dict[str, Tensor]:
    """Updates the states of all sequences together, token by token, in float32; replaces them in place."""
    call = call.of_heads(torch)
    group = call.num_heads // call.num_kv_heads
    x, steps = call.x.float(), call.dt.float()
    if call.dt_bias is not None:
        steps = steps + call.dt_bias.float()
    if call.dt_softplus:
        # torch's softplus rounds the last elements of an array in another way than the others.
        steps = torch.where(steps > 20, steps, steps.exp().log1p())
    steps = steps.clamp(*call.dt_limit)
    decay, inputs = (steps * call.A.float()).exp(), steps[..., None] * x
    weights, reads = (each.float().repeat_interleave(group, 1) for each in (call.B, call.C))

    def advance(held: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        held *= decay[rows, :, None, None]
        held += inputs[rows][..., None] * weights[rows, :, None]
        found = (held * reads[rows, :, None]).sum(-1)
        return held, found if call.D is None else found + call.D.float()[:, None] * x[rows]

    return _token_by_token(call, call.x, call.state_size, advance)


def _token_by_token(
    call: GatedDeltaCall[Tensor] | MambaChunkScanCall[Tensor],
    values: Tensor,
    columns: int,
    advance: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> dict[str, Tensor]:
    """Advances the states of all sequences, in float32, and replaces them.

    Args:
        call: call with states of `columns` columns.
        values: an array with the axes of the results.
        columns: likewise.
        advance: returns new states and results of some sequences; of their states, and of the rows of their tokens.
    """
    starts = call.query_start_loc.long()
    lens = starts.diff()
    out = torch.zeros_like(values) if call.out is None else call.out.zero_()
    states = torch.zeros(call.num_seqs, *values.shape[1:], columns)
    slots, known = _slots(call)
    lasts = lens if call.num_kept_tokens is None else call.num_kept_tokens.long()
    if call.states is not None:
        states[known] = call.states[slots[known]].float()
    for step in range(int(lens.max())):
        seqs = (lens > step).nonzero()[:, 0]
        rows = starts[seqs] + step
        states[seqs], found = advance(states[seqs], rows)
        out[rows] = found.to(out.dtype)
        if call.states is not None:
            kept = (slots >= 0) & (lasts == step + 1)
            call.states[slots[kept]] = states[kept].to(call.states.dtype)
    return {"out": out}


def _slots(call: StateCall[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the slot of each sequence, and whether it starts from the state there."""
    slots = torch.arange(call.num_seqs) if call.cache_indices is None else call.cache_indices.long()
    return slots, slots >= 0 if call.has_initial_state is None else (slots >= 0) & call.has_initial_state
