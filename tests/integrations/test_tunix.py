"""tunix's models and trainers, where google-tunix is installed: the rollout's log-probabilities are the actor's."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import LLM, SamplingParams, Unsupported

pytest.importorskip("tunix.models", reason="needs google-tunix")
SIZES = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
PARAMS = SamplingParams(temperature=0.9, max_tokens=6, logprobs=0, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [9], list(range(20, 31))]


def a_model(family: str) -> Any:
    """A small model of random weights, zeros and ones of the initialisation included."""
    from tunix.models.gemma3 import model as gemma3  # pyright: ignore[reportMissingImports]
    from tunix.models.llama3 import model as llama3  # pyright: ignore[reportMissingImports]
    from tunix.models.qwen2 import model as qwen2  # pyright: ignore[reportMissingImports]
    from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]

    common = {**SIZES, "vocab_size": 48, "rope_theta": 1_000_000, "norm_eps": 1e-6}
    wide = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    small = {**SIZES, "num_layers": 7, "num_embed": 48, "sliding_window_size": 4, "param_dtype": jnp.float32}
    model = {
        "qwen3": lambda: qwen3.Qwen3(qwen3.ModelConfig(**common), rngs=nnx.Rngs(0)),
        "qwen2": lambda: qwen2.Qwen2(qwen2.ModelConfig(**common, **wide), rngs=nnx.Rngs(0)),
        "llama3": lambda: llama3.Llama3(llama3.ModelConfig(**common), rngs=nnx.Rngs(0)),
        "gemma3": lambda: gemma3.Gemma3(
            dataclasses.replace(gemma3.ModelConfig.gemma3_270m(), **small), rngs=nnx.Rngs(0)
        ),
    }[family]()
    keys = iter(jax.random.split(jax.random.key(0), 200))
    nnx.update(model, jax.tree.map(lambda x: x + jax.random.normal(next(keys), x.shape) / 10, nnx.state(model)))
    return model


def expected(model: Any, tokens: list[int]) -> np.ndarray:
    mask = jnp.tril(jnp.ones((1, len(tokens), len(tokens)), bool))
    logits, _ = model(jnp.array([tokens]), jnp.arange(len(tokens))[None], None, mask)
    return np.asarray(jax.nn.log_softmax(logits[0].astype(jnp.float32) / 0.9))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama3", "gemma3"])
def test_the_engine_gives_the_log_probabilities_of_the_model(family: str) -> None:
    from jattn.integrations.tunix_models import served

    model = a_model(family)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "logprobs_mode": "processed_logprobs"}
    with LLM(served(model, max_model_len=32), **options) as llm:
        outputs = [each.outputs[0] for each in llm.generate(PROMPTS, PARAMS)]

    for prompt, output in zip(PROMPTS, outputs, strict=True):
        found = [each[token].logprob for each, token in zip(output.logprobs or (), output.token_ids, strict=True)]
        rows = expected(model, [*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        np.testing.assert_allclose(found, rows[range(6), list(output.token_ids)], atol=1e-5)


def test_another_model_is_refused_by_name() -> None:
    from jattn.integrations.tunix_models import served

    with pytest.raises(Unsupported, match="Linear"):
        served(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), max_model_len=8)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_grpo_of_two_steps_has_the_actors_log_probabilities_before_and_after(lora: bool) -> None:
    from examples import grpo_tunix

    before, after = grpo_tunix.main(lora=lora)
    assert before <= 1e-5
    assert after <= 1e-5


def test_the_sampler_has_tunixs_protocol_and_takes_weights_with_their_version() -> None:
    protocol = pytest.importorskip("tunix.experimental.rollout.sampler")
    from jattn.integrations.tunix_sampler import Sampler

    model = a_model("qwen3")
    sampler = Sampler("one", model, max_model_len=32, max_num_seqs=4, max_num_batched_tokens=32)
    assert isinstance(sampler, protocol.Sampler)
    params = protocol.SamplingParams(max_tokens=3, temperature=0.9, return_logprobs=True)
    request = protocol.SamplingRequest(prompt=[1, 2, 3], sampling_params=params, request_id="a")
    sync = protocol.WeightSyncRequest(policy_version=7, extra_config={"weights": nnx.state(a_model("qwen3"))})

    async def run() -> tuple[Any, Any]:
        first = await sampler.sample([request])
        await sampler.weight_sync(sync)
        second = await sampler.sample(request)
        await sampler.stop()
        return first[0], second

    first, second = asyncio.run(run())
    assert (first.request_id, first.finish_reason, len(first.token_ids)) == ("a", "length", 3)
    assert first.logprobs.shape == (3,)
    assert (first.metadata["policy_versions"], second.metadata["policy_versions"]) == ((0,), (7,))
