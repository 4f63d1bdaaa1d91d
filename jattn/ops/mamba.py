"""The state space model of Mamba-2 on JAX arrays: by keywords, and in jnp, chunk by chunk."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn import bridge
from jattn.ops.arguments import documented
from jattn.ops.chunks import Chunks, advance_in_chunks, decay_between
from jattn.ops.deferred import advance
from jattn.ops.state_backward import register_backward
from jattn.ops.xla import Derivative, JaxOp, register
from torch_core.state.backward_call import MambaChunkScanBackwardCall
from torch_core.state.mamba_call import MambaChunkScanCall

_CHUNK = 64
_einsum = functools.partial(jnp.einsum, precision="highest")


@documented(MambaChunkScanCall)
def mamba_chunk_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    query_start_loc: jax.Array,
    *,
    max_query_len: int,
    D: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    states: jax.Array | None = None,
    cache_indices: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    num_kept_tokens: jax.Array | None = None,
    dt_column: int | None = None,
    log_rates: bool = False,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    defer_states: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, Any]:
    """Updates the state of each head by Mamba-2's rule, token by token, and reads it with C.

    The states are replaced in place if the caller donated them to the jitted step; otherwise XLA copies them first.
    Use the returned array and never the old one. Differentiable in all arrays but the index arrays, with sums in a
    fixed order. Heads can be split over devices.

    Returns:
        The results, float[num_tokens, num_heads, head_dim], 0 in rows of padding; and the states with the new ones in
        them, None without states.

    Example:
        >>> import jax.numpy as jnp
        >>> one, starts, states = jnp.ones((1, 1, 1)), jnp.array([0, 1]), jnp.full((1, 1, 1, 1), 8.0)
        >>> out, states = mamba_chunk_scan(
        ...     3 * one, 2 * one[0], jnp.log(jnp.array([0.5])), one, one, starts, states=states, max_query_len=1)
        >>> out.item(), states.item()  # a quarter of 8, and 2 * 3
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
        dt_column=dt_column,
        log_rates=log_rates,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
    )
    if not call.is_resolved:
        call.check()
        # Other columns are not split as the heads are.
        call = call.of_heads(jnp) if bridge.may_be_split(x) else call
    return advance(call, implementation, defer_states)


def _mamba_chunk_scan(call: MambaChunkScanCall[jax.Array]) -> dict[str, jax.Array]:
    call = call.of_heads(jnp)

    def prepare(chunks: Chunks, is_token: jax.Array) -> tuple[jax.Array, ...]:
        x, steps, weights, reads = map(chunks, (call.x, call.dt, call.B, call.C))
        if call.dt_bias is not None:
            steps = steps + call.dt_bias.astype(steps.dtype)[None, :, None]
        if call.dt_softplus:
            steps = jax.nn.softplus(steps)
        steps = jnp.where(is_token[:, None], jnp.clip(steps, *call.dt_limit), 0)
        return x, weights, reads, steps, steps * call.A.astype(steps.dtype)[None, :, None]

    def advance(state: jax.Array, x: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, state = _chunk(state, x, *arrays)
        return out if call.D is None else out + call.D.astype(x.dtype)[:, None, None] * x, state

    return advance_in_chunks(call, call.x, call.state_size, _CHUNK, prepare, advance)


def _chunk(
    state: jax.Array, x: jax.Array, weights: jax.Array, reads: jax.Array, steps: jax.Array, gate: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of a chunk and the state after it (SSD; Dao and Gu 2024, arXiv:2405.21060).

    Args:
        state: `[heads, head_dim, state_size]`.
        x: `[heads, tokens, head_dim]`.
        weights, reads: B and C, `[groups, tokens, state_size]`.
        steps: `[heads, tokens]`.
        gate: logarithms of each token's decay, likewise.
    """
    shapes, groups = (x.shape, state.shape), len(weights)
    through, between = jnp.exp(jnp.cumsum(gate, axis=1)), decay_between(gate)
    state, x, steps, through, between = (
        each.reshape(groups, -1, *each.shape[1:]) for each in (state, x, steps, through, between)
    )
    products = _einsum("gtn,gin->gti", reads, weights)[:, None] * between * steps[..., None, :]
    out = _einsum("grti,grip->grtp", products, x)
    out += _einsum("gtn,grpn->grtp", reads, state) * through[..., None]
    added = _einsum("grtp,gtn->grpn", x * (steps * between[..., -1, :])[..., None], weights)
    return out.reshape(shapes[0]), (state * through[..., -1:, None] + added).reshape(shapes[1])


_of_heads = register_backward(MambaChunkScanCall, MambaChunkScanBackwardCall, _mamba_chunk_scan)


def _backward_call(call: MambaChunkScanCall[jax.Array], gradients: dict[str, jax.Array]) -> Any:
    return _of_heads.call_of(call.of_heads(jnp), gradients)


def _gradients(
    call: MambaChunkScanCall[jax.Array], gradients: dict[str, jax.Array], found: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    named = _of_heads.gradients_of(call, gradients, found)
    if call.is_resolved:
        return named

    def resolved(dt: jax.Array, rates: jax.Array) -> tuple[jax.Array, jax.Array]:
        resolved = call.with_arrays({"dt": dt, "A": rates}).of_heads(jnp)
        return resolved.dt, resolved.A

    named["dt"], named["A"] = jax.vjp(resolved, call.dt, call.A)[1]((named["dt"], named["A"]))
    return named


register(
    JaxOp(
        call=MambaChunkScanCall,
        jnp=_mamba_chunk_scan,
        derivative=Derivative(_backward_call, _gradients),
        jnp_derivative=True,
    )
)
