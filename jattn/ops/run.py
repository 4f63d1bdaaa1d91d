"""run: a call on JAX arrays, checked and computed by the implementation that the caller names or the rule picks."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn.ops import transforms, xla
from jattn.ops.choose import choose, runtime_of
from torch_core.calls import Call, check_values, refuse_unserved
from torch_core.calls.call import array_fields
from torch_core.errors import InvalidInput

__all__ = ["run"]


def run(call: Call[jax.Array], implementation: str | None = None) -> dict[str, jax.Array]:
    """Runs a call; under jit it becomes part of the program.

    Args:
        call: of JAX or numpy arrays.
        implementation: "triton", "torch", "xla", or None for the fastest that runs here.

    Returns:
        The outputs (`out`, `lse`) and the new values of what the call writes, by name.

    Raises:
        InvalidInput: the call does not hold together; outside jit, on a CPU, also lengths, ids or slots out of range.
        Unsupported: the implementation cannot run here, or does not serve the call.
    """
    call = _with_float32_scales(call)
    # Before numpy arrays become JAX arrays: int64 tables are refused rather than narrowed.
    call.check()
    chosen = choose(implementation)
    runtime, served_by = (None, chosen) if chosen == "xla" else runtime_of(chosen)
    refuse_unserved(call, served_by)
    _check_values(call)
    if runtime is None:
        return xla.run(call.map(jnp.asarray))
    # Arrays one by one, not the call: JAX looks at every place of a pytree each time that it is passed on.
    arrays = call.arrays()
    way = transforms.Way(runtime, chosen, served_by, implementation is None)
    return transforms.transformable(call.map(lambda _: None), tuple(arrays), way)(*map(jnp.asarray, arrays.values()))


def _with_float32_scales(call: Call[jax.Array]) -> Call[jax.Array]:
    scales = {}
    for name, array in call.arrays().items():
        field = array_fields(type(call))[name]
        if not isinstance(array, (jax.Array, np.ndarray, np.generic)):
            raise InvalidInput(f"{name} is a {type(array).__name__}; it must be a JAX array of shape {field}.")
        if field.number:
            scales[name] = float(array) if isinstance(array, np.generic) else _one_float32(name, array)
    return replace(call, **scales) if scales else call


def _one_float32(name: str, scale: jax.Array) -> jax.Array:
    if scale.size != 1:
        raise InvalidInput(f"{name} has shape {list(scale.shape)}; it must be a number or one element.")
    return jnp.asarray(scale, jnp.float32).reshape(1)


def _check_values(call: Call[jax.Array]) -> None:
    # What is being traced has no values, and those on a device would have to be waited for.
    arrays = call.arrays().values()
    if not any(isinstance(array, Tracer) for array in arrays) and jax.default_backend() == "cpu":
        check_values(call)
