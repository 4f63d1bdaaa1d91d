"""States that a step writes when it knows how many of its tokens stay: speculative decoding of layers with a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jattn.ops.run import run
from torch_core.state.call import StateCall


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, slots=True, eq=False)
class DeferredStates:
    """The states of an op before its tokens, and the op's inputs: a pytree, in place of the states after them.

    An op reads a state for its results, and once more to replace it. A second state for each proposed token, as vLLM
    has it, would be written instead.

    Attributes:
        call: the op's call.
        implementation: computes it; None for the fastest that serves it.
    """

    call: StateCall[jax.Array]
    implementation: str | None

    def after(self, num_kept_tokens: jax.Array) -> jax.Array:
        """Returns the states after the first int32[num_seqs] tokens of each sequence; those of 0 are unchanged."""
        call = self.call.with_arrays({"num_kept_tokens": num_kept_tokens})
        return run(call, self.implementation)[call.states_in]

    def tree_flatten(self) -> tuple[tuple[jax.Array, ...], Any]:
        """Returns the arrays, and all else."""
        arrays = self.call.arrays()
        return tuple(arrays.values()), (tuple(arrays), self.call.map(lambda _: None), self.implementation)

    @classmethod
    def tree_unflatten(cls, rest: Any, arrays: tuple[jax.Array, ...]) -> DeferredStates:
        """Returns the inverse of `tree_flatten`."""
        names, call, implementation = rest
        return cls(call.with_arrays(dict(zip(names, arrays, strict=True))), implementation)


def advance(call: StateCall[jax.Array], implementation: str | None, defer_states: bool) -> tuple[Any, Any]:
    """Runs an op of layers with a state; returns its results, and the new states, `DeferredStates`, or None."""
    if not defer_states or getattr(call, call.states_in) is None:
        results = run(call, implementation)
        return _outs(call, results), results.get(call.states_in)
    results = run(call.with_arrays({"num_kept_tokens": jnp.zeros(call.num_seqs, jnp.int32)}), implementation)
    # The states are the same, in the memory that the op was given.
    return _outs(call, results), DeferredStates(
        call.with_arrays({call.states_in: results[call.states_in]}), implementation
    )


def _outs(call: StateCall[jax.Array], results: dict[str, jax.Array]) -> Any:
    """Returns the results of a call: one array, or a tuple of several."""
    found = tuple(results[name] for name in call.outputs())
    return found[0] if len(found) == 1 else found
