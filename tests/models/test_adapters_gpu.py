"""Low-rank adapters of all parts of a decoder on a CUDA device: the kernels' logits are those of merged models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from jattn.llm.models import MoEConfig, adapter_targets
from tests.support.lora_models import LATENT, merged_model, tiny_adapters
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


@pytest.mark.parametrize(("length", "config"), [(1, CONFIG), (40, CONFIG), (40, tiny_config(**LATENT))], ids=str)
def test_rows_of_several_adapters_have_the_logits_of_merged_models(length, config, seed):
    model = tiny_model(config, seed, implementation=None)
    names = tuple(target.module for target in adapter_targets(config))
    adapters = tiny_adapters(config, seed, rank=5, num_adapters=40, target_modules=names)
    tokens = jax.random.randint(jax.random.key(seed), (6, length), 0, config.vocab_size, jnp.int32)
    ids = np.array([7, -1, 39, 0, 7, 21])
    found = _logits(model, tokens, adapters.batch(jnp.array(ids), length))
    models = {index: model if index < 0 else merged_model(model, adapters, index) for index in set(ids.tolist())}
    wanted = jnp.stack([_logits(models[index], tokens[row][None])[0] for row, index in enumerate(ids.tolist())])
    # Products of float32 may take TF32 in XLA's part.
    np.testing.assert_allclose(jax.nn.log_softmax(found), jax.nn.log_softmax(wanted), atol=2e-2)


def test_latents_in_the_absorbed_form_have_the_logits_of_merged_models(seed):
    config = tiny_config(**LATENT)
    model, adapters = tiny_model(config, seed, implementation=None), tiny_adapters(config, seed, num_adapters=2)
    options = {"num_blocks": 16, "max_num_seqs": 2, "enable_lora": True, "max_loras": 2}
    with Engine(model, EngineConfig(**options)) as engine:
        for index in range(2):
            engine.add_lora(f"a{index}", adapters, index=index)
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        requests = [engine.add([5, 4, 3, 2], params, lora=f"a{index}") for index in range(2)]
        while engine.num_unfinished:
            engine.step()
    for index, request in enumerate(requests):
        tokens = jnp.array([[5, 4, 3, 2, *request.output_token_ids]])
        logits = _logits(merged_model(model, adapters, index), tokens)[0, 3:-1]
        found = jnp.take_along_axis(logits, jnp.array(request.output_token_ids)[:, None], 1)[:, 0]
        np.testing.assert_allclose(found, logits.max(-1), atol=2e-2)
