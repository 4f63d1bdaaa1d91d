"""Layers with a state on torch tensors, by keywords."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_core.base.errors import Unsupported
from torch_core.launch.public import documented
from torch_core.launch.run import run
from torch_core.state.backward_call import GatedDeltaBackwardCall, MambaChunkScanBackwardCall, StateBackwardCall
from torch_core.state.call import StateCall
from torch_core.state.delta_call import GatedDeltaCall
from torch_core.state.mamba_call import MambaChunkScanCall


@documented(GatedDeltaCall, "Tensor")
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    query_start_loc: Tensor,
    *,
    max_query_len: int,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    states: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    num_kept_tokens: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """Updates the state of each head by the gated delta rule, in place, and reads it with the queries.

    autograd gets the gradients of all arrays but the states, which are constants to it: a copy of them is kept for the
    backward pass. Sums have a fixed order. There is no second derivative.

    Args:
        scale: factor of the results; `key_size**-0.5` when None.

    Returns:
        The results, `[num_tokens, num_heads, value_size]`, 0 in rows of padding.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; on the CPU also offsets that fall, slots out of range, and a
            slot of two sequences with tokens.
        Unsupported: states that require a gradient; gradients of what the kernels do not differentiate, on CUDA.

    Example:
        >>> one, starts, states = torch.ones(1, 1, 1), torch.tensor([0, 1]).int(), torch.ones(1, 1, 1, 1)
        >>> out = gated_delta_rule(one, one, 3 * one, 0.5 * one[0], starts, states=states, max_query_len=1)
        >>> out.item(), states.item()  # halfway from 1 to the value
        (2.0, 2.0)
    """
    call = GatedDeltaCall(
        query=query,
        key=key,
        value=value,
        beta=beta,
        query_start_loc=query_start_loc,
        g=g,
        gk=gk,
        states=states,
        cache_indices=cache_indices,
        has_initial_state=has_initial_state,
        num_kept_tokens=num_kept_tokens,
        max_query_len=max_query_len,
        scale=key.shape[-1] ** -0.5 if scale is None else scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return _differentiable(call, GatedDeltaBackwardCall)


@documented(MambaChunkScanCall, "Tensor")
def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    query_start_loc: Tensor,
    *,
    max_query_len: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    states: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    num_kept_tokens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Updates the state of each head by Mamba-2's rule, token by token, in place, and reads it with C.

    autograd gets the gradients of all arrays but the states, which are constants to it: a copy of them is kept for the
    backward pass. Sums have a fixed order. There is no second derivative.

    Returns:
        The results, `[num_tokens, num_heads, head_dim]`, 0 in rows of padding.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; on the CPU also offsets that fall, slots out of range, and a
            slot of two sequences with tokens.
        Unsupported: states that require a gradient; gradients of what the kernels do not differentiate, on CUDA.

    Example:
        >>> one, starts, states = torch.ones(1, 1, 1), torch.tensor([0, 1]).int(), torch.full((1, 1, 1, 1), 8.0)
        >>> rate = torch.tensor([0.5]).log()
        >>> out = mamba_chunk_scan(3 * one, 2 * one[0], rate, one, one, starts, states=states, max_query_len=1)
        >>> round(out.item(), 6), states.item()  # a quarter of 8, and 2 * 3
        (8.0, 8.0)
    """
    call = MambaChunkScanCall(
        x=x,
        dt=dt,
        A=A,
        B=B,
        C=C,
        query_start_loc=query_start_loc,
        D=D,
        dt_bias=dt_bias,
        states=states,
        cache_indices=cache_indices,
        has_initial_state=has_initial_state,
        num_kept_tokens=num_kept_tokens,
        max_query_len=max_query_len,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
    )
    return _differentiable(call, MambaChunkScanBackwardCall)


def _differentiable(call: StateCall[Tensor], derivative: type[StateBackwardCall[Any]]) -> Tensor:
    """Returns the results of a call, whose derivative autograd knows."""
    moved = {name: getattr(call, name) for name in derivative.differentiated if getattr(call, name) is not None}
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in moved.values()):
        return run(call)["out"]
    states = getattr(call, call.states_in)
    if states is not None and states.requires_grad:
        raise Unsupported("states", "requires a gradient", "pass states.detach(): they are constants to autograd")
    return _WithGradients.apply(call, derivative, tuple(moved), *moved.values())


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: StateCall[Tensor],
        derivative: type[StateBackwardCall[Any]],
        names: tuple[str, ...],
        *moved: Tensor,
    ) -> Tensor:
        detached = call.with_arrays({name: x.detach() for name, x in zip(names, moved, strict=True)})
        ctx.call, ctx.derivative = call.map(lambda _: None), derivative
        # The states before the call: it replaces them.
        states = getattr(call, call.states_in)
        kept = {**detached.arrays(), **({} if states is None else {call.states_in: states.clone()})}
        ctx.names, ctx.kept = names, tuple(kept)
        ctx.save_for_backward(*kept.values())
        return run(detached)["out"]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        call = ctx.call.with_arrays(dict(zip(ctx.kept, ctx.saved_tensors, strict=True)))
        found = run(ctx.derivative.for_call(call, d_out=gradients[0].contiguous()))
        return None, None, None, *(found[f"d_{name}"] for name in ctx.names)
