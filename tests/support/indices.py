"""Whether a program's reads and writes keep the promises that it makes to XLA about its indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

__all__ = ["assert_unique_as_promised"]


def assert_unique_as_promised(function: Callable[..., Any], *args: jax.Array) -> None:
    """Asserts that no index repeats where `unique_indices` says that none does, outside loops.

    Where one repeats, a CPU's result is right, and a GPU's may be wrong.
    """
    with jax.disable_jit():
        program = jax.make_jaxpr(function)(*args)
    promises = [step for step in program.jaxpr.eqns if step.params.get("unique_indices")]
    assert promises
    # A program of its own, whose results are the indices.
    info = program.jaxpr.debug_info._replace(result_paths=None)
    of_indices = program.jaxpr.replace(outvars=[step.invars[1] for step in promises], debug_info=info)
    found = jax.jit(jaxpr_as_fun(ClosedJaxpr(of_indices, program.consts)))(*args)
    for step, indices in zip(promises, found, strict=True):
        rows = np.asarray(indices).reshape(-1, indices.shape[-1])
        assert len(np.unique(rows, axis=0)) == len(rows), (step.primitive, rows.tolist())
