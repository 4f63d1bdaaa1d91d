"""Low-rank adapters of all parts of a decoder on a CUDA device: the kernels' logits are those of merged models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.llm.models import MoEConfig, adapter_targets
from tests.support.lora_models import merged_model, tiny_adapters
from tests.support.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.gpu
CONFIG = tiny_config(
    num_hidden_layers=2,
    tie_word_embeddings=True,
    moe=MoEConfig(num_experts=8, num_experts_per_tok=3, intermediate_size=24, n_shared_experts=1),
)


@nnx.jit
def _logits(model, tokens, adapters=None):
    return model.forward_dense(tokens, adapters=adapters)


@pytest.mark.parametrize("length", [1, 40])
def test_rows_of_several_adapters_have_the_logits_of_merged_models(length, seed):
    model = tiny_model(CONFIG, seed, implementation=None)
    names = tuple(target.module for target in adapter_targets(CONFIG))
    adapters = tiny_adapters(CONFIG, seed, rank=5, num_adapters=40, target_modules=names)
    tokens = jax.random.randint(jax.random.key(seed), (6, length), 0, CONFIG.vocab_size, jnp.int32)
    ids = np.array([7, -1, 39, 0, 7, 21])
    found = _logits(model, tokens, adapters.batch(jnp.array(ids), length))
    models = {index: model if index < 0 else merged_model(model, adapters, index) for index in set(ids.tolist())}
    wanted = jnp.stack([_logits(models[index], tokens[row][None])[0] for row, index in enumerate(ids.tolist())])
    # Products of float32 may take TF32 in XLA's part.
    np.testing.assert_allclose(jax.nn.log_softmax(found), jax.nn.log_softmax(wanted), atol=2e-2)
