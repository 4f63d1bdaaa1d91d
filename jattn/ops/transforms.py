"""What JAX transformations do with an op that XLA cannot look into: a reasoned refusal instead of a wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from jattn.bridge import typed_errors
from torch_core.errors import Unsupported

__all__ = ["opaque"]


def opaque(function: Callable[..., Any], name: str, implementation: str) -> Callable[..., Any]:
    """Wraps a bridged op so that grad and vmap raise `Unsupported` with the remedy.

    jit, scan, while_loop, cond and checkpoint pass through: the wrapper vanishes in lowering. Outside jit, what the
    function raises comes out as itself.

    Args:
        function: takes and returns pytrees of arrays.
        name: the op's public name, for the message.
        implementation: the implementation's name, for the message.
    """

    @custom_vmap
    def batched(*operands: Any) -> Any:
        return function(*operands)

    @batched.def_vmap
    def _refuse_vmap(axis_size: int, in_batched: Any, *operands: Any) -> Any:
        raise Unsupported(
            f"vmap over {name} with implementation={implementation!r}: its batch is ragged already. Put the "
            f"{axis_size} batches into one call (more rows in block_tables and query_start_loc), or use "
            "implementation='xla'."
        )

    @jax.custom_jvp
    def differentiable(*operands: Any) -> Any:
        return batched(*operands)

    @differentiable.defjvp
    def _refuse_grad(primals: Any, tangents: Any) -> Any:
        raise Unsupported(
            f"{name} with implementation={implementation!r} has no derivative: it is for inference. Differentiate "
            "with implementation='xla', or stop the gradient at its inputs (jax.lax.stop_gradient)."
        )

    def typed(*operands: Any) -> Any:
        # Outside jit the function runs right here; inside, this sees the tracing only.
        with typed_errors():
            return differentiable(*operands)

    return typed
