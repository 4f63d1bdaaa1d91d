"""The derivative of the gated delta rule in plain torch, by autograd: its specification, and on CPU tensors."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torch_core.launch.tensors import torch_dtype
from torch_core.state.delta_backward_call import DIFFERENTIATED, GatedDeltaBackwardCall
from torch_core.state.delta_call import L2NORM_EPSILON
from torch_core.state.reference import initial_state, kept_tokens


def gated_delta_backward(
    call: GatedDeltaBackwardCall[Tensor], *, compute_dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Returns the gradients by name, in `compute_dtype`.

    Raises:
        InvalidInput: the call is inconsistent, or a slot is beyond the states or belongs to two sequences.
    """
    call.check()
    call.check_values()
    return _gradients(call, compute_dtype)


def on_cpu(call: GatedDeltaBackwardCall[Tensor]) -> dict[str, Tensor]:
    """Returns the gradients by name, computed in float32. Nothing is checked."""
    found = _gradients(call, torch.float32)
    return {name: found[name].to(torch_dtype(spec.dtype)) for name, spec in call.outputs().items()}


def _gradients(call: GatedDeltaBackwardCall[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    shape = (call.num_heads, call.value.shape[2], call.key.shape[2])
    first = torch.stack([initial_state(call, seq, shape).to(dtype) for seq in range(call.num_seqs)])
    moved = {}
    for name in DIFFERENTIATED:
        if getattr(call, name) is not None:
            moved[name] = getattr(call, name).detach().to(dtype, copy=True)
            # Padding may be NaN, and 0 times NaN is NaN.
            moved[name][int(call.query_start_loc[-1]) :] = 0
            moved[name].requires_grad_()
    with torch.enable_grad():
        first.requires_grad_()
        rows, last = _forward(call, moved, first)
        total = (rows * call.d_out[: len(rows)].to(dtype)).sum()
        if call.d_last is not None:
            total = total + (last * call.d_last.to(dtype)).sum()
        inputs = (*moved.values(), first)
        found = torch.autograd.grad(total, inputs, allow_unused=True)
    gradients = [torch.zeros_like(x) if d_x is None else d_x for x, d_x in zip(inputs, found, strict=True)]
    names = [*(f"d_{name}" for name in moved), "d_initial"]
    return {name: x for name, x in zip(names, gradients, strict=True) if name in call.outputs()}


def _forward(call: GatedDeltaBackwardCall[Tensor], moved: dict[str, Tensor], first: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the results of all tokens, and the state that is kept of each sequence."""
    query, key = moved["query"], moved["key"]
    if call.use_qk_l2norm_in_kernel:
        query, key = (x / (x.square().sum(-1, keepdim=True) + L2NORM_EPSILON).sqrt() for x in (query, key))
    group = call.num_heads // call.num_kv_heads
    query, key = (x.repeat_interleave(group, 1) for x in (query * call.scale, key))
    rows, last = [call.value.new_zeros(0, *call.value.shape[1:], dtype=first.dtype)], []
    for seq, (start, end) in enumerate(pairwise(call.query_start_loc.tolist())):
        state, kept = first[seq], first[seq]
        for token in range(start, end):
            if "gk" in moved:
                state = state * moved["gk"][token, :, None].exp()
            elif "g" in moved:
                state = state * moved["g"][token, :, None, None].exp()
            known = (state * key[token, :, None]).sum(-1)
            error = moved["beta"][token, :, None] * (moved["value"][token] - known)
            state = state + error[..., None] * key[token, :, None]
            rows.append((state * query[token, :, None]).sum(-1)[None])
            if token + 1 - start == kept_tokens(call, seq):
                kept = state
        last.append(kept)
    return torch.cat(rows), torch.stack(last)
