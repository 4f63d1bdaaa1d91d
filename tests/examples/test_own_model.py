"""The example of a model of one's own generates what the model says without a cache."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from examples import own_model


def test_the_engine_says_what_the_model_says_over_the_whole_sequence() -> None:
    model = own_model.OneLayer(nnx.Rngs(0))

    for prompt, tokens in zip(([1, 2, 3], [4]), own_model.main(), strict=True):
        x = model.embed(jnp.array([[*prompt, *tokens[:-1]]]))
        logits = model.logits(x + model.attention(x, is_causal=True))
        assert logits[0, len(prompt) - 1 :].argmax(-1).tolist() == tokens
