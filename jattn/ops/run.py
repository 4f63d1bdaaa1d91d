"""run: a call on JAX arrays, checked and computed by the implementation that the caller names or the rule picks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn import bridge
from jattn.bridge.calls import varying
from jattn.ops import transforms, xla
from jattn.ops.choose import choose, for_this_platform, runtime_of
from jattn.ops.leaks import refuse_leaked
from torch_core.base.errors import InvalidInput
from torch_core.launch.call import Call, array_fields, dtype_name
from torch_core.launch.serves import refuse_unserved


def run(call: Call[jax.Array], implementation: str | None = None) -> dict[str, jax.Array]:
    """Runs a call; under jit it becomes part of the program.

    Args:
        call: call with JAX or numpy arrays.
        implementation: "triton", "torch", "xla", or None for the fastest that serves the call.

    Returns:
        The outputs (`out`, `lse`) and the new values of the arrays that the call writes, by name.

    Raises:
        InvalidInput: the call is inconsistent; outside jit also lengths, block ids or slots out of range, for which the
            call waits until those few arrays are there.
        Unsupported: the implementation cannot run here, or does not serve the call or its operands' split over devices.
    """
    call, arrays = _with_float32_scales(call)
    # Before numpy arrays become JAX arrays: int64 tables are refused rather than narrowed.
    call.check()
    chosen = choose(implementation, call)
    runtime, served_by = runtime_of(chosen)
    refuse_unserved(call, served_by, named=chosen)
    if any(isinstance(array, Tracer) for array in arrays.values()):
        refuse_leaked(**arrays)
        runtime = bridge.partitioned(runtime, opaque=chosen != "xla")
        call = call if implementation else for_this_platform(call)
    else:
        # Traced arrays have no values.
        _with_indices_on_host(call, arrays).check_values()
        if any(isinstance(array, jax.Array) and len(array.sharding.device_set) > 1 for array in arrays.values()):
            with bridge.typed_errors():
                return _run_in_one_program(call, chosen)
    if chosen == "xla":
        return runtime(call.map(jnp.asarray))
    call = _with_narrow_scores(call)
    # Arrays one by one, not the call: JAX looks at every place of a pytree each time that it is passed on.
    way = transforms.Way(runtime, chosen, served_by, implementation is None)
    arrays = call.arrays()
    operands = list(map(jnp.asarray, arrays.values()))
    return transforms.transformable(call.map(lambda _: None), tuple(arrays), way)(*varying(operands, operands))


# Several devices run one program; outside jit this is it.
_run_in_one_program = jax.jit(run, static_argnames="implementation")


def _with_indices_on_host(call: Call[jax.Array], arrays: dict[str, jax.Array]) -> Call[np.ndarray]:
    # Fetched together and explicitly: one wait, and no matter to a transfer guard.
    return call.with_arrays(jax.device_get({name: array for name, array in arrays.items() if array.dtype == jnp.int32}))


def _with_narrow_scores(call: Call[jax.Array]) -> Call[jax.Array]:
    arrays, narrowed = call.arrays(), xla.jax_op(call).narrowed
    if not narrowed or dtype_name(arrays["query"]) == "float64":
        return call
    wide = {name: arrays[name] for name in narrowed if name in arrays and dtype_name(arrays[name]) == "float64"}
    return call.with_arrays({name: jnp.asarray(array).astype(jnp.float32) for name, array in wide.items()})


def _with_float32_scales(call: Call[jax.Array]) -> tuple[Call[jax.Array], dict[str, jax.Array]]:
    arrays, scales = call.arrays(), {}
    for name, array in arrays.items():
        field = array_fields(type(call))[name]
        if not isinstance(array, (jax.Array, np.ndarray, np.generic)):
            raise InvalidInput(name, f"is a {type(array).__name__}", f"it must be a JAX array of shape {field}")
        if field.number:
            scales[name] = float(array) if isinstance(array, np.generic) else _one_float32(name, array)
    if not scales:
        return call, arrays
    call = call.with_arrays(scales)
    return call, call.arrays()


def _one_float32(name: str, scale: jax.Array) -> jax.Array:
    if scale.size != 1:
        raise InvalidInput(name, f"has shape {list(scale.shape)}", "it must be a number or one element")
    return jnp.asarray(scale, jnp.float32).reshape(1)
