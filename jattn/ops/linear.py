"""A derivative as a linear map that has one computation for each direction of differentiation.

`jax.custom_vjp` refuses forward derivatives, and `jax.custom_derivatives.linear_call` can neither be mapped nor be
differentiated once more. So the map is a primitive: JAX evaluates it where it goes forward (`jax.jvp`, `jax.linearize`,
`jax.jacfwd`) and transposes it where it goes backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Arrays: TypeAlias = tuple[jax.Array, ...]


def linear_map(
    forward: Callable[[Arrays, Arrays], Arrays],
    backward: Callable[[Arrays, tuple[jax.Array | None, ...]], tuple[jax.Array | None, ...]],
    results: Arrays,
    residuals: Arrays,
    tangents: Arrays,
) -> list[jax.Array]:
    """Returns the tangents of results, `forward(results + residuals, tangents)`.

    Args:
        forward: linear in its second argument.
        backward: its transpose, `backward(results + residuals, gradients)`: the gradients of the inputs from those of
            the results, None if there is none. Either one may raise: it is called if JAX goes its way.
        results: results of the differentiated function; the shapes and dtypes of the tangents.
        residuals: further arrays of the two functions.
        tangents: tangents of the inputs.
    """
    return _linear.bind(
        *results, *residuals, *tangents,
        forward=forward, backward=backward, num_results=len(results), num_known=len(results) + len(residuals),
    )  # fmt: skip


def _evaluate(*operands: Any, forward: Any, num_known: int, **_: Any) -> Arrays:
    return forward(operands[:num_known], operands[num_known:])


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    moving = [index for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def evaluate(*moved: jax.Array) -> Arrays:
        operands = dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))
        return _evaluate(*operands.values(), **params)

    return jax.jvp(evaluate, [primals[index] for index in moving], [tangents[index] for index in moving])


def _transpose(gradients: Sequence[Any], *operands: Any, backward: Any, num_known: int, **_: Any) -> list[Any]:
    given = tuple(None if type(gradient) is ad.Zero else gradient for gradient in gradients)
    found = backward(operands[:num_known], given)
    wanted = (ad.is_undefined_primal(tangent) for tangent in operands[num_known:])
    return [None] * num_known + [x if asked else None for x, asked in zip(found, wanted, strict=True)]


def _map(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[int]]:
    num_results, num_known = params["num_results"], params["num_known"]
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    # Results give the shapes of the outputs. The cotangent of a tangent that the examples share must be summed, as in
    # the transpose of a broadcast.
    residuals = range(num_results, num_known)
    spread = [
        x if index in residuals else batching.bdim_at_front(x, axis, size)
        for index, (x, axis) in enumerate(zip(operands, axes, strict=True))
    ]
    inner = ((*(0 for _ in range(num_results)), *axes[num_results:num_known]), 0)
    mapped = {name: jax.vmap(params[name], in_axes=inner) for name in ("forward", "backward")}
    return _linear.bind(*spread, **{**params, **mapped}), [0] * num_results


_linear = Primitive("jattn_linear_map")
_linear.multiple_results = True
_linear.def_impl(_evaluate)
_linear.def_abstract_eval(lambda *operands, num_results, **_: operands[:num_results])
mlir.register_lowering(_linear, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_jvps[_linear] = _differentiate
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _map
