"""What SamplingParams promises, through the engine: against plain loops over the dense model, and beside neighbours."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jattn
from jattn.llm.engine import LLM, EngineConfig, SamplingParams, StructuredOutputsParams
from jattn.llm.engine.clients.stream import PromptReader
from jattn.llm.engine.request.grammar import GrammarCompiler
from jattn.llm.engine.request.outputs import Logprobs
from jattn.llm.load import TextTokenizer, load_tokenizer
from jattn.llm.text.tokens import TokenBytes
from tests.support.tiny_models import byte_tokenizer, dense_logits, tiny_config, tiny_model, write_tiny_model
from torch_core.base.errors import InvalidInput

PROMPT = list(b"abcab")
NEW = 10


def towards_last(logits: jax.Array, token_ids: jax.Array, num_prompt_tokens: Any, num_tokens: Any, value: Any):
    """Adds a number to the logit of the last token."""
    return logits.at[token_ids[num_tokens - 1]].add(value)


# One shape for every step, so that few programs compile; prompts come in chunks, several tokens in one program, two
# steps are in flight, and the blocks are too few for all.
CONFIG = EngineConfig(
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
    num_blocks=24,
    steps_in_flight=2,
    fixed_shapes=True,
    logits_processors={"towards_last": towards_last},
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_tiny_model(tmp_path_factory.mktemp("model"), 0), config=CONFIG)


def sampled(llm: Any, prompt: Any = PROMPT, **params: Any) -> list[int]:
    params = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True} | params
    (output,) = llm.generate([prompt], SamplingParams(**params))
    return list(output.outputs[0].token_ids)


def greedy_by_hand(llm: Any, change: Any, prompt: list[int] = PROMPT) -> list[int]:
    """The tokens of a loop over the dense model; `change(logits, output)` may alter the logits."""
    output: list[int] = []
    for _ in range(NEW):
        logits = dense_logits(llm.model, np.array(prompt + output))[-1].astype(np.float64)
        change(logits, output)
        output.append(int(logits.argmax()))
    return output


def test_penalties_count_every_token_that_came_also_those_on_the_device_still(llm) -> None:
    def penalize(logits: np.ndarray, output: list[int]) -> None:
        for token in set(PROMPT + output):
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token in output:
            logits[token] -= 0.4
        for token in set(output):
            logits[token] -= 0.3

    expected = greedy_by_hand(llm, penalize)

    assert expected != greedy_by_hand(llm, lambda logits, output: None)
    assert sampled(llm, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3) == expected


def test_bias_allowed_tokens_and_processors_change_the_logits(llm) -> None:
    allowed = [5, 9, 60, 61, 62]

    def change(logits: np.ndarray, output: list[int]) -> None:
        logits[np.setdiff1d(np.arange(257), allowed)] = -np.inf
        logits[60] += 1.5
        logits[(PROMPT + output)[-1]] -= 2.0

    tokens = sampled(llm, allowed_token_ids=allowed, logit_bias={60: 1.5}, logits_processors={"towards_last": -2.0})

    assert tokens == greedy_by_hand(llm, change)
    assert set(tokens) <= set(allowed)


def test_bad_words_come_in_none_of_the_samples(llm) -> None:
    words = [chr(byte) for byte in range(32, 127, 2)]
    params = SamplingParams(n=6, seed=1, max_tokens=20, bad_words=words, ignore_eos=True)

    outputs = llm.generate([PROMPT, list(b"another prompt")], params)

    assert not any(word in each.text for output in outputs for each in output.outputs for word in words)


def test_min_tokens_puts_the_end_off_but_no_longer(llm) -> None:
    first = sampled(llm)[0]

    at_once = sampled(llm, stop_token_ids=[first])
    later = sampled(llm, stop_token_ids=[first], min_tokens=3, logit_bias={first: 50.0})

    assert at_once == [first]
    assert (len(later), later[-1]) == (4, first)
    assert first not in later[:3]


def test_logprobs_are_those_of_the_model(llm: Any) -> None:
    (output,) = llm.generate(
        [PROMPT], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=-1)
    )

    completion = output.outputs[0]
    assert completion.logprobs is not None
    tokens = PROMPT + list(completion.token_ids)
    logits = dense_logits(llm.model, np.array(tokens)).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for place, found in enumerate(completion.logprobs):
        row = expected[len(PROMPT) - 1 + place]
        assert sorted(found, key=lambda token: found[token].rank) == np.argsort(-row)[:3].tolist()
        assert all(abs(each.logprob - row[token]) < 1e-3 for token, each in found.items())
    assert completion.cumulative_logprob == pytest.approx(
        sum(each[token].logprob for each, token in zip(completion.logprobs, completion.token_ids, strict=True))
    )
    assert output.prompt_logprobs is not None
    first, others = output.prompt_logprobs[0], output.prompt_logprobs[1:]
    assert first is None
    for place, found in enumerate(others):
        row = expected[place]
        assert found is not None
        assert set(found) == set(range(257))
        assert all(abs(each.logprob - row[token]) < 1e-3 for token, each in found.items())
        assert found[PROMPT[place + 1]].decoded_token == TokenBytes(llm.tokenizer).text(PROMPT[place + 1])


def test_an_engine_without_a_limit_reports_the_whole_vocabulary(llm) -> None:
    unlimited: Any = LLM(llm.model, tokenizer=llm.tokenizer, config=dataclasses.replace(CONFIG, max_logprobs=-1))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=-1, prompt_logprobs=257)

    (output,) = unlimited.generate([PROMPT], params)

    for place, found in enumerate(output.outputs[0].logprobs):
        row = dense_logits(llm.model, np.array(PROMPT + list(output.outputs[0].token_ids[:place])))[-1]
        expected = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
        assert sorted(found) == list(range(257))
        assert max(abs(each.logprob - expected[token]) for token, each in found.items()) < 1e-3
    assert [len(found) for found in output.prompt_logprobs[1:]] == [257] * (len(PROMPT) - 1)


def test_a_prompt_in_chunks_has_all_its_logprobs_also_when_its_blocks_are_cached(llm: Any) -> None:
    prompt = [(7 * index) % 250 for index in range(40)]
    logits = dense_logits(llm.model, np.array(prompt), padded_to=40).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    # What the first left in the cache has no hidden states.
    for _ in range(2):
        (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))

        for place in range(1, 40):
            ((token, found),) = output.prompt_logprobs[place].items()
            assert token == prompt[place]
            assert found.logprob == pytest.approx(expected[place - 1, token], abs=1e-3)


def test_a_prompts_logprobs_are_whole_also_when_its_first_sample_was_cancelled(llm: Any) -> None:
    prompt = [(7 * index) % 250 for index in range(40)]
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, n=3, seed=1)
    (expected,) = llm.generate([prompt], params)
    first = llm.engine.add(prompt, params)
    reader = PromptReader(llm.engine, None, first)
    llm.engine.step()

    llm.engine.cancel(first.request_id)
    while llm.engine.num_unfinished:
        llm.engine.step()

    found, wanted = ([list(each or {}) for each in of.prompt_logprobs or ()] for of in (reader.output(), expected))
    assert found == wanted


def test_samples_of_one_prompt_share_its_blocks_and_are_those_of_lone_requests(llm) -> None:
    prompt = list(b"a prompt of some blocks, more than one")
    params = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True}
    alone = [sampled(llm, prompt, seed=5 + index, **params) for index in range(3)]
    before = llm.engine.cache_stats()

    (output,) = llm.generate([prompt], SamplingParams(n=3, seed=5, **params))

    assert [list(each.token_ids) for each in output.outputs] == alone
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert len({tuple(tokens) for tokens in alone}) == 3
    after = llm.engine.cache_stats()
    assert (after.forks - before.forks, after.used) == (2, 0)


def test_more_samples_than_places_or_blocks_all_end(llm) -> None:
    prompt = list(b"twenty tokens or so.")
    params = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    alone = [sampled(llm, prompt, seed=1 + index, **params) for index in range(9)]
    before = llm.engine.cache_stats().preemptions

    (output,) = llm.generate([prompt], SamplingParams(n=9, seed=1, **params))

    assert [list(each.token_ids) for each in output.outputs] == alone
    assert llm.engine.cache_stats().preemptions > before
    assert llm.engine.cache_stats().used == 0


def random_params(choose: random.Random) -> dict[str, Any]:
    """Any mixture of what has state on the device and what has none."""
    options = {
        "temperature": lambda: choose.choice([0.0, 0.7, 1.5]),
        "top_k": lambda: choose.randrange(1, 20),
        "top_p": lambda: choose.uniform(0.3, 1),
        "min_p": lambda: choose.uniform(0, 0.2),
        "repetition_penalty": lambda: choose.uniform(0.7, 1.8),
        "presence_penalty": lambda: choose.uniform(-1, 2),
        "frequency_penalty": lambda: choose.uniform(-1, 2),
        "min_tokens": lambda: choose.randrange(1, 4),
        "logit_bias": lambda: {choose.randrange(257): choose.uniform(-5, 5) for _ in range(3)},
        "bad_words": lambda: [chr(97 + choose.randrange(26)) for _ in range(3)],
        "allowed_token_ids": lambda: choose.sample(range(257), 60),
        "stop_token_ids": lambda: choose.sample(range(257), 20),
        "logprobs": lambda: choose.randrange(3),
        "structured_outputs": lambda: StructuredOutputsParams(regex="[a-m]{3,9}"),
        "logits_processors": lambda: {"towards_last": choose.uniform(-3, 3)},
    }
    chosen = choose.sample(sorted(options), choose.randrange(5))
    if "structured_outputs" in chosen:
        chosen = [name for name in chosen if name != "allowed_token_ids"]
    return {name: options[name]() for name in chosen}


def test_a_request_gets_the_tokens_of_a_lone_one_whatever_runs_beside_it(llm, seed) -> None:
    choose = random.Random(seed)
    requests = [
        (
            [choose.randrange(257) for _ in range(choose.randrange(1, 30))],
            SamplingParams(seed=index, max_tokens=choose.randrange(4, 16), **random_params(choose)),
        )
        for index in range(16)
    ]

    together = llm.generate(*map(list, zip(*requests, strict=True)))
    alone = [llm.generate([prompt], params)[0] for prompt, params in requests]

    assert [output.outputs for output in together] == [output.outputs for output in alone]


def test_speculation_changes_no_token_and_no_logprob(llm, seed) -> None:
    choose = random.Random(seed)
    guessing = LLM(
        llm.model,
        tokenizer=llm.tokenizer,
        config=dataclasses.replace(
            CONFIG, max_num_seqs=2, speculative_config={"num_speculative_tokens": 2, "prompt_lookup_min": 1}
        ),
    )
    # Repeated, so that something is guessed.
    prompts = [[choose.randrange(257) for _ in range(4)] * 4 for _ in range(8)]
    params = [SamplingParams(seed=index, max_tokens=9, **random_params(choose)) for index in range(5)]
    params += [SamplingParams(temperature=0.0, max_tokens=9, bad_words=["a", "e", "i"])]
    params += [SamplingParams(temperature=0.0, max_tokens=9, logprobs=1), SamplingParams(top_p=0.3, seed=1)]

    outputs, expected = (each.generate(prompts, params) for each in (guessing, llm))

    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in expected]
    for mine, other in zip(outputs, expected, strict=True):
        assert mine.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("structured", "fits"),
    [
        ({"regex": "[0-9]{3}-[a-f]+x"}, lambda text: re.fullmatch("[0-9]{3}-[a-f]+x", text)),
        ({"choice": ["yes", 'no "quoted"\n', "maybe"]}, lambda text: text in ("yes", 'no "quoted"\n', "maybe")),
        ({"grammar": 'start: "<" /[a-c]{2}/ ">"'}, lambda text: re.fullmatch("<[a-c]{2}>", text)),
        ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"name", "age"}),
        ({"json": json.dumps(SCHEMA)}, lambda text: json.loads(text)["age"] <= 99),
    ],
)
def test_the_text_matches_its_grammar(llm, structured, fits) -> None:
    params = SamplingParams(
        seed=3,
        max_tokens=58,
        # Random weights would go on for ever where the grammar lets them.
        logit_bias=dict.fromkeys(llm.tokenizer.encode('x"}0', add_special_tokens=False), 3.0) | {0: 10.0},
        structured_outputs=StructuredOutputsParams(**structured),
    )

    for output in llm.generate(["a", "b"], params):
        assert output.outputs[0].finish_reason == "stop"
        assert fits(output.outputs[0].text), output.outputs[0].text


def test_a_prompts_logprobs_can_be_read_while_another_thread_brings_more(llm) -> None:
    request = llm.engine.add([1, 2, 3], SamplingParams(prompt_logprobs=0))
    try:
        found = Logprobs(np.float32(-1.0), np.int32(1), np.zeros(1, np.int32), np.zeros(1, np.float32))

        class Place(int):
            def __hash__(self) -> int:
                # What a step of another thread does meanwhile.
                request.prompt_logprobs[2] = found
                return super().__hash__()

        place = Place(1)
        request.prompt_logprobs[place] = found
        del request.prompt_logprobs[2]

        read = PromptReader(llm.engine, None, request).output().prompt_logprobs
    finally:
        llm.engine.cancel(request.request_id)

    assert [list(each or {}) for each in read or ()] == [[], [2], []]


@pytest.mark.parametrize("ends", [[], [0]], ids=["end not allowed", "end allowed"])
@pytest.mark.parametrize("other", ["no", "yes?"], ids=["nothing goes on", "what goes on is not allowed"])
def test_a_complete_text_ends_whatever_tokens_are_allowed(llm, ends, other) -> None:
    allowed = llm.tokenizer.encode("yes", add_special_tokens=False) + ends
    structured = StructuredOutputsParams(choice=["yes", other])
    params = SamplingParams(allowed_token_ids=allowed, structured_outputs=structured, min_tokens=6)

    (output,) = llm.generate(["x"], params)

    assert output.outputs[0].text == "yes"
    assert output.outputs[0].finish_reason == "stop"


def test_a_text_ends_with_what_ends_it_where_that_is_not_among_the_allowed_tokens() -> None:
    tokenizer = TextTokenizer(byte_tokenizer())
    allowed = tokenizer.encode("yes", add_special_tokens=False)
    structured = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(allowed_token_ids=allowed, structured_outputs=structured, max_tokens=9)
    # Not the first of all tokens, which is taken where none is the likeliest.
    llm = LLM(tiny_model(tiny_config(eos_token_ids=(256,)), 0), tokenizer=tokenizer, config=CONFIG)

    (output,) = llm.generate(["x"], params)

    assert output.outputs[0].token_ids == (*allowed, 256)


def test_a_text_whose_end_is_ignored_ends_where_its_grammar_lets_nothing_else_come(llm) -> None:
    structured = StructuredOutputsParams(regex="a{1,6}")
    params = SamplingParams(ignore_eos=True, logit_bias={0: 50.0}, structured_outputs=structured)

    (output,) = llm.generate(["x"], params)

    assert output.outputs[0].text == "aaaaaa"
    assert output.outputs[0].finish_reason == "stop"


def test_stop_tokens_wait_for_min_tokens_also_where_a_grammar_allows_them(llm) -> None:
    (stop,) = llm.tokenizer.encode("a", add_special_tokens=False)
    structured = StructuredOutputsParams(regex="[ab]{12}")
    params = SamplingParams(min_tokens=5, logit_bias={stop: 50.0}, stop_token_ids=[stop], structured_outputs=structured)

    (output,) = llm.generate(["x"], params)

    assert output.outputs[0].text == "bbbbb"
    assert output.outputs[0].stop_reason == stop


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_text_that_no_allowed_token_goes_on_with_ends_with_an_error(llm, ignore_eos) -> None:
    allowed = llm.tokenizer.encode("ye", add_special_tokens=False)
    structured = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(allowed_token_ids=allowed, structured_outputs=structured, ignore_eos=ignore_eos)

    (output,) = llm.generate(["x"], params)

    assert output.outputs[0].text == "ye"
    assert output.outputs[0].finish_reason == "error"


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"regex": "(["}, "regex cannot be compiled: "),
        ({"json": '{"type": 5}'}, "json cannot be compiled: "),
        ({"json": "{"}, "json cannot be compiled: "),
        ({"grammar": "start: nowhere"}, "grammar cannot be compiled: "),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_and_nothing_starts(llm, structured, message) -> None:
    with pytest.raises(InvalidInput) as error:
        sampled(llm, structured_outputs=StructuredOutputsParams(**structured))

    assert str(error.value).startswith(message)
    assert llm.engine.num_unfinished == 0


def test_a_grammar_that_is_too_large_for_a_first_token_is_refused() -> None:
    tokenizer = load_tokenizer(Path(jattn.__file__).parent / "assets")
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [0])

    with pytest.raises(
        InvalidInput, match=r"^regex cannot be compiled: lexer error: too many expressions constructed$"
    ):
        compiler.compile(StructuredOutputsParams(regex="(.{1,300}){1,300}x"))


def test_a_grammar_that_comes_again_is_not_compiled_again(llm, monkeypatch) -> None:
    params = SamplingParams(n=2, max_tokens=3, structured_outputs=StructuredOutputsParams(regex="[ab]{3}c"), seed=1)
    first = llm.generate(["x"], params)
    monkeypatch.setattr(GrammarCompiler, "_compiled", lambda *_, **__: pytest.fail("compiled"))

    again = llm.generate(["x"], params)

    texts = [[sample.text for sample in output.outputs] for output in (*first, *again)]
    assert texts[0] == texts[1]
    assert all(re.fullmatch("[ab]{3}", text) for text in texts[0])


def test_a_grammar_that_outgrows_its_library_ends_with_an_error(llm) -> None:
    letter = llm.tokenizer.encode("a", add_special_tokens=False)[0]
    structured = StructuredOutputsParams(regex="((a{1,100}){1,100}){1,100}b")

    params = SamplingParams(max_tokens=50, logit_bias={letter: 50.0}, structured_outputs=structured)

    (output,) = llm.generate(["x"], params)

    assert output.outputs[0].finish_reason == "error"
    assert set(output.outputs[0].text) == {"a"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 21}, "logprobs is 21; this engine's max_logprobs is 20. Ask for fewer, or set "),
        ({"logprobs": -1}, "logprobs is -1; this engine's max_logprobs is 20. Ask for fewer, or set "),
        ({"allowed_token_ids": [1] * 258}, "allowed_token_ids has 258 entries; the vocabulary has 257 tokens"),
        ({"allowed_token_ids": [257]}, "token 257 of allowed_token_ids is outside the vocabulary; ids are 0 to 256."),
        ({"logit_bias": {300: 1}}, "token 300 of logit_bias is outside the vocabulary; ids are 0 to 256."),
        ({"stop_token_ids": range(1, 129)}, "stop_token_ids has 128 entries and the model 1 of its own; together "),
        ({"logits_processors": {"x": 1}}, "logits_processors names 'x'; this engine has towards_last (EngineConfig."),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name_and_nothing_starts(llm, params, message) -> None:
    with pytest.raises(InvalidInput) as error:
        sampled(llm, **params)

    assert str(error.value).startswith(message)
    assert llm.engine.num_unfinished == 0


def test_without_max_tokens_the_models_length_ends_it(llm) -> None:
    assert len(sampled(llm, max_tokens=None)) == 64 - len(PROMPT)


def test_a_prompt_is_truncated_to_its_last_tokens(llm) -> None:
    # The tokens before them are not read.
    assert sampled(llm, [object()] * 100 + PROMPT, truncate_prompt_tokens=5) == sampled(llm)
    assert len(sampled(llm, [9] * 100, truncate_prompt_tokens=-1, max_tokens=None)) == 1


def test_the_stop_string_is_kept_when_asked_for(llm) -> None:
    text = llm.tokenizer.decode(sampled(llm))
    params = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "stop": text[2:4]}

    cut, kept = (
        llm.generate([PROMPT], SamplingParams(include_stop_str_in_output=include, **params))[0].outputs[0]
        for include in (False, True)
    )

    assert (cut.text, kept.text) == (text[: text.index(text[2:4])], text[: text.index(text[2:4]) + 2])
    assert (cut.stop_reason, kept.stop_reason) == (text[2:4], text[2:4])


def test_nothing_more_compiles_for_any_mixture_of_parameters(llm, seed) -> None:
    choose = random.Random(seed)
    for params in (SamplingParams(), SamplingParams(top_p=0.5)):
        llm.generate([PROMPT] * 3, params)
    compiled = len(llm.engine.programs)

    for index in range(12):
        llm.generate([PROMPT] * 3, [SamplingParams(seed=index, **random_params(choose)) for _ in range(3)])

    assert len(llm.engine.programs) == compiled
