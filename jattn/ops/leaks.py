"""Tracers that outlived the function that JAX traced them in: found by name, before anything is computed with one."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from torch_core.base.errors import InvalidInput


def refuse_leaked(**given: Any) -> None:
    """Refuses leaked tracers of a traced function, if nothing is being traced.

    Inside another traced function JAX itself says so, when the program runs: there nothing tells such a tracer from one
    of a function around it.

    Args:
        **given: pytrees by the name of the argument that they are.

    Raises:
        InvalidInput: a leaf is a tracer.
    """
    tracers = {name: [x for x in jax.tree.leaves(tree) if isinstance(x, Tracer)] for name, tree in given.items()}
    name = next((name for name, found in tracers.items() if found), None)
    if name is not None and _nothing_is_traced():
        problem = "is a tracer of a function that JAX traced and left (jit, grad, scan or another one)"
        raise InvalidInput(name, problem, "return the array from that function, and pass on what it returned")


def _nothing_is_traced() -> bool:
    return get_opaque_trace_state(convention="nnx") == _state_outside()


@functools.cache
def _state_outside() -> Any:
    # A new thread traces nothing, even if this one does.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(get_opaque_trace_state, convention="nnx").result()
