"""What keeps an array that a custom call updates in place where XLA put it."""

from __future__ import annotations

import jax
from jax.core import Tracer

__all__ = ["pinned"]


def pinned(array: jax.Array) -> jax.Array:
    """Returns an operand that is updated in place, or the result of that, as an array that no slice is folded into.

    XLA's dynamic-slice fusion, on by default on GPUs from jaxlib 0.11.1, folds the slices around a custom call into
    addresses: `x[i]` before it, `x.at[i].set` after it, a scan's and a vmap's among them. Until its
    PreservesCustomCallAliases (xla/backends/gpu/transforms/dynamic_slice_fusion_rewriter_v2.cc) it forgot that one was
    to be updated in place of the other: what a kernel wrote went to the array that was sliced, often one that nobody
    had donated, and not to the result. XLA removes the barrier after that pass; programs without such slices stay as
    they are.
    """
    return jax.lax.optimization_barrier(array) if isinstance(array, Tracer) else array
