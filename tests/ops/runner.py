"""Runs the cases of `tests.support.attention_cases` through the JAX operations, compiled once for each static part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jattn import ops
from jattn.bridge import to_jax
from tests.support.attention_cases import AttentionCase, to_torch
from torch_core.base.specs import AttentionSpec
from torch_core.launch.call import Call

__all__ = ["IMPLEMENTATIONS", "QUICK_COMPILE", "arrays", "arrays_of", "keywords", "run_case", "run_numpy"]

#: What runs on this machine; "triton" needs CUDA.
IMPLEMENTATIONS = ("torch", "xla")
#: For programs whose values are compared within a tolerance: half the time to compile, the same arithmetic.
QUICK_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}


def keywords(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the keyword arguments of the JAX operations that say what `spec` says."""
    return {
        "scale": spec.scale,
        "causal": spec.causal,
        "sliding_window": (spec.window_left, spec.window_right),
        "logits_soft_cap": spec.logits_soft_cap,
        "attention_chunk": spec.attention_chunk,
        "use_alibi_sqrt": spec.use_alibi_sqrt,
    }


def arrays(case: AttentionCase, **changes: Any) -> dict[str, jax.Array]:
    """Returns the operands of a case as JAX arrays; `changes` replace some."""
    return {name: jnp.asarray(x) for name, x in {**case.operands, **changes}.items()}


def arrays_of(call: Call[torch.Tensor]) -> dict[str, Any]:
    """Returns the tensors of a call as JAX arrays of their own on the default device."""
    # Through numpy: what comes from a tensor of the host stays there.
    return {name: jnp.asarray(np.array(to_jax(array.clone()))) for name, array in call.arrays().items()}


def run_numpy(
    case: AttentionCase, implementation: str, *, quick: bool = True, **changes: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Returns output and lse of a case as numpy arrays.

    Args:
        case: what to compute.
        implementation: by which of the implementations.
        quick: compile with `QUICK_COMPILE`; False for the program that users run, where bits count.
        changes: replace operands.
    """
    output, lse = _operation(case, implementation, quick)(arrays(case, **changes), case.options)
    return np.array(output), np.array(lse)


def run_case(case: AttentionCase, implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and lse of a case as torch tensors, for the comparison with the reference."""
    output, lse = run_numpy(case, implementation)
    return to_torch(output), to_torch(lse)


def _operation(case: AttentionCase, implementation: str, quick: bool) -> Callable[..., Any]:
    bounds = tuple((name, max(1, size)) for name, size in case.limits.items())
    return _jitted(case.paged, case.spec, bounds, implementation, quick)


@functools.cache
def _jitted(
    paged: bool, spec: AttentionSpec, limits: tuple[tuple[str, int], ...], implementation: str, quick: bool
) -> Callable[..., Any]:
    function = ops.paged_attention_with_lse if paged else ops.attention_with_lse
    static = {**keywords(spec), **dict(limits), "implementation": implementation}
    return jax.jit(
        lambda operands, options: function(**operands, **options, **static),
        compiler_options=QUICK_COMPILE if quick else None,
    )
