"""The official openai client against `jattn serve`'s application, with the embedded model."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from jattn.llm.engine import SamplingParams
from tests.serve.conftest import MODEL, wait_until_idle

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
MESSAGES: Any = [{"role": "user", "content": "What is a list?"}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["answer"],
    "additionalProperties": False,
}


def by_the_engine(server, prompt: Any, **params: Any) -> str:
    output = server.llm.llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, **params))
    return output[0].outputs[0].text


def test_a_completion_is_the_engines(client, server) -> None:
    answer = client.completions.create(prompt="The for statement", **GREEDY)

    assert answer.choices[0].text == by_the_engine(server, "The for statement")
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_several_prompts_of_text_and_of_token_ids_keep_their_order(client, server) -> None:
    prompts = ["The list", "A string is", "When the"]
    ids = [server.llm.llm.tokenizer.encode(prompt) for prompt in prompts]

    by_text, by_ids = (client.completions.create(prompt=each, **GREEDY) for each in (prompts, ids))

    expected = [by_the_engine(server, prompt) for prompt in prompts]
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices] == expected
    assert [choice.index for choice in by_text.choices] == [0, 1, 2]


def test_the_streamed_pieces_join_to_the_answer_and_end_with_the_usage(client, server) -> None:
    events = list(
        client.completions.create(
            prompt=["The list", "A string"], stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )

    for index, prompt in enumerate(["The list", "A string"]):
        choices = [event.choices[0] for event in events if event.choices and event.choices[0].index == index]
        assert "".join(choice.text for choice in choices) == by_the_engine(server, prompt)
        assert [choice.finish_reason for choice in choices[-1:]] == ["length"]
    assert events[-1].usage.completion_tokens == 16


def test_every_event_has_the_key_of_the_usage_where_the_last_one_has_the_counts(client) -> None:
    ask = functools.partial(client.chat.completions.create, messages=MESSAGES, stream=True, **GREEDY)

    *events, last = ask(stream_options={"include_usage": True, "include_obfuscation": False})
    without = list(ask())

    assert all(event.usage is None and "usage" in event.model_fields_set for event in events)
    assert (last.choices, last.usage.completion_tokens) == ([], 8)
    assert not any("usage" in event.model_fields_set for event in without)


def test_events_count_the_tokens_so_far_by_option(client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for ask in (
        functools.partial(client.chat.completions.create, messages=MESSAGES),
        functools.partial(client.completions.create, prompt="The list"),
    ):
        *events, last = ask(stream=True, stream_options=options, **GREEDY)

        assert {event.object for event in events} == {last.object}
        counts = [event.usage.completion_tokens for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == last.usage.completion_tokens == 8
        assert {event.usage.prompt_tokens for event in events} == {last.usage.prompt_tokens}


def test_what_clients_send_and_nothing_needs_is_accepted(client) -> None:
    more: Any = {
        "reasoning_effort": "low",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
        "modalities": ["text"],
        "functions": [],
        "top_logprobs": 0,
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "user": "x",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "extra_body": {"use_beam_search": False, "parallel_tool_calls": False},
    }

    answers = [client.chat.completions.create(messages=MESSAGES, **each, **GREEDY) for each in ({}, more)]

    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_embeddings_are_the_models_vectors(client, server) -> None:
    texts = ["A list", "A tuple of numbers"]

    # The client asks for base64 by itself.
    coded, numbers = (
        client.embeddings.create(model=MODEL, input=texts, **each) for each in ({}, {"encoding_format": "float"})
    )

    expected = [each.outputs.embedding for each in server.llm.llm.embed(texts)]
    for answer in (coded, numbers):
        assert [each.index for each in answer.data] == [0, 1]
        np.testing.assert_array_equal(np.array([each.embedding for each in answer.data], np.float32), expected)
    assert coded.usage.prompt_tokens == sum(len(server.llm.llm.tokenizer.encode(text)) for text in texts)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [[10**9]]}, "input"),
        ({"input": ["a"] * 25}, "input"),
        ({"dimensions": 5}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"extra_body": {"pooling": "max"}}, "pooling"),
    ],
    ids=str,
)
def test_embeddings_that_cannot_be_are_refused_by_the_fields_name(changes, param, client) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(**{"model": MODEL, "input": "x"} | changes)

    assert error.value.param == param


def test_samples_differ_and_are_the_seeds(client) -> None:
    ask = lambda: client.completions.create(  # noqa: E731
        prompt="The", model=MODEL, n=3, seed=-7, temperature=1.5, max_tokens=8
    )

    first, second = ask(), ask()

    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3


def test_the_best_of_several_has_the_highest_mean_logprob(client) -> None:
    options = {"prompt": "The", "model": MODEL, "seed": 3, "temperature": 1.5, "max_tokens": 6, "logprobs": 0}
    every = client.completions.create(n=4, **options).choices

    (best,) = client.completions.create(best_of=4, **options).choices

    mean = lambda choice: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)  # noqa: E731
    assert best.text == max(every, key=mean).text


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_the_best_of_several_has_no_logprobs_that_were_not_wanted(client, max_tokens) -> None:
    (best,) = client.completions.create(prompt="The", model=MODEL, best_of=2, echo=True, max_tokens=max_tokens).choices

    assert best.logprobs is None
    assert best.text.startswith("The")


def test_text_ends_before_a_stop_string(client, server) -> None:
    text = by_the_engine(server, "The for statement")
    stop = text[5:7]

    (choice,) = client.completions.create(prompt="The for statement", stop=stop, **GREEDY).choices

    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert choice.model_extra["stop_reason"] == stop


def test_logprobs_come_with_tokens_and_offsets_also_of_an_echoed_prompt(client) -> None:
    (choice,) = client.completions.create(prompt="The list of", logprobs=2, echo=True, **GREEDY).choices

    found = choice.logprobs
    # The special token at the beginning is no part of the text.
    assert found.tokens[0] == "<|endoftext|>"
    assert "".join(found.tokens[1:]) == choice.text
    assert choice.text.startswith("The list of")
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert all(2 <= len(each) <= 3 for each in found.top_logprobs[1:])
    places = zip(found.text_offset[1:], found.tokens[1:], strict=True)
    assert [choice.text[at : at + len(token)] for at, token in places] == found.tokens[1:]
    assert found.text_offset[0] == 0


def test_logprobs_of_parts_of_characters_have_their_bytes_and_their_places(client, server) -> None:
    text = "\u00e9\U0001f600\u4e2d"
    asked: dict[str, Any] = {"logprobs": 20, "echo": True, **GREEDY, "max_tokens": 0}
    part = server.llm.llm.tokenizer.tokenizer.token_to_id("\u00c3")
    likely: dict[str, Any] = {"logit_bias": {str(part): 100}, "logprobs": True}

    (choice,) = client.completions.create(prompt=text, **asked).choices
    chat = client.chat.completions.create(messages=MESSAGES, **likely, **GREEDY).choices[0]

    found = choice.logprobs
    assert (choice.text, found.text_offset) == (text, [0, 0, 0, 1, 1, 1, 1, 2, 2, 2])
    assert found.tokens[1:3] == ["bytes:\\xc3", "bytes:\\xa9"]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top is None or (top[token] == logprob and 20 <= len(top) <= 21)
    assert all((each.token, each.bytes) == ("bytes:\\xc3", [0xC3]) for each in chat.logprobs.content)


def test_offsets_of_a_stream_are_those_of_the_whole_answer(client) -> None:
    asked = {"prompt": ["The list", "A string"], "logprobs": 1, "n": 2, "seed": 3, **GREEDY, "temperature": 1}

    whole, events = client.completions.create(**asked), list(client.completions.create(**asked, stream=True))

    for choice in whole.choices:
        parts = [each.choices[0].logprobs for each in events if each.choices[0].index == choice.index]
        assert [at for part in parts if part for at in part.text_offset] == choice.logprobs.text_offset


def test_a_text_is_scored_by_an_echo_without_new_tokens(client) -> None:
    scored = client.completions.create(prompt="The list of", logprobs=2, echo=True, **GREEDY | {"max_tokens": 0})
    longer = client.completions.create(prompt="The list of", logprobs=2, echo=True, **GREEDY | {"max_tokens": 1})

    (choice,), (other,) = scored.choices, longer.choices
    assert (choice.text, choice.finish_reason, scored.usage.completion_tokens) == ("The list of", "length", 0)
    assert choice.logprobs.tokens == other.logprobs.tokens[:-1]
    assert choice.logprobs.token_logprobs == other.logprobs.token_logprobs[:-1]


def test_an_echoed_prompt_of_token_ids_is_text(client, server) -> None:
    ids = server.llm.llm.tokenizer.encode("The for statement", add_special_tokens=False)

    answer = client.completions.create(prompt=ids, echo=True, logprobs=0, **GREEDY).choices[0]
    cut = client.completions.create(
        prompt="The for statement", echo=True, extra_body={"truncate_prompt_tokens": 1}, **GREEDY
    ).choices[0]

    assert answer.text.startswith("The for statement")
    assert answer.logprobs.tokens[0] == "The"
    assert "".join(answer.logprobs.tokens) == answer.text
    assert answer.logprobs.text_offset[1] == 3
    assert cut.text.startswith(" statement")


def test_log_probabilities_of_a_prompt_come_with_the_answer_and_not_with_a_stream(client, server) -> None:
    asked: dict[str, Any] = {**GREEDY, "extra_body": {"prompt_logprobs": 1}}
    params = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=1)

    completion = client.completions.create(prompt=["The list", "A string"], **asked)
    chat = client.chat.completions.create(messages=MESSAGES, **asked)

    for choice, output in zip(
        completion.choices, server.llm.llm.generate(["The list", "A string"], params), strict=True
    ):
        assert choice.prompt_logprobs[0] is None
        for found, expected in zip(choice.prompt_logprobs[1:], output.prompt_logprobs[1:], strict=True):
            assert {int(token): each["logprob"] for token, each in found.items()} == pytest.approx(
                {token: each.logprob for token, each in expected.items()}
            )
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    for create in (
        functools.partial(client.completions.create, prompt="x"),
        functools.partial(client.chat.completions.create, messages=MESSAGES),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            create(stream=True, **asked)
        assert error.value.param == "prompt_logprobs"


def test_a_chat_goes_through_the_template_with_its_tools(client, server) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather"}}]
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "What is a list?"}]}]

    plain = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    in_parts = client.chat.completions.create(messages=parts, tools=tools, tool_choice="none", **GREEDY)
    with_tools = client.chat.completions.create(messages=MESSAGES, tools=tools, **GREEDY)

    # The template itself writes what special tokens there are.
    encode = functools.partial(server.llm.llm.tokenizer.encode, add_special_tokens=False)
    prompt = "user: What is a list?\nassistant:"
    expected = by_the_engine(server, encode(prompt))
    assert plain.choices[0].message.content == in_parts.choices[0].message.content == expected
    assert with_tools.choices[0].message.content == by_the_engine(server, encode(f"Tool weather. {prompt}"))
    assert plain.choices[0].message.role == "assistant"


def log_probs(tokens: list[Any]) -> list[float]:
    """Returns what is said of each token and of the likeliest ones in its place."""
    return [x.logprob for token in tokens for x in (token, *token.top_logprobs)]


def test_a_chat_streams_with_logprobs(client) -> None:
    options: Any = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.chat.completions.create(**options).choices[0]

    events = list(client.chat.completions.create(stream=True, **options))

    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.message.content
    tokens = [each for event in events if event.choices[0].logprobs for each in event.choices[0].logprobs.content]
    # The second prompt may come from the prefix cache: the same tokens, and numbers within a float32's rounding.
    assert [each.token for each in tokens] == [each.token for each in whole.logprobs.content]
    assert log_probs(tokens) == pytest.approx(log_probs(whole.logprobs.content), abs=1e-4)
    assert all(len(each.top_logprobs) == 2 for each in tokens)
    assert all(bytes(each.bytes).decode() == each.token for each in tokens)


def test_the_answer_follows_a_schema(client) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}

    answers = [
        client.chat.completions.create(messages=MESSAGES, response_format=form, model=MODEL, seed=seed, max_tokens=60)
        for seed in range(2)
    ]

    for answer in answers:
        assert answer.choices[0].finish_reason == "stop"
        assert 0 <= json.loads(answer.choices[0].message.content)["answer"] <= 9


def test_vllms_own_parameters_come_through_extra_body(client) -> None:
    extra = {"structured_outputs": {"choice": ["alpha", "beta"]}, "top_k": 50, "repetition_penalty": 1.1}

    answer = client.completions.create(prompt="The", model=MODEL, max_tokens=20, extra_body=extra)

    assert answer.choices[0].text in ("alpha", "beta")


def test_models_are_listed(client) -> None:
    (model,) = client.models.list().data

    assert (model.id, model.model_extra["max_model_len"]) == (MODEL, 256)
    assert client.models.retrieve(MODEL) == model


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"prompt": []}, openai.BadRequestError, "prompt"),
        ({"prompt": [99999]}, openai.BadRequestError, "prompt"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"prompt_logprobs": -1}}, openai.BadRequestError, "prompt_logprobs"),
        ({"extra_body": {"structured_outputs": {"regexp": "a"}}}, openai.BadRequestError, "structured_outputs"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature"),
    ],
)
def test_a_bad_field_is_named(client, changes, error, param) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(**({"prompt": "x", **GREEDY} | changes))

    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            [1] * 300,
            (
                "prompt: the request needs 308 tokens (300 prompt + 8 new); this engine's max_model_len is 256. "
                "Shorten the prompt or lower max_tokens."
            ),
        ),
        ([[1], [1] * 300], "prompt: prompts[1]: the request needs 308 tokens (300 prompt + 8 new); this engine's"),
        ([[1], [99999]], "prompts[1]: prompt token 0 is 99999, outside the vocabulary; ids are 0 to 2047."),
    ],
)
def test_a_prompt_that_does_not_fit_is_named_by_its_field_and_place(client, prompt, message) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt=prompt, **GREEDY)

    assert caught.value.param == "prompt"
    body: Any = caught.value.body
    assert body["message"].startswith(message)


def test_a_long_conversation_is_named_by_its_field_and_the_limit(client) -> None:
    with pytest.raises(openai.BadRequestError, match=r"messages: the request needs \d+ tokens .* max_model_len is 256"):
        client.chat.completions.create(messages=[{"role": "user", "content": "long " * 200}], **GREEDY)


def test_a_wrong_key_is_refused(server) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match=r"the API key is missing or wrong\."),
    ):
        client.models.list()


def test_a_stream_that_is_closed_early_frees_what_it_held(client, server) -> None:
    options: Any = {"prompt": "The", "model": MODEL, "max_tokens": 240, "extra_body": {"ignore_eos": True}}
    with client.completions.create(stream=True, n=3, **options) as stream:
        next(iter(stream))

    wait_until_idle(server)


def test_many_at_once_get_their_own_answers(client, server) -> None:
    prompts = [f"The number {index} is" for index in range(16)]
    expected = [by_the_engine(server, prompt) for prompt in prompts]

    def ask(prompt: str) -> str:
        events = client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join(event.choices[0].text for event in events)

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(ask, prompts)) == expected
