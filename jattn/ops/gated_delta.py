"""The gated delta rule on JAX arrays: by keywords, and in jnp, chunk by chunk."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn.ops.arguments import documented, refuse_traced
from jattn.ops.chunks import Chunks, advance_in_chunks, decay_between
from jattn.ops.deferred import advance
from jattn.ops.state_backward import register_backward
from jattn.ops.xla import JaxOp, register
from torch_core.state.backward_call import GatedDeltaBackwardCall
from torch_core.state.delta_call import L2NORM_EPSILON, GatedDeltaCall

# Tokens of a chunk. With a gate for each channel a chunk has that many squared weights for each one.
_CHUNK, _CHUNK_BY_CHANNEL = 64, 16
_einsum = functools.partial(jnp.einsum, precision="highest")


@documented(GatedDeltaCall)
def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    query_start_loc: jax.Array,
    *,
    max_query_len: int,
    g: jax.Array | None = None,
    gk: jax.Array | None = None,
    states: jax.Array | None = None,
    cache_indices: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    num_kept_tokens: jax.Array | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    defer_states: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, Any]:
    """Updates the state of each head by the gated delta rule, token by token, and reads it with the queries.

    The states are replaced in place if the caller donated them to the jitted step; otherwise XLA copies them first.
    Use the returned array and never the old one. Differentiable in all arrays but the index arrays, with sums in a
    fixed order. Heads can be split over devices.

    Args:
        scale: factor of the results; `key_size**-0.5` when None.

    Returns:
        The results, float[num_tokens, num_heads, value_size], 0 in rows of padding; and the states with the new ones
        in them, None without states.

    Example:
        >>> import jax.numpy as jnp
        >>> one, starts, states = jnp.ones((1, 1, 1)), jnp.array([0, 1]), jnp.ones((1, 1, 1, 1))
        >>> out, states = gated_delta_rule(one, one, 3 * one, 0.5 * one[0], starts, states=states, max_query_len=1)
        >>> out.item(), states.item()  # halfway from 1 to the value
        (2.0, 2.0)
    """
    refuse_traced({"scale": scale})
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
    return advance(call, implementation, defer_states)


def _gated_delta_rule(call: GatedDeltaCall[jax.Array]) -> dict[str, jax.Array]:

    def prepare(chunks: Chunks, is_token: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, beta = map(chunks, (call.query, call.key, call.value, call.beta))
        if call.use_qk_l2norm_in_kernel:
            query, key = (x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + L2NORM_EPSILON) for x in (query, key))
        query, key = (jnp.repeat(x, call.num_heads // call.num_kv_heads, axis=1) for x in (query * call.scale, key))
        gate = call.gk if call.g is None else call.g[..., None]
        gate = jnp.zeros((*beta.shape, 1), beta.dtype) if gate is None else chunks(gate)
        return query, key, value, beta, gate

    size = _CHUNK if call.gk is None else _CHUNK_BY_CHANNEL
    return advance_in_chunks(call, call.value, call.key.shape[2], size, prepare, _chunk)


def _chunk(
    state: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, beta: jax.Array, gate: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of a chunk and the state after it, by the WY form (Yang et al. 2024, arXiv:2406.06484).

    Args:
        state: `[heads, value_size, key_size]`.
        query, key, value: `[heads, tokens, size]`.
        beta: `[heads, tokens]`.
        gate: logarithms of each token's decay, `[heads, tokens, 1 or key_size]`.
    """
    through, between = jnp.exp(jnp.cumsum(gate, axis=1)), decay_between(gate)
    # Each token corrects what the state and the corrections of earlier tokens of the chunk hold for its key.
    errors = beta[..., None] * (value - _einsum("htk,hvk->htv", key * through, state))
    overlap = beta[..., None] * _decayed_products(key, key, between)
    corrections = jax.lax.linalg.triangular_solve(overlap, errors, left_side=True, lower=True, unit_diagonal=True)
    out = _einsum("htk,hvk->htv", query * through, state)
    out += _einsum("hti,hiv->htv", _decayed_products(query, key, between), corrections)
    state = state * through[:, -1:] + _einsum("htv,htk->hvk", corrections, key * between[:, -1])
    return out, state


def _decayed_products(left: jax.Array, right: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns `sum over k of left[t, k] * weights[t, i, k] * right[i, k]`."""
    if weights.shape[-1] == 1:
        return _einsum("htk,hik->hti", left, right) * weights[..., 0]
    return _einsum("htk,htik,hik->hti", left, weights, right)


register(
    JaxOp(
        call=GatedDeltaCall,
        jnp=_gated_delta_rule,
        derivative=register_backward(GatedDeltaCall, GatedDeltaBackwardCall, _gated_delta_rule),
        jnp_derivative=True,
    )
)
