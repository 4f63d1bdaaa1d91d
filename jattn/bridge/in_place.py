"""Barriers that keep an array, which a custom call updates in place, at the address that XLA gave it."""

from __future__ import annotations

from collections.abc import Container, Sequence

import jax
from jax.core import Tracer


def pinned(arrays: Sequence[jax.Array], updated: Container[int]) -> list[jax.Array]:
    """Returns a call's operands or results, those updated in place (by number) as arrays that no slice is folded into.

    XLA's dynamic-slice fusion, on by default on GPUs from jaxlib 0.11.1, folds the slices around a custom call into
    addresses: `x[i]` before it, `x.at[i].set` after it, a scan's and a vmap's among them. Until its
    PreservesCustomCallAliases (xla/backends/gpu/transforms/dynamic_slice_fusion_rewriter_v2.cc) it forgot that one was
    to be updated instead of the other: a kernel then wrote to the sliced array, often one that had not been donated,
    and not to the result. XLA removes the barrier after that pass; programs without such slices stay as they are.
    """
    return [
        jax.lax.optimization_barrier(array) if index in updated and isinstance(array, Tracer) else array
        for index, array in enumerate(arrays)
    ]
