"""The example of a loop of one's own gives what the engine gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import jax_decode_loop
from jattn import LLM, SamplingParams, load_model
from tests.support.tiny_models import write_tiny_model


@pytest.mark.nightly
def test_the_example_loop_gives_the_engines_tokens_in_place(tmp_path: Path) -> None:
    model, config, _ = load_model(write_tiny_model(tmp_path, 0))
    prompts = [[5, 6, 7], [9], list(range(20, 40))]

    tokens, in_place = jax_decode_loop.generate(prompts, model, config)

    params = SamplingParams(temperature=0.0, max_tokens=jax_decode_loop.NEW_TOKENS, ignore_eos=True)
    assert tokens == [list(output.outputs[0].token_ids) for output in LLM(model).generate(prompts, params)]
    assert in_place
