"""The specification of the ops of layers with a state, in plain torch: token by token."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torch_core.state.call import StateCall
from torch_core.state.conv_call import CausalConvCall
from torch_core.state.delta_call import L2NORM_EPSILON, GatedDeltaCall
from torch_core.state.mamba_call import MambaChunkScanCall


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
    call = call.of_channels()
    out = torch.zeros(call.x.shape, dtype=compute_dtype)
    weight, past = call.weight.to(compute_dtype), (call.width - 1, call.x.shape[1])
    for seq, (start, end) in enumerate(pairwise(call.query_start_loc.tolist())):
        if start == end:
            continue
        inputs = torch.cat([initial_state(call, seq, past), call.x[start:end]]).to(compute_dtype)
        for token in range(end - start):
            total = (weight * inputs[token : token + call.width].T).sum(1)
            if call.bias is not None:
                total = total + call.bias.to(compute_dtype)
            out[start + token] = total if call.activation is None else total / (1 + (-total).exp())
        slot, kept = _slot(call, seq), kept_tokens(call, seq)
        if slot >= 0 and kept:
            kept_inputs = inputs[kept : kept + call.width - 1]
            call.conv_states[slot] = kept_inputs.to(call.conv_states.dtype)  # type: ignore[index, union-attr]
    return out


def gated_delta_rule(call: GatedDeltaCall[Tensor], *, compute_dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns `[num_tokens, num_heads, value_size]`, and replaces the states in place.

    Raises:
        InvalidInput: the call is inconsistent, or a slot is beyond the states or belongs to two sequences.

    Example:
        >>> one = torch.ones(1, 1, 1)
        >>> call = GatedDeltaCall(query=one, key=one, value=3 * one, beta=torch.tensor([[0.5]]), scale=1.0,
        ...                       query_start_loc=torch.tensor([0, 1], dtype=torch.int32), states=one[None].clone(),
        ...                       max_query_len=1)
        >>> gated_delta_rule(call).item(), call.states.item()  # halfway from 1 to the value
        (2.0, 2.0)
    """
    call.check()
    call.check_values()
    out = torch.zeros(call.value.shape, dtype=compute_dtype)
    beta = call.beta.to(compute_dtype)
    group = call.num_heads // call.num_kv_heads
    for seq, (start, end) in enumerate(pairwise(call.query_start_loc.tolist())):
        if start == end:
            continue
        first = initial_state(call, seq, (call.num_heads, call.value.shape[2], call.key.shape[2]))
        states = list(first.to(compute_dtype, copy=True))
        for token in range(start, end):
            for head in range(call.num_heads):
                query, key = (x[token, head // group].to(compute_dtype) for x in (call.query, call.key))
                if call.use_qk_l2norm_in_kernel:
                    query, key = (x / (x @ x + L2NORM_EPSILON).sqrt() for x in (query, key))
                state, gate = states[head], call.gk if call.g is None else call.g
                if gate is not None:
                    state = state * gate[token, head].to(compute_dtype).exp()
                error = beta[token, head] * (call.value[token, head].to(compute_dtype) - state @ key)
                states[head] = state + torch.outer(error, key)
                out[token, head] = call.scale * states[head] @ query
            _keep(call, seq, token + 1 - start, states)
    return out


def mamba_chunk_scan(call: MambaChunkScanCall[Tensor], *, compute_dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns `[num_tokens, num_heads, head_dim]`, and replaces the states in place.

    Raises:
        InvalidInput: the call is inconsistent, or a slot is beyond the states or belongs to two sequences.

    Example:
        >>> one = torch.ones(1, 1, 1)
        >>> call = MambaChunkScanCall(x=3 * one, dt=torch.tensor([[2.0]]), A=torch.tensor([0.5]).log(), B=one,
        ...                           C=one, query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        ...                           states=8 * one[None], max_query_len=1)
        >>> round(mamba_chunk_scan(call).item(), 6), call.states.item()  # a quarter of 8, and 2 * 3
        (8.0, 8.0)
    """
    call.check()
    call.check_values()
    call = call.with_arrays({"A": call.A.to(compute_dtype)}).of_heads(torch)
    out = torch.zeros(call.x.shape, dtype=compute_dtype)
    steps, rates = call.dt.to(compute_dtype), call.A
    if call.dt_bias is not None:
        steps = steps + call.dt_bias.to(compute_dtype)
    if call.dt_softplus:
        steps = torch.logaddexp(steps, torch.zeros_like(steps))
    steps = steps.clamp(*call.dt_limit)
    group = call.num_heads // call.num_kv_heads
    for seq, (start, end) in enumerate(pairwise(call.query_start_loc.tolist())):
        if start == end:
            continue
        state = initial_state(call, seq, (*call.x.shape[1:], call.state_size)).to(compute_dtype, copy=True)
        for token in range(start, end):
            x, step = call.x[token].to(compute_dtype), steps[token]
            weights, reads = (
                each[token].to(compute_dtype).repeat_interleave(group, 0)[:, None] for each in (call.B, call.C)
            )
            state = (step * rates).exp()[:, None, None] * state + (step[:, None] * x)[..., None] * weights
            out[token] = (state * reads).sum(2)
            if call.D is not None:
                out[token] += call.D.to(compute_dtype)[:, None] * x
            _keep(call, seq, token + 1 - start, list(state))
    return out


def initial_state(call: StateCall[Tensor], seq: int, shape: tuple[int, ...]) -> Tensor:
    """Returns the state that a sequence starts from; zeros of that shape if it has none."""
    slot = _slot(call, seq)
    if slot < 0 or (call.has_initial_state is not None and not call.has_initial_state[seq]):
        return torch.zeros(shape)
    return getattr(call, call.states_in)[slot]


def kept_tokens(call: StateCall[Tensor], seq: int) -> int:
    """Returns the tokens of a sequence whose state is kept."""
    kept = call.query_start_loc.diff() if call.num_kept_tokens is None else call.num_kept_tokens
    return int(kept[seq])


def _keep(
    call: GatedDeltaCall[Tensor] | MambaChunkScanCall[Tensor], seq: int, num_tokens: int, state: list[Tensor]
) -> None:
    """Stores the state of a sequence's heads after some of its tokens, if it is the one that is kept."""
    slot = _slot(call, seq)
    if slot >= 0 and num_tokens == kept_tokens(call, seq):
        call.states[slot] = torch.stack(state).to(call.states.dtype)  # type: ignore[index, union-attr]


def _slot(call: StateCall[Tensor], seq: int) -> int:
    if getattr(call, call.states_in) is None:
        return -1
    return seq if call.cache_indices is None else int(call.cache_indices[seq])
