"""Derivatives of ops with a state in plain torch, by autograd: their specification, and on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torch_core.launch.call import array_fields
from torch_core.launch.tensors import torch_dtype
from torch_core.state.backward_call import GatedDeltaBackwardCall, MambaChunkScanBackwardCall, StateBackwardCall
from torch_core.state.delta_call import L2NORM_EPSILON
from torch_core.state.reference import initial_state, kept_tokens


def gated_delta_backward(
    call: StateBackwardCall[Tensor], *, compute_dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Returns the gradients by name, in `compute_dtype`.

    Raises:
        InvalidInput: the call is inconsistent, or a slot is beyond the states or belongs to two sequences.
    """
    call.check()
    call.check_values()
    return _gradients(call, compute_dtype)


# The rule that is differentiated is the call's.
mamba_chunk_scan_backward = gated_delta_backward


def on_cpu(call: StateBackwardCall[Tensor]) -> dict[str, Tensor]:
    """Returns the gradients by name, computed in float32. Nothing is checked."""
    found = _gradients(call, torch.float32)
    return {name: found[name].to(torch_dtype(spec.dtype)) for name, spec in call.outputs().items()}


def _gradients(call: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    first = torch.stack([initial_state(call, seq, call.state_shape).to(dtype) for seq in range(call.num_seqs)])
    moved = {}
    for name in call.differentiated:
        if getattr(call, name) is not None:
            moved[name] = getattr(call, name).detach().to(dtype, copy=True)
            if array_fields(type(call))[name].dims[0] == "num_tokens":
                # Padding may be NaN, and 0 times NaN is NaN.
                moved[name][int(call.query_start_loc[-1]) :] = 0
            moved[name].requires_grad_()
    with torch.enable_grad():
        first.requires_grad_()
        rule: Any = _delta_rule if isinstance(call, GatedDeltaBackwardCall) else _mamba_rule
        rows, last = _token_by_token(call, first, rule(call, moved))
        total = (rows * call.d_out[: len(rows)].to(dtype)).sum()
        if call.d_last is not None:
            total = total + (last * call.d_last.to(dtype)).sum()
        inputs = (*moved.values(), first)
        found = torch.autograd.grad(total, inputs, allow_unused=True)
    gradients = [torch.zeros_like(x) if d_x is None else d_x for x, d_x in zip(inputs, found, strict=True)]
    names = [*(f"d_{name}" for name in moved), "d_initial"]
    return {name: x for name, x in zip(names, gradients, strict=True) if name in call.outputs()}


def _token_by_token(
    call: Any, first: Tensor, advance: Callable[[Tensor, int], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Returns the results of all tokens, and the state that is kept of each sequence."""
    rows, last = [first.new_zeros(0, *first.shape[1:3])], []
    for seq, (start, end) in enumerate(pairwise(call.query_start_loc.tolist())):
        state, kept = first[seq], first[seq]
        for token in range(start, end):
            state, found = advance(state, token)
            rows.append(found[None])
            if token + 1 - start == kept_tokens(call, seq):
                kept = state
        last.append(kept)
    return torch.cat(rows), torch.stack(last)


def _delta_rule(
    call: GatedDeltaBackwardCall[Tensor], moved: dict[str, Tensor]
) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    query, key = moved["query"], moved["key"]
    if call.use_qk_l2norm_in_kernel:
        query, key = (x / (x.square().sum(-1, keepdim=True) + L2NORM_EPSILON).sqrt() for x in (query, key))
    query, key = _of_heads(call, query * call.scale, key)

    def advance(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        if "gk" in moved:
            state = state * moved["gk"][token, :, None].exp()
        elif "g" in moved:
            state = state * moved["g"][token, :, None, None].exp()
        known = (state * key[token, :, None]).sum(-1)
        error = moved["beta"][token, :, None] * (moved["value"][token] - known)
        state = state + error[..., None] * key[token, :, None]
        return state, (state * query[token, :, None]).sum(-1)

    return advance


def _mamba_rule(
    call: MambaChunkScanBackwardCall[Tensor], moved: dict[str, Tensor]
) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    steps = moved["dt"]
    if "dt_bias" in moved:
        steps = steps + moved["dt_bias"]
    if call.dt_softplus:
        steps = torch.logaddexp(steps, torch.zeros_like(steps))
    steps = steps.clamp(*call.dt_limit)
    decays = (steps * moved["A"]).exp()
    weights, reads = _of_heads(call, moved["B"], moved["C"])

    def advance(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        x = moved["x"][token]
        added = (steps[token, :, None] * x)[..., None] * weights[token, :, None]
        state = decays[token, :, None, None] * state + added
        found = (state * reads[token, :, None]).sum(-1)
        return state, found + moved["D"][:, None] * x if "D" in moved else found

    return advance


def _of_heads(call: Any, *arrays: Tensor) -> Iterator[Tensor]:
    return (x.repeat_interleave(call.num_heads // call.num_kv_heads, 1) for x in arrays)
