"""Bad words: no text contains one, whatever tokens it comes by, and however the engine decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn.llm.engine import LLM, EngineConfig, SamplingParams, StructuredOutputsParams
from jattn.llm.engine.request.bad_words import BadWordsFinder
from jattn.llm.load import TextTokenizer, embedded_model_folder
from tests.engine.test_detokenize import fallback_tokenizer, ids_of

PROMPT = "The try statement"


@pytest.fixture(scope="module")
def llm() -> LLM:
    # One shape for every step, so that two programs compile.
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128, fixed_shapes=True)
    return LLM(embedded_model_folder(), config=config)


def texts(llm: LLM, prompt: str, **params: Any) -> list[str]:
    # Without a bad word another program would run.
    params = {"temperature": 0.0, "max_tokens": 24, "bad_words": ["zzz"]} | params
    (output,) = llm.generate(prompt, SamplingParams(**params))
    return [each.text for each in output.outputs]


def test_no_text_comes_by_other_tokens_or_behind_a_space(llm) -> None:
    words = ["clause", "described", "executed"]

    (plain,) = texts(llm, PROMPT, max_tokens=60)
    (text,) = texts(llm, PROMPT, max_tokens=60, bad_words=words)

    first = plain.index("clause")
    assert "executed" in plain
    assert not any(word in text for word in words)
    assert text[: first - 1] == plain[: first - 1]


@settings(deadline=None, max_examples=3)
@given(st.data())
def test_no_part_of_a_text_comes_again_once_it_is_a_bad_word(llm, data) -> None:
    prompt = data.draw(st.sampled_from(["A list", "The", "def f("]))
    (plain,) = texts(llm, prompt)
    starts = data.draw(st.lists(st.integers(0, len(plain) - 1), min_size=1, max_size=3))
    words = [plain[start : start + data.draw(st.integers(1, 9))] for start in starts]

    for text in texts(llm, prompt, bad_words=words, n=2, seed=3, temperature=0.5):
        assert not any((word.lstrip() or word) in text for word in words)


def test_a_grammar_and_its_texts_go_together(llm) -> None:
    choice = StructuredOutputsParams(choice=["a clause", "an expression"])

    assert texts(llm, PROMPT, structured_outputs=choice, bad_words=["clause"]) == ["an expression"]


def test_where_no_other_token_is_left_the_request_ends_with_an_error(llm) -> None:
    token = llm.tokenizer.encode(" list", add_special_tokens=False)[:1]
    params = SamplingParams(allowed_token_ids=token, bad_words=[llm.tokenizer.decode(token) * 2], max_tokens=5)

    (output,) = llm.generate([PROMPT], params)

    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].text == llm.tokenizer.decode(token)


def allowed(
    tokenizer: TextTokenizer, words: list[str], output: list[int], prompt: Sequence[int] = (), **params: Any
) -> set[int]:
    vocab_size = tokenizer.vocab_size
    finder = BadWordsFinder(tokenizer, vocab_size, [0])
    mask = finder.find(SamplingParams(bad_words=words, **params)).allowed(prompt, output)
    return {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]).tolist()}


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 2047), max_size=6), st.lists(st.text("aeinrst d:\n", min_size=1, max_size=4)))
def test_a_token_is_allowed_where_the_text_with_it_has_none_of_the_words(embedded_tokenizer, output, words) -> None:
    words = [*words, "the"]
    text = embedded_tokenizer.decode(output)
    words = [word for word in words if (word.lstrip() or word) not in text]

    found = allowed(embedded_tokenizer, [*words, "zzzz"], output)

    for token in range(1, 2048, 7):
        longer = embedded_tokenizer.decode([*output, token])
        assert (token in found) is not any((word.lstrip() or word) in longer for word in words)


@pytest.fixture(scope="module")
def embedded_tokenizer(llm) -> TextTokenizer:
    return llm.tokenizer


def test_the_bytes_of_a_character_are_a_way_to_write_it() -> None:
    tokenizer = fallback_tokenizer()

    found = allowed(tokenizer, ["\u00e9", " the"], ids_of(tokenizer, "<0xC3>"))

    banned = {*range(tokenizer.vocab_size)} - found
    assert banned == {*ids_of(tokenizer, "<0xA9>", "\u00e9", "\u2581the")}


def test_a_character_that_the_prompt_begins_is_the_outputs() -> None:
    tokenizer = fallback_tokenizer()
    (begin, end, whole) = ids_of(tokenizer, "<0xC3>", "<0xA9>", "\u00e9")

    assert end not in allowed(tokenizer, ["\u00e9"], [], [whole, begin])
    assert end in allowed(tokenizer, ["\u00e9"], [], [begin, whole])


def test_special_tokens_that_the_text_leaves_out_neither_end_a_word_nor_part_it(llm) -> None:
    tokenizer = llm.tokenizer
    (begin,) = tokenizer.encode("cl", add_special_tokens=False)
    (end,) = tokenizer.encode("a", add_special_tokens=False)

    assert end not in allowed(tokenizer, ["cla", "<|end"], [begin, 0])
    assert 0 in allowed(tokenizer, ["cla", "<|end"], [begin])
    assert 0 not in allowed(tokenizer, ["<|end"], [begin], skip_special_tokens=False, ignore_eos=True)
