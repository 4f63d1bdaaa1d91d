"""Rotary embeddings: frequencies equal transformers', and a rotation does what a rotation must."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn.llm.models import RopeScaling
from jattn.llm.models.positions import apply_rotary, attention_factor, inverse_frequencies, rotary_angles
from tests.support.tiny_models import tiny_config

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 32.0, "original_max_position_embeddings": 4096},
    "yarn by hand": {
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
        "attention_factor": 1.25,
    },
    "yarn with weights": {
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
    },
    "longrope": {
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "short_factor": tuple(1 + index / 64 for index in range(64)),
        "long_factor": tuple(1 + index for index in range(64)),
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_factors_equal_transformers_to_a_rounding(name):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind, values = name.split()[0], SCALINGS[name]
    scaling = None if kind == "default" else RopeScaling(rope_type=kind, **values)
    config = tiny_config(head_dim=128, rope_theta=500000.0, rope_scaling=scaling, max_position_embeddings=131072)
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    theirs = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=512,
            num_attention_heads=4,
            head_dim=128,
            max_position_embeddings=131072,
            rope_parameters={"rope_type": kind, "rope_theta": 500000.0} | lists,
        )
    )
    # longrope looks at how long a sequence is; a model for 131,072 tokens has the long factors.
    theirs(torch.zeros(1), torch.tensor([[100000]]))

    np.testing.assert_allclose(inverse_frequencies(config), theirs.inv_freq.numpy(), rtol=8 * 2.0**-23)
    assert attention_factor(scaling) == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_longrope_within_its_first_context_has_the_short_factors():
    scaling = RopeScaling(rope_type="longrope", **SCALINGS["longrope"])
    short, plain = (
        inverse_frequencies(tiny_config(head_dim=128, rope_scaling=each, max_position_embeddings=4096))
        for each in (scaling, None)
    )
    np.testing.assert_allclose(short, plain / np.array(scaling.short_factor), rtol=2.0**-22)


def test_elements_past_the_rotated_share_stay_as_they_are(seed):
    config = tiny_config(partial_rotary_factor=0.25)
    heads = jnp.asarray(np.random.default_rng(seed).normal(size=(7, 4, 16)), jnp.float32)
    rotated = apply_rotary(heads, *rotary_angles(jnp.arange(7) + 1, inverse_frequencies(config)))
    np.testing.assert_array_equal(rotated[..., 4:], heads[..., 4:])
    assert not np.array_equal(rotated[..., :4], heads[..., :4])


def test_a_rotation_keeps_the_length_of_every_head(seed):
    config = tiny_config()
    heads = jnp.asarray(np.random.default_rng(seed).normal(size=(7, 4, 16)), jnp.float32)
    rotated = apply_rotary(heads, *rotary_angles(jnp.arange(7) * 31, inverse_frequencies(config)))
    np.testing.assert_allclose(jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(heads, axis=-1), rtol=1e-5)


def test_position_zero_is_left_as_it_is(seed):
    heads = jnp.asarray(np.random.default_rng(seed).normal(size=(1, 4, 16)), jnp.float32)
    rotated = apply_rotary(heads, *rotary_angles(jnp.zeros(1, jnp.int32), inverse_frequencies(tiny_config())))
    np.testing.assert_array_equal(rotated, heads)


def test_scores_depend_on_the_distance_of_positions_only(seed):
    query, key = np.random.default_rng(seed).normal(size=(2, 1, 1, 16))
    frequencies = inverse_frequencies(tiny_config())

    def score(query_position, key_position):
        turned = [
            apply_rotary(jnp.asarray(head, jnp.float32), *rotary_angles(jnp.array([position]), frequencies))
            for head, position in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 2) == pytest.approx(score(107, 100), abs=1e-4)
    assert score(9, 2) != pytest.approx(score(9, 5), abs=1e-2)


def test_low_precision_heads_keep_their_dtype():
    heads = jnp.ones((3, 2, 16), jnp.bfloat16)
    assert apply_rotary(heads, *rotary_angles(jnp.arange(3), inverse_frequencies(tiny_config()))).dtype == jnp.bfloat16
