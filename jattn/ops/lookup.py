"""Rows of a table, with a gradient that is the same in every run."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn.ops.linear import Arrays, linear_map
from jattn.ops.softmax import wide_dtype


@jax.custom_jvp
def look_up(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns `table[indices]`, such as the embeddings of tokens.

    The gradients of a row that is taken several times are added in the order of the indices, in float32 at least. XLA's
    own transpose adds them in any order on a GPU, and in the dtype of the table.

    Args:
        table: `[rows, features]`.
        indices: integers of any shape, each in `[0, rows)`.
    """
    return jnp.take(table, indices, axis=0)


@look_up.defjvp
def _differentiate(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, object]
) -> tuple[jax.Array, jax.Array]:
    table, indices = primals
    found, num_rows = look_up(table, indices), len(table)

    def forward(known: Arrays, moved: Arrays) -> Arrays:
        return (jnp.take(moved[0], known[1], axis=0),)

    def backward(known: Arrays, gradients: tuple[jax.Array | None, ...]) -> tuple[jax.Array | None, ...]:
        (gradient,) = gradients
        return (None if gradient is None else _added(gradient, known[1], num_rows),)

    (tangent,) = linear_map(forward, backward, (found,), (indices,), (tangents[0],))
    return found, tangent


def _added(gradient: jax.Array, indices: jax.Array, num_rows: int) -> jax.Array:
    """Returns the sums of the gradients of each row: a scan over the sorted indices, then one write for each row."""
    zeros = jnp.zeros((num_rows, gradient.shape[-1]), gradient.dtype)
    if not indices.size:
        return zeros
    flat = indices.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True)
    row = flat[order]
    values = gradient.reshape(-1, gradient.shape[-1])[order].astype(wide_dtype(gradient.dtype))
    is_first = jnp.concatenate([jnp.ones(1, bool), row[1:] != row[:-1]])[:, None]

    def add(left: Arrays, right: Arrays) -> Arrays:
        return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])

    _, sums = jax.lax.associative_scan(add, (is_first, values))
    is_last = jnp.concatenate([row[1:] != row[:-1], jnp.ones(1, bool)])
    target = jnp.where(is_last, row, num_rows)
    return zeros.at[target].set(sums.astype(gradient.dtype), mode="drop")
