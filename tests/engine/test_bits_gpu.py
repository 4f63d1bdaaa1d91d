"""A batch-invariant engine on CUDA: the log-probabilities and gradients of training, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import LLM, EngineConfig, SamplingParams, token_logprobs
from jattn.llm.models import Decoder, set_batch_invariant
from tests.engine.test_bits import ENGINES, SIZES
from tests.support.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.gpu


def decoder(seed: int) -> Decoder:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return tiny_model(tiny_config(**sizes, dtype="bfloat16", layer_windows=(24, None)), seed, None)


def prompts_of(seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 257, random.integers(1, 60)).tolist() for _ in range(24)]


def test_bits_hold_before_and_after_an_update_of_the_weights(seed):
    params = SamplingParams(temperature=0.7, max_tokens=30, logprobs=0, seed=seed, ignore_eos=True)
    config = EngineConfig(**SIZES, **ENGINES["preempted"], batch_invariant=True)
    with LLM(decoder(seed), config=config) as llm:
        for weights in (None, nnx.state(decoder(seed + 1))):
            if weights is not None:
                llm.update_weights(weights)
            found = llm.verify(llm.generate(prompts_of(seed), params), params)
            assert found.num_values == 24 * 30
            assert (found.num_differing, found.first_difference) == (0, None)


def test_a_gradient_is_the_same_twice(seed):
    model = decoder(seed)
    set_batch_invariant(model)
    tokens = jnp.asarray(np.random.default_rng(seed).integers(1, 257, (3, 97)))

    def loss(model: Decoder) -> jax.Array:
        return token_logprobs(model.forward_dense(tokens)[:, :-1], tokens[:, 1:], batch_invariant=True).mean()

    once, twice = (nnx.jit(nnx.grad(loss))(model) for _ in range(2))

    for first, second in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True):
        np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))
