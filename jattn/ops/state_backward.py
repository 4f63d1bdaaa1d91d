"""Derivatives of ops with a state on JAX arrays: their calls, the gradients of slots, and in jnp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jattn.ops.chunks import initial_states, slots_of
from jattn.ops.xla import Derivative, JaxOp, register
from torch_core.state.backward_call import StateBackwardCall

_Arrays: TypeAlias = dict[str, jax.Array]


def register_backward(
    rule: type[Any], derivative: type[StateBackwardCall[Any]], forward: Callable[[Any], _Arrays]
) -> Derivative:
    """Registers the derivative's op, in jnp that of `forward`, and returns it as a derivative of the rule's op.

    Args:
        rule: the class of the op's calls, with `states`.
        derivative: that of the derivative's.
        forward: computes a call of the op.
    """

    def backward(call: Any) -> _Arrays:
        given = {field.name: getattr(call, field.name) for field in fields(rule)}
        names = [name for name in derivative.differentiated if given[name] is not None]
        wide = jnp.float64 if getattr(call, call.tokens_in).dtype == jnp.float64 else jnp.float32
        first, _ = initial_states(rule(**given), call.state_shape, wide)

        def results(first: jax.Array, *moved: jax.Array) -> tuple[jax.Array, jax.Array]:
            # Each sequence has its state in a slot of its own.
            own = {"states": first, "cache_indices": None, "has_initial_state": None}
            found = forward(rule(**{**given, **dict(zip(names, moved, strict=True)), **own}))
            return found["out"], found["states"]

        (_, last), pull = jax.vjp(results, first, *(given[name] for name in names))
        is_token = jnp.arange(call.num_tokens, dtype=jnp.int32)[:, None, None] < call.query_start_loc[-1]
        d_last = jnp.zeros_like(last) if call.d_last is None else call.d_last.astype(last.dtype)
        d_first, *found = pull((jnp.where(is_token, call.d_out, 0), d_last))
        gradients = {f"d_{name}": x for name, x in zip(names, found, strict=True)} | {"d_initial": d_first}
        return {name: gradients[name].astype(spec.dtype) for name, spec in call.outputs().items()}

    def call_of(call: Any, gradients: _Arrays) -> StateBackwardCall[Any]:
        if call.states is None:
            return derivative.for_call(call, d_out=gradients["out"])
        slots, is_kept, _ = slots_of(call)
        places = jnp.where(is_kept, slots, _no_slots(call))
        d_last = gradients["states"].at[places].get(mode="fill", fill_value=0, unique_indices=True)
        return derivative.for_call(call, d_out=gradients["out"], d_last=d_last.astype(jnp.float32))

    def gradients_of(call: Any, gradients: _Arrays, found: _Arrays) -> _Arrays:
        named = {name: found[f"d_{name}"] for name in derivative.differentiated if f"d_{name}" in found}
        if call.states is not None:
            # A state that a sequence replaces matters as that sequence's first state alone.
            slots, is_kept, known = slots_of(call)
            replaced = jnp.where(is_kept, slots, _no_slots(call))
            d_states = gradients["states"].at[replaced].set(0, mode="drop", unique_indices=True)
            read = jnp.where(known, slots, _no_slots(call))
            d_first = found["d_initial"].astype(d_states.dtype)
            named["states"] = d_states.at[read].add(d_first, mode="drop", unique_indices=True)
        return named

    register(JaxOp(call=derivative, jnp=backward, jnp_derivative=True))
    return Derivative(call_of, gradients_of)


def _no_slots(call: Any) -> jax.Array:
    """Returns a number beyond the slots for each sequence, none twice."""
    return call.states.shape[0] + jnp.arange(call.num_seqs, dtype=jnp.int32)
