"""The derivative of the gated delta rule on JAX arrays: its call, the gradients of slots, and in jnp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jattn.ops.chunks import initial_states, slots_of
from jattn.ops.xla import Derivative, JaxOp, register
from torch_core.state.delta_backward_call import DIFFERENTIATED, GatedDeltaBackwardCall, backward_of
from torch_core.state.delta_call import GatedDeltaCall

_Arrays: TypeAlias = dict[str, jax.Array]


def register_backward(forward: Callable[[GatedDeltaCall[jax.Array]], _Arrays]) -> Derivative:
    """Registers the derivative's op, in jnp that of `forward`, and returns it as a derivative of the rule's op."""

    def backward(call: GatedDeltaBackwardCall[jax.Array]) -> _Arrays:
        given = {field.name: getattr(call, field.name) for field in fields(GatedDeltaCall)}
        rule = GatedDeltaCall(**given)
        names = [name for name in DIFFERENTIATED if given[name] is not None]
        wide = jnp.float64 if call.query.dtype == jnp.float64 else jnp.float32
        first, _ = initial_states(rule, (*call.value.shape[1:], call.key.shape[2]), wide)

        def results(first: jax.Array, *moved: jax.Array) -> tuple[jax.Array, jax.Array]:
            # Each sequence has its state in a slot of its own.
            own = {"states": first, "cache_indices": None, "has_initial_state": None}
            found = forward(GatedDeltaCall(**{**given, **dict(zip(names, moved, strict=True)), **own}))
            return found["out"], found["states"]

        (_, last), pull = jax.vjp(results, first, *(given[name] for name in names))
        is_token = jnp.arange(call.num_tokens)[:, None, None] < call.query_start_loc[-1]
        d_last = jnp.zeros_like(last) if call.d_last is None else call.d_last.astype(last.dtype)
        d_first, *found = pull((jnp.where(is_token, call.d_out, 0), d_last))
        gradients = {f"d_{name}": x for name, x in zip(names, found, strict=True)} | {"d_initial": d_first}
        return {name: gradients[name].astype(spec.dtype) for name, spec in call.outputs().items()}

    register(JaxOp(call=GatedDeltaBackwardCall, jnp=backward, jnp_derivative=True))
    return Derivative(_call_of, _gradients_of)


def _call_of(call: GatedDeltaCall[Any], gradients: _Arrays) -> GatedDeltaBackwardCall[Any]:
    if call.states is None:
        return backward_of(call, d_out=gradients["out"])
    slots, is_kept, _ = slots_of(call)
    places = jnp.where(is_kept, slots, _no_slots(call))
    d_last = gradients["states"].at[places].get(mode="fill", fill_value=0, unique_indices=True)
    return backward_of(call, d_out=gradients["out"], d_last=d_last.astype(jnp.float32))


def _gradients_of(call: GatedDeltaCall[jax.Array], gradients: _Arrays, found: _Arrays) -> _Arrays:
    named = {name: found[f"d_{name}"] for name in DIFFERENTIATED if f"d_{name}" in found}
    if call.states is not None:
        # A state that a sequence replaces matters as that sequence's first state alone.
        (slots, is_kept, known), has_tokens = slots_of(call), jnp.diff(call.query_start_loc) > 0
        replaced = jnp.where(is_kept, slots, _no_slots(call))
        d_states = gradients["states"].at[replaced].set(0, mode="drop", unique_indices=True)
        read = jnp.where(has_tokens & known, slots, _no_slots(call))
        d_first = found["d_initial"].astype(d_states.dtype)
        named["states"] = d_states.at[read].add(d_first, mode="drop", unique_indices=True)
    return named


def _no_slots(call: GatedDeltaCall[jax.Array]) -> jax.Array:
    """Returns a number beyond the slots for each sequence, none twice."""
    return call.states.shape[0] + jnp.arange(call.num_seqs)  # type: ignore[union-attr]
