"""look_up: rows of a table, and the gradients of rows that are taken several times."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.ops.lookup import look_up


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradients_of_a_row_are_added_and_rounded_once(dtype, seed):
    random = np.random.default_rng(seed)
    table = jnp.asarray(random.normal(size=(7, 5)), dtype)
    indices = jnp.asarray(random.choice([0, 2, 3, 6], (3, 11)))
    weights = jnp.asarray(random.normal(size=(3, 11, 5)), dtype)
    exact = np.zeros((7, 5))
    np.add.at(exact, np.asarray(indices), np.asarray(weights, np.float64))

    found, pull = jax.vjp(lambda table: look_up(table, indices), table)
    gradient = jax.jit(lambda weights: pull(weights)[0])(weights)

    np.testing.assert_array_equal(found, table[indices])
    step = np.maximum(np.abs(exact), np.abs(np.asarray(weights, np.float64)).sum() / 16) * float(jnp.finfo(dtype).eps)
    assert (np.abs(np.asarray(gradient, np.float64) - exact) <= step).all()


def test_a_tangent_goes_forward(seed):
    table, moved = jax.random.normal(jax.random.key(seed), (2, 4, 3))
    indices = jnp.array([3, 0, 3])
    _, tangent = jax.jvp(lambda table: look_up(table, indices), (table,), (moved,))
    np.testing.assert_array_equal(tangent, moved[indices])


def test_no_index_has_no_gradient():
    gradient = jax.grad(lambda table: look_up(table, jnp.zeros((2, 0), jnp.int32)).sum())(jnp.ones((3, 4)))
    np.testing.assert_array_equal(gradient, np.zeros((3, 4)))


def test_indices_of_a_type_that_counts_no_further_than_the_rows():
    indices = jnp.array([1, 1, 255], jnp.uint8)
    gradient = jax.grad(lambda table: look_up(table, indices).sum())(jnp.ones((256, 1)))
    np.testing.assert_array_equal(gradient[:, 0], [0, 2, *[0] * 253, 1])
