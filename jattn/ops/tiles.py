"""Functions of rows by tiles of one size: every row goes through the same compiled code, however many rows there are.

XLA chooses the order of a sum, and which products and sums are fused, by the shapes of a whole program. Inside a loop
whose number of steps it does not know, it compiles the body once, for the tile's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jattn.ops.batch import one_by_one

_R = TypeVar("_R")

#: Rows of a tile.
TILE = 16


def in_tiles(function: Callable[..., _R], rows: Any, *shared: Any) -> _R:
    """Returns `function(rows, *shared)`, each row computed by the same code in every program.

    On a CPU that is a loop over tiles. Elsewhere elementwise functions have one code for all shapes if nothing else is
    fused with them; reductions need a kernel of their own. The derivative is that of the plain function.

    Args:
        function: a pure function of rows: row `r` of each result depends on row `r` of the arguments alone.
        rows: a tree of arrays `[num_rows, ...]`.
        *shared: trees of arrays that all rows use.

    Returns:
        The results, a tree of arrays `[num_rows, ...]`.
    """
    on_cpu = jax.default_backend() == "cpu"

    @custom_vmap
    def mapped(rows: Any, shared: Any) -> Any:
        return _by_tile(function, rows, shared) if on_cpu else _apart(function, rows, shared)

    @mapped.def_vmap
    def _map(axis_size: int, in_batched: list[Any], rows: Any, shared: Any) -> tuple[Any, Any]:
        if any(jax.tree.leaves(in_batched[1])):
            # Rows of each example with its own weights.
            leaves, form = jax.tree.flatten((rows, shared))
            each = jax.tree.leaves(in_batched)
            found = one_by_one(lambda *leaves: mapped(*jax.tree.unflatten(form, leaves)), each, leaves)
        else:
            spread = jax.tree.map(
                lambda x, is_batched: x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape)),
                rows,
                in_batched[0],
            )
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), spread)
            found = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), mapped(flat, shared))
        return found, jax.tree.map(lambda _: True, found)

    @jax.custom_jvp
    def differentiable(rows: Any, shared: Any) -> Any:
        return mapped(rows, shared)

    @differentiable.defjvp
    def _derive(primals: Any, tangents: Any) -> tuple[Any, Any]:
        plain = jax.jvp(lambda rows, shared: function(rows, *shared), primals, tangents)
        return differentiable(*primals), plain[1]

    return differentiable(rows, shared)


def rowwise(function: Callable[..., Any], *arrays: jax.Array, trailing: int = 1) -> Any:
    """Returns `function(*arrays)`, computed by `in_tiles` for the rows of all but the last `trailing` axes.

    Leading axes of later arrays are broadcast to those of the first.
    """
    leading = arrays[0].shape[: arrays[0].ndim - trailing]
    rows = []
    for array in arrays:
        own = array.shape[array.ndim - trailing :]
        rows.append(jnp.broadcast_to(array, (*leading, *own)).reshape(-1, *own))
    found = in_tiles(lambda rows: function(*rows), tuple(rows))
    return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), found)


def _by_tile(function: Callable[..., Any], rows: Any, shared: Any) -> Any:
    num_rows = len(jax.tree.leaves(rows)[0])
    count = max(1, -(-num_rows // TILE))
    padded = jax.tree.map(lambda x: _padded(x, count * TILE), rows)
    one = jax.eval_shape(lambda rows: function(rows, *shared), jax.tree.map(lambda x: _of_tile(x, 0), padded))
    results = jax.tree.map(lambda x: jnp.zeros((count * TILE, *x.shape[1:]), x.dtype), one)

    def visit(index: jax.Array, results: Any) -> Any:
        found = function(jax.tree.map(lambda x: _of_tile(x, index * TILE), padded), *shared)
        return jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, index * TILE, 0), results, found
        )

    # XLA would put the body of a loop with a single step among the operations around it.
    steps = jax.lax.optimization_barrier(jnp.int32(count))
    results = jax.lax.fori_loop(jnp.int32(0), steps, visit, results)
    return jax.tree.map(lambda x: x[:num_rows], results)


def _apart(function: Callable[..., Any], rows: Any, shared: Any) -> Any:
    rows, shared = jax.lax.optimization_barrier((rows, shared))
    return jax.lax.optimization_barrier(function(rows, *shared))


def _padded(x: jax.Array, num_rows: int) -> jax.Array:
    return jnp.pad(x, ((0, num_rows - len(x)), *((0, 0) for _ in x.shape[1:]))) if num_rows > len(x) else x


def _of_tile(x: jax.Array, start: Any) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, TILE)
