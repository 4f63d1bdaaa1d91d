"""JAX transformations of a call that XLA cannot look into: its own derivative, jnp's, or a refusal with the reason.

The rule: an implementation that the caller names is differentiated by itself or not at all. With `implementation=None`
its own derivative is taken if it has one (`torch_core.serves.SERVES`), and jnp's everywhere else: no
derivative that "xla" could give ends in an error. Forward derivatives of attention are jnp's.

Paged attention is differentiated as dense attention over the keys and values that its tables name, gathered for the
backward pass only; a write as the scatter that it is. So gradients flow through a cache that new keys are written to,
and those of a cached prefix add up if sequences share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from jattn import bridge
from jattn.bridge.calls import Runtime, varying
from jattn.ops import batch, xla
from jattn.ops.linear import Arrays, linear_map
from torch_core.attention.backward_call import backward_of
from torch_core.attention.call import AttentionCall
from torch_core.base.errors import Unsupported
from torch_core.launch.call import Call
from torch_core.launch.serves import refuse_unserved, unserved

#: The names under which `jax.checkpoint` policies find the residuals of dense attention, for example
#: `jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)`.
RESIDUAL_NAMES = ("attention_out", "attention_lse")
_RESULTS = ("out", "lse")
_run_in_jnp = bridge.partitioned(xla.run, opaque=False)


@dataclass(frozen=True, slots=True)
class Way:
    """The computation of a call.

    Attributes:
        runtime: the function that runs it.
        implementation: its name.
        served_by: the column of `torch_core.serves.SERVES` with its features.
        chosen: the caller named no implementation, so that jnp may compute a derivative instead.
    """

    runtime: Runtime
    implementation: str
    served_by: str
    chosen: bool


def transformable(call: Call[Any], names: tuple[str, ...], way: Way) -> Callable[..., dict[str, jax.Array]]:
    """Returns the function from a call's arrays to its results that JAX can transform.

    jit, scan, while_loop, cond and checkpoint pass through: the wrappers vanish in lowering. vmap folds the examples of
    a dense call into its batch and runs other calls one after the other. Outside jit, the runtime's exceptions are
    raised unchanged.

    Args:
        call: without its arrays.
        names: names of the arrays, in the order in which the function takes them.
        way: the computation.
    """
    op = xla.jax_op(call)
    if op.backward is not None:
        function = _attention(call, names, way, op.backward)
    elif op.derivative is not None:
        function = _by_call(call, names, way, op.derivative)
    else:
        function = _opaque(call, names, way)

    def typed(*operands: jax.Array) -> dict[str, jax.Array]:
        # Outside jit the function runs right here; inside, this sees the tracing only.
        with bridge.typed_errors():
            return function(*operands)

    return typed


def _opaque(call: Any, names: tuple[str, ...], way: Way) -> Callable[..., dict[str, jax.Array]]:
    op = xla.jax_op(call)

    @custom_vmap
    def mapped(*operands: jax.Array) -> dict[str, jax.Array]:
        found = bridge.run(_filled(call, names, operands), way.runtime)
        return dict(zip(found, varying(list(found.values()), operands), strict=True))

    @mapped.def_vmap
    def _map(axis_size: int, in_batched: list[bool], *operands: jax.Array) -> tuple[Any, Any]:
        batched = dict(zip(names, in_batched, strict=True))
        given = dict(zip(names, operands, strict=True))
        if op.folds and batch.folds(call, given, batched):
            folded = batch.fold(call, given, batched, axis_size)
            results = _opaque(folded.map(lambda _: None), tuple(folded.arrays()), way)(*folded.arrays().values())
            results = {name: x.reshape(axis_size, -1, *x.shape[1:]) for name, x in results.items()}
        else:
            results = batch.one_by_one(mapped, in_batched, operands)
        return results, dict.fromkeys(results, True)

    @jax.custom_jvp
    def differentiable(*operands: jax.Array) -> dict[str, jax.Array]:
        return mapped(*operands)

    @differentiable.defjvp
    def _derive(primals: tuple[jax.Array, ...], tangents: Any) -> tuple[Any, Any]:
        if not way.chosen and not op.jnp_derivative:
            raise _no_derivative(call, way, "second" if isinstance(call, AttentionCall) else None)
        refuse_unserved(_filled(call, names, primals), "xla")
        in_jnp = jax.jvp(lambda *operands: _run_in_jnp(_filled(call, names, operands)), primals, tangents)
        return differentiable(*primals), in_jnp[1]

    return differentiable


def _attention(call: Any, names: tuple[str, ...], way: Way, own: xla.Backward) -> Callable[..., dict[str, jax.Array]]:
    @jax.custom_jvp
    def attend(*operands: jax.Array) -> dict[str, jax.Array]:
        return _opaque(call, names, way)(*operands)

    def derive(operands: Arrays, tangents: tuple[Any, ...]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        moving = tuple(name for name, x in zip(names, tangents, strict=True) if not isinstance(x, SymbolicZero))
        found = _opaque(replace(call, with_lse=True), names, way)(*operands)
        named = zip(_RESULTS, RESIDUAL_NAMES, strict=True)
        found = {name: checkpoint_name(found[name], label) for name, label in named}
        results = found if call.with_lse else {"out": found["out"]}
        missing = _missing_backward(own.as_dense, _filled(call, names, operands), found, way)

        def forward(known: Arrays, tangents: Arrays) -> Arrays:
            if not way.chosen:
                raise _no_derivative(call, way, "forward")
            return jax.jvp(*_in_jnp(_filled(call, names, known[2:]), moving), tangents)[1]

        def backward(known: Arrays, gradients: tuple[jax.Array | None, ...]) -> tuple[jax.Array | None, ...]:
            filled = _filled(call, names, known[2:])
            given = [jnp.zeros_like(x) if d_x is None else d_x for x, d_x in zip(known, gradients, strict=False)]
            if missing is None:
                pulled = _gradients(*own.with_pullback(filled), known, given, way)
                return tuple(pulled.get(name) for name in moving)
            if not way.chosen:
                raise missing
            evaluate, inputs = _in_jnp(filled, moving)
            return jax.vjp(evaluate, *inputs)[1](tuple(given))

        residuals = (*(x for name, x in found.items() if name not in results), *operands)
        moved = tuple(x for x in tangents if not isinstance(x, SymbolicZero))
        slopes = linear_map(forward, backward, tuple(results.values()), residuals, moved)
        return results, dict(zip(results, slopes, strict=True))

    attend.defjvp(derive, symbolic_zeros=True)
    return attend


def _by_call(call: Any, names: tuple[str, ...], way: Way, own: xla.Derivative) -> Callable[..., dict[str, jax.Array]]:
    """Returns the function of an op whose jnp derivative serves every implementation, and whose own one some calls."""
    opaque = _opaque(call, names, way)

    @jax.custom_jvp
    def function(*operands: jax.Array) -> dict[str, jax.Array]:
        return opaque(*operands)

    def derive(operands: Arrays, tangents: tuple[Any, ...]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        moving = tuple(name for name, x in zip(names, tangents, strict=True) if not isinstance(x, SymbolicZero))
        results = opaque(*operands)
        filled = _filled(call, names, operands)
        is_served = unserved(jax.eval_shape(own.call_of, filled, results), way.served_by) is None

        def in_jnp(known: Arrays) -> tuple[Callable[..., Arrays], Arrays]:
            filled = _filled(call, names, known[len(results) :])

            def evaluate(*moved: jax.Array) -> Arrays:
                found = _run_in_jnp(filled.with_arrays(dict(zip(moving, moved, strict=True))))
                return tuple(found[name] for name in results)

            return evaluate, tuple(getattr(filled, name) for name in moving)

        def forward(known: Arrays, tangents: Arrays) -> Arrays:
            return jax.jvp(*in_jnp(known), tangents)[1]

        def backward(known: Arrays, gradients: tuple[jax.Array | None, ...]) -> tuple[jax.Array | None, ...]:
            given = [jnp.zeros_like(x) if d_x is None else d_x for x, d_x in zip(known, gradients, strict=False)]
            if not is_served:
                evaluate, inputs = in_jnp(known)
                return jax.vjp(evaluate, *inputs)[1](tuple(given))
            filled, named = _filled(call, names, known[len(results) :]), dict(zip(results, given, strict=True))
            pulled = own.call_of(filled, named)
            arrays = pulled.arrays()
            found = _opaque(pulled.map(lambda _: None), tuple(arrays), way)(*arrays.values())
            gradients_by_name = own.gradients_of(filled, named, found)
            return tuple(gradients_by_name.get(name) for name in moving)

        moved = tuple(x for x in tangents if not isinstance(x, SymbolicZero))
        slopes = linear_map(forward, backward, tuple(results.values()), operands, moved)
        return results, dict(zip(results, slopes, strict=True))

    function.defjvp(derive, symbolic_zeros=True)
    return function


def _missing_backward(
    as_dense: Callable[[Any], Any], filled: Any, found: dict[str, jax.Array], way: Way
) -> Unsupported | None:
    """Returns why the implementation has no backward pass for a call with these results; None where it has one."""
    try:
        dense = jax.eval_shape(as_dense, filled)
        backward = backward_of(dense, **found, d_out=found["out"])
        backward.check()
        refuse_unserved(backward, way.served_by, named=way.implementation)
    except Unsupported as error:
        return error
    return None


def _gradients(dense: Any, pull: xla.Pullback, found: Arrays, given: list[jax.Array], way: Way) -> dict[str, jax.Array]:
    """Returns the gradients of a call's arrays by name, from its out and lse, which `found` begins with, and theirs."""
    d_out, *d_lse = given
    pulled = backward_of(dense, out=found[0], lse=found[1], d_out=d_out, d_lse=d_lse[0] if d_lse else None)
    arrays = pulled.arrays()
    return pull(_opaque(pulled.map(lambda _: None), tuple(arrays), way)(*arrays.values()))


def _in_jnp(filled: Any, moving: tuple[str, ...]) -> tuple[Callable[..., Arrays], Arrays]:
    """Returns a call as a function of the arrays that move, in jnp, and those arrays."""

    def evaluate(*moved: jax.Array) -> Arrays:
        results = _run_in_jnp(filled.with_arrays(dict(zip(moving, moved, strict=True))))
        return tuple(results[name] for name in _RESULTS if name in results)

    return evaluate, tuple(getattr(filled, name) for name in moving)


def _no_derivative(call: Call[Any], way: Way, kind: str | None) -> Unsupported:
    missing = f"{kind} derivative" if kind else "derivative: it is for inference"
    return Unsupported(
        f"{call.name} with implementation={way.implementation!r} has no {missing}. Differentiate with "
        "implementation='xla', or stop the gradient at its inputs (jax.lax.stop_gradient)."
    )


def _filled(call: Call[Any], names: tuple[str, ...], operands: tuple[jax.Array, ...]) -> Any:
    return call.with_arrays(dict(zip(names, operands, strict=True)))
