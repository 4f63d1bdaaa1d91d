"""Steps with prompts multiply in the last layer, after its attention, only the tokens that are sampled from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from jattn.llm.models.layers import MLP
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import GREEDY, prompts_of, run
from tests.support.lora_models import tiny_adapters

CONFIG = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, num_blocks=60, max_model_len=64)
FIRST = replace(GREEDY, max_tokens=1)


# Sizes that no other test compiles a program for.
@pytest.mark.parametrize(
    ("changes", "params", "last"),
    [
        ({"intermediate_size": 40}, FIRST, 4),
        ({"intermediate_size": 48}, replace(FIRST, prompt_logprobs=1), 64),
        ({"intermediate_size": 56, "parallel_block": "shared_norm"}, FIRST, 64),
    ],
)
def test_the_last_layer_multiplies_the_rows_that_are_read(
    changes: dict[str, Any], params: SamplingParams, last: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    call = MLP.__call__
    monkeypatch.setattr(MLP, "__call__", lambda self, x: (found.append(len(x)), call(self, x))[1])

    with Engine(tiny_decoder(**changes), CONFIG) as engine:
        run(engine, prompts_of(seed, 5, 33, 20), params)

    assert (found[0], found[-1]) == (64, last)


def test_the_rows_that_are_read_keep_their_adapters(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    call = MLP.__call__
    monkeypatch.setattr(MLP, "__call__", lambda self, x: (found.append(len(x)), call(self, x))[1])
    model = tiny_decoder(intermediate_size=72)
    adapters, prompts = tiny_adapters(model.config, seed), prompts_of(seed, 5, 33, 20)

    with Engine(model, replace(CONFIG, enable_lora=True, max_loras=2, max_lora_rank=4)) as engine:
        for index in range(2):
            engine.add_lora(f"a{index}", adapters, index=index)
        names = ("a1", None, "a0")
        requests = [engine.add(prompt, FIRST, lora=name) for prompt, name in zip(prompts, names, strict=True)]
        while engine.num_unfinished:
            engine.step()

    assert (found[0], found[-1]) == (64, 4)
    tokens = jnp.array([[*prompt, *[0] * (33 - len(prompt))] for prompt in prompts])
    logits = model.forward_dense(tokens, adapters=adapters.batch(jnp.array([1, -1, 0]), 33))
    wanted = [logits[row, len(prompt) - 1].argmax() for row, prompt in enumerate(prompts)]
    assert [request.output_token_ids for request in requests] == [[int(token)] for token in wanted]
