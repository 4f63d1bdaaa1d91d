"""Sampling on the device: distributions, filters, and independence of batch mates."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.engine.sampler import SamplingKind, sample, sampling_kind

DRAWS = 4000

filtered = jax.jit(functools.partial(sample, kind=SamplingKind.FILTERED))


def draws(logits: list[float], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    rows = jnp.tile(jnp.array(logits, jnp.float32), (DRAWS, 1))
    full = lambda value, dtype: jnp.full(DRAWS, value, dtype)  # noqa: E731
    tokens = filtered(
        rows,
        full(temperature, jnp.float32),
        full(top_k, jnp.int32),
        full(top_p, jnp.float32),
        full(3, jnp.uint32),
        jnp.arange(DRAWS, dtype=jnp.int32),
    )
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / DRAWS


def test_draws_follow_the_softmax_of_the_tempered_logits() -> None:
    logits = [0.0, 1.0, 2.0]
    expected = np.exp(np.array(logits) / 2.0)
    expected /= expected.sum()

    frequencies = draws(logits, temperature=2.0)

    # Four standard deviations of a binomial share.
    assert np.all(np.abs(frequencies - expected) < 4 * np.sqrt(expected * (1 - expected) / DRAWS))


def test_top_k_keeps_the_k_likeliest() -> None:
    assert list(draws([3.0, 1.0, 2.0, 0.0], temperature=5.0, top_k=2) > 0) == [True, False, True, False]


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert np.all(draws([0.0, 0.0, 0.0], top_k=99) > 0)


def test_top_p_keeps_the_likeliest_until_their_mass_reaches_it() -> None:
    # Probabilities 0.64, 0.24, 0.09, 0.03: the first two reach 0.7, the first alone does not.
    assert list(draws([3.0, 2.0, 1.0, 0.0], top_p=0.7) > 0) == [True, True, False, False]


def test_a_tiny_top_p_keeps_the_likeliest() -> None:
    assert draws([1.0, 5.0, 0.0], top_p=1e-6)[1] == 1


def test_a_top_p_that_is_zero_as_a_float32_keeps_the_likeliest() -> None:
    assert draws([1.0, 5.0, 0.0], top_p=1e-46)[1] == 1


@pytest.mark.parametrize("temperature", [1e-46, 1e-40, 1e-37, 1e-5])
def test_a_tiny_temperature_takes_the_likeliest(temperature) -> None:
    assert draws([1.0, 5.0, 4.0], temperature=temperature)[1] == 1


def test_the_largest_temperature_draws_all_alike() -> None:
    assert np.all(draws([1.0, 5.0, 4.0], temperature=3.4e38) > 0.25)


def test_temperature_zero_takes_the_likeliest_also_in_a_random_batch() -> None:
    assert draws([1.0, 1.5, 0.0], temperature=0.0)[1] == 1


@pytest.mark.parametrize("default", ["threefry2x32", "rbg"])
def test_a_rows_draw_does_not_depend_on_its_batch_mates(default) -> None:
    generator = np.random.default_rng(0)
    logits = jnp.asarray(generator.standard_normal((4, 50)), jnp.float32)
    arguments = [
        jnp.array([1.0, 0.5, 2.0, 1.0], jnp.float32),
        jnp.array([0, 5, 0, 3], jnp.int32),
        jnp.array([1.0, 0.9, 0.5, 1.0], jnp.float32),
        jnp.array([1, 2, 3, 4], jnp.uint32),
        jnp.array([0, 7, 2, 9], jnp.int32),
    ]

    with jax.default_prng_impl(default):
        together = filtered(logits, *arguments)
        alone = [int(filtered(logits[i : i + 1], *(a[i : i + 1] for a in arguments))[0]) for i in range(4)]

    assert together.tolist() == alone


@pytest.mark.parametrize(
    ("temperatures", "top_ks", "top_ps", "kind"),
    [
        ([0.0, 0.0], [5, 0], [0.5, 1.0], SamplingKind.GREEDY),
        ([0.0, 1.0], [0, -1], [1.0, 1.0], SamplingKind.RANDOM),
        ([1.0], [5], [1.0], SamplingKind.FILTERED),
        ([1.0], [0], [0.9], SamplingKind.FILTERED),
    ],
)
def test_a_batch_compiles_no_more_sampler_than_it_needs(temperatures, top_ks, top_ps, kind) -> None:
    assert sampling_kind(temperatures, top_ks, top_ps) is kind
