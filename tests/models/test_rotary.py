"""Rotary embeddings: frequencies equal transformers', and a rotation does what a rotation must."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.models import RopeScaling
from jattn.models.rotary import apply_rotary, inverse_frequencies, rotary_angles
from tests.support.tiny_models import tiny_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS = [None, RopeScaling(rope_type="linear", factor=4.0), RopeScaling(rope_type="llama3", **LLAMA3)]


@pytest.mark.parametrize("scaling", SCALINGS, ids=["default", "linear", "llama3"])
def test_frequencies_equal_transformers_to_a_rounding(scaling):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = tiny_config(head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    if scaling is not None:
        extra = LLAMA3 if scaling.rope_type == "llama3" else {"factor": scaling.factor}
        parameters |= {"rope_type": scaling.rope_type, **extra}
    theirs = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=512,
            num_attention_heads=4,
            head_dim=128,
            max_position_embeddings=131072,
            rope_parameters=parameters,
        )
    )
    np.testing.assert_allclose(inverse_frequencies(config), theirs.inv_freq.numpy(), rtol=4 * 2.0**-23)


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
