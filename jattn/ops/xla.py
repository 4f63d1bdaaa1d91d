"""implementation="xla": every op in plain jnp, differentiable, on any platform, the oracle of the others.

The file of an op registers its `JaxOp` here; `jattn.ops` imports them all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from jattn.bridge.calls import register_call
from torch_core.base.errors import Unsupported
from torch_core.launch.call import Call

#: From gradients to gradients, by the names of arrays.
Pullback: TypeAlias = Callable[[dict[str, jax.Array]], dict[str, jax.Array]]


@dataclass(frozen=True)
class Backward:
    """The derivative of attention by its kernels: that of dense attention.

    Attributes:
        as_dense: returns the dense call with the same results.
        with_pullback: returns that call, and a function from its gradients to those of the call's arrays, by name.
    """

    as_dense: Callable[[Any], Any]
    with_pullback: Callable[[Any], tuple[Any, Pullback]]


@dataclass(frozen=True)
class Derivative:
    """The derivative of an op by a call of its own, which needs no result of the forward pass.

    Attributes:
        call_of: returns that call, from the op's call and the gradients of its results by name.
        gradients_of: returns the gradients of the op's arrays by name, from its call, the gradients of its results, and
            the results of the derivative's call.
    """

    call_of: Callable[[Any, dict[str, jax.Array]], Call[Any]]
    gradients_of: Callable[[Any, dict[str, jax.Array], dict[str, jax.Array]], dict[str, jax.Array]]


@dataclass(frozen=True, kw_only=True)
class JaxOp:
    """The JAX side of an op.

    Attributes:
        call: the class of its calls.
        jnp: computes a checked call; returns its outputs and the new values of the arrays that it writes, by name.
            Outside jit it is one program.
        backward: attention's derivative by kernels; None if jnp's is the only one.
        derivative: the derivative of another op by kernels, likewise.
        jnp_derivative: jnp's derivative counts for every implementation, as of a write, which is a scatter.
        folds: the examples of a vmap become more sequences of one call (`jattn.ops.batch`).
        narrowed: arrays that the kernels take as float32 if they are float64 and the query is not.
    """

    call: type[Call[Any]]
    jnp: Callable[[Any], dict[str, jax.Array]]
    backward: Backward | None = None
    derivative: Derivative | None = None
    jnp_derivative: bool = False
    folds: bool = False
    narrowed: tuple[str, ...] = ()

    @functools.cached_property
    def program(self) -> Callable[[Any], dict[str, jax.Array]]:
        """The function as one program outside jit; inside, `inline` leaves no trace of it."""
        return jax.jit(self.jnp, inline=True)


_OPS: dict[type[Call[Any]], JaxOp] = {}


def register(op: JaxOp) -> None:
    """Makes the JAX side of an op known, and its calls pytrees."""
    register_call(op.call)
    _OPS[op.call] = op


def jax_op(call: Call[Any]) -> JaxOp:
    """Returns the JAX side of a call's op.

    Raises:
        Unsupported: it has none.
    """
    op = _OPS.get(type(call))
    if op is None:
        raise Unsupported(f"{call.name} has no implementation in jnp.")
    return op


def run(call: Call[jax.Array]) -> dict[str, jax.Array]:
    """Computes a checked call; returns its outputs and the new values of the arrays that it writes, by name."""
    return jax_op(call).program(call)
