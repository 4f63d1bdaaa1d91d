"""The likeliest tokens of a row, by groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.llm.engine.device.sampler import likeliest


@pytest.mark.parametrize(("vocab", "count"), [(40, 3), (3000, 5), (3001, 1), (3000, 0), (5, 20)])
def test_the_likeliest_come_in_order_and_the_earlier_of_equals_first(vocab, count, seed) -> None:
    logits = np.random.default_rng(seed).integers(-9, 9, (3, vocab)).astype(np.float32)
    # Fewer finite values than are asked for, as a mask may leave them.
    logits[2, 2:] = -np.inf

    top, ids = jax.jit(likeliest, static_argnums=1)(jnp.asarray(logits), count)

    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    assert np.array_equal(top, np.take_along_axis(logits, expected, axis=-1))
    assert np.array_equal(np.asarray(ids)[2, :2], expected[2, :2])
    assert all(len(set(row)) == len(row) for row in np.asarray(ids).tolist())
    assert np.array_equal(np.take_along_axis(logits, np.asarray(ids), axis=-1), top)
