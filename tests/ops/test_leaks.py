"""Tracers that outlived their function: refused by name, while living ones pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jattn import ops
from jattn.nn import attention_fn
from jattn.nn import linen as twin
from torch_core.base.errors import InvalidInput

X = jnp.ones((3, 2, 8))

TRANSFORMED: dict[str, Callable[[Callable[[jax.Array], jax.Array]], Any]] = {
    "jit": lambda f: jax.jit(f)(X),
    "grad": lambda f: jax.grad(f)(X),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "vmap": lambda f: jax.vmap(f)(X),
    "scan": lambda f: jax.lax.scan(lambda carry, x: (f(x), None), jnp.zeros(()), X),
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f)))(X),
}


@pytest.mark.parametrize("kind", TRANSFORMED)
def test_a_tracer_is_refused_once_its_function_is_left_and_not_before(kind: str) -> None:
    leaked = []

    def look(x: jax.Array) -> jax.Array:
        leaked.append(x)
        ops.refuse_leaked(x=x)
        return x.sum()

    TRANSFORMED[kind](look)

    with pytest.raises(InvalidInput, match=r"^x is a tracer of a function that JAX traced and left \(jit, grad, scan"):
        ops.refuse_leaked(x={"an array": X, "a tracer": leaked[0]})


def _twin(x: jax.Array) -> Any:
    layer = twin.MultiHeadAttention(2, decode=True, max_length=8)
    variables = layer.init(jax.random.key(0), X)
    cache = {**variables["cache"], "cached_key": x}
    return layer.apply({**variables, "cache": cache}, X, mutable=["cache"])


CALLS: dict[str, tuple[str, Callable[[jax.Array], Any]]] = {
    "attention_fn": ("mask", lambda x: attention_fn(X[None], X[None], X[None], mask=x)),
    "attention": ("query", lambda x: ops.attention(x, X, X, jnp.array([0, 3]), max_query_len=3)),
    "linen's cache": ("variables", _twin),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_takes_arrays_says_which_one_it_is(what: str) -> None:
    leaked: list[jax.Array] = []
    jax.jit(leaked.append)(X)
    name, call = CALLS[what]
    with pytest.raises(InvalidInput, match=f"^{name} is a tracer of a function"):
        call(leaked[0])
