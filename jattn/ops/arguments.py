"""Arguments that only JAX's public functions have, and the refusal of traced numbers for static options."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.core import Tracer

from torch_core.attention.options import MASK_OPTIONS as MASK_OPTIONS
from torch_core.attention.options import attention_spec as attention_spec
from torch_core.base.errors import InvalidInput
from torch_core.launch import public

#: `torch_core.launch.public.documented` for functions of JAX arrays.
documented = functools.partial(
    public.documented,
    array="jax.Array",
    also={
        "implementation": '"triton", "torch", "xla", or None for the fastest that serves the call.',
        "defer_states": "return `DeferredStates` instead of new states; their `after` returns the states after some of "
        "the tokens, as many as were accepted of proposed ones.",
        "out_dtype": "dtype of the output; the query's by default, bfloat16 for an fp8 query.",
    },
)


def dtype_name(out_dtype: jax.typing.DTypeLike | None) -> str | None:
    """Returns the name of a dtype in calls.

    Raises:
        InvalidInput: it is not a dtype.
    """
    if out_dtype is None:
        return None
    try:
        return jnp.dtype(out_dtype).name
    except TypeError:
        raise InvalidInput("out_dtype", value=out_dtype, wanted="it must be a dtype, such as jnp.bfloat16") from None


def refuse_traced(options: Mapping[str, object]) -> None:
    """Raises InvalidInput for a tracer in place of a static number or choice."""
    kinds = {
        "scale": "float (mark it static, or multiply query by it)",
        "logits_soft_cap": "float (mark it static, or multiply query by it)",
        "causal": "True or False (mark it static)",
        "use_alibi_sqrt": "True or False (mark it static)",
    }
    for name, kind in kinds.items():
        if isinstance(options.get(name), Tracer):
            raise InvalidInput(name, "is a tracer", f"it must be a static {kind}")
