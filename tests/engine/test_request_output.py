"""`Request.output`, and the token that ended a request: kept among its tokens, or not."""

from __future__ import annotations

from typing import Any

import pytest

from jattn.llm.engine import LLM, EngineConfig, SamplingParams

CONFIG = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64, num_scheduler_steps=1, fixed_shapes=True)
PROMPT = "The list"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(config=CONFIG)


def params_of(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "logprobs": 1, "ignore_eos": True} | changes)


def test_the_output_of_an_engines_request_is_that_of_an_llm_without_its_text(llm: LLM) -> None:
    params = params_of(n=2, temperature=0.8, seed=3, prompt_logprobs=1)
    (expected,) = llm.generate(PROMPT, params)
    engine: Any = llm.engine
    request = engine.add(expected.prompt_token_ids, params)
    running = request.output()
    while engine.num_unfinished:
        engine.step()
    output = request.output()

    assert (running.finished, running.outputs[0].token_ids, running.outputs[0].finish_reason) == (False, (), None)
    assert output.finished
    for found, whole in zip(output.outputs, expected.outputs, strict=True):
        assert (found.token_ids, found.finish_reason, found.index) == (whole.token_ids, "length", whole.index)
        assert found.cumulative_logprob == whole.cumulative_logprob
        assert [list(each) for each in found.logprobs or ()] == [list(each) for each in whole.logprobs or ()]
    assert len(output.prompt_logprobs or ()) == len(expected.prompt_token_ids)


@pytest.mark.parametrize("include", [True, False])
def test_the_token_that_ends_an_output_is_kept_by_choice(llm: LLM, include: bool) -> None:
    whole = llm.generate(PROMPT, params_of())[0].outputs[0]
    last = whole.token_ids[3]
    count = whole.token_ids.index(last)
    params = params_of(stop_token_ids=[last], include_eos_token=include)

    found = llm.generate(PROMPT, params)[0].outputs[0]
    streamed = [token for delta in llm.stream(PROMPT, params) for token in delta.token_ids]

    assert found.token_ids == tuple(streamed) == whole.token_ids[: count + include]
    assert len(found.logprobs or ()) == count + include
    assert (found.finish_reason, found.stop_reason) == ("stop", last)
    assert found.text == llm.generate(PROMPT, params_of(max_tokens=count))[0].outputs[0].text
