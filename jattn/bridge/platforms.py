"""The platform that a program is compiled for, which is unknown before JAX lowers the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def refused_on(platform: str, name: str, error: Callable[[], Exception]) -> Callable[[jax.Array], jax.Array]:
    """Returns the identity on arrays, which raises if a program with it is lowered for a platform.

    It leaves nothing in a program. It can be differentiated, mapped and split.

    Args:
        platform: "cpu" or "cuda".
        name: name of the primitive, which a printed jaxpr shows.
        error: creates the exception; it is also raised outside jit, for an array on that platform.
    """

    def refuse(context: object, array: object) -> Any:
        raise error()

    def look(array: jax.Array) -> jax.Array:
        # JAX calls a platform of devices "gpu" that it calls "cuda" at the lowering.
        if any({"gpu": "cuda"}.get(each.platform, each.platform) == platform for each in array.devices()):
            raise error()
        return array

    identity = Primitive(name)
    identity.def_impl(look)
    identity.def_abstract_eval(lambda array: array)
    mlir.register_lowering(identity, lambda context, array: [array])
    mlir.register_lowering(identity, refuse, platform=platform)
    ad.deflinear2(identity, lambda cotangent, array: [cotangent])
    batching.defvectorized(identity)
    return identity.bind
