"""Tokenizers of transformers and of sentencepiece in the place of the folder's own."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.load import embedded_model_folder, load_model, load_tokenizer
from jattn.llm.load.other_tokenizers import as_text_tokenizer
from torch_core.base.errors import InvalidInput, Unsupported

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁ab"]


class Processor:
    """A stand-in for `sentencepiece.SentencePieceProcessor`: the longest piece first, and bytes for the rest."""

    def id_to_piece(self, index: int) -> str:
        return PIECES[index]

    def get_piece_size(self) -> int:
        return len(PIECES)

    def is_control(self, index: int) -> bool:
        return index in (1, 2)

    def unk_id(self) -> int:
        return 0

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def encode(self, text: str, out_type: Any = int, add_bos: bool = True, add_eos: bool = False) -> list[Any]:
        rest, found = "▁" + text.replace(" ", "▁"), []
        while rest:
            piece = next((each for each in reversed(PIECES[259:]) if rest.startswith(each)), None)
            found += [piece] if piece else [f"<0x{byte:02X}>" for byte in rest[0].encode()]
            rest = rest[len(piece or "?") :]
        return found if out_type is str else [1] * add_bos + [PIECES.index(each) for each in found] + [2] * add_eos


def fast(**options: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(embedded_model_folder() / "tokenizer.json"), **options)


@pytest.mark.parametrize("make", [fast, lambda: fast().backend_tokenizer], ids=["transformers", "tokenizers"])
def test_a_fast_tokenizer_gives_the_tokens_and_the_text_of_the_folders_own(make: Any) -> None:
    own, found = load_tokenizer(embedded_model_folder()), as_text_tokenizer(make())

    assert found is not None
    token_ids = found.encode("The list of größe")
    assert token_ids == own.encode("The list of größe")
    assert found.decode(token_ids) == own.decode(token_ids)


def test_cutting_and_padding_of_a_fast_tokenizer_are_off_and_stay_its_own() -> None:
    given = fast(pad_token="<pad>")
    given.backend_tokenizer.enable_truncation(2)
    found = as_text_tokenizer(given)

    assert found is not None
    assert len(found.encode("one two three four five")) > 2
    assert given.backend_tokenizer.truncation is not None


def test_chat_templates_and_special_tokens_come_with_a_tokenizer_of_transformers() -> None:
    found = as_text_tokenizer(fast(eos_token="</s>", chat_template="{{ messages[0].content }}"))

    assert found is not None
    assert found.chat_template == "{{ messages[0].content }}"
    assert found.special_tokens["eos_token"] == "</s>"


def test_a_sentencepiece_processor_encodes_and_its_pieces_decode() -> None:
    found = as_text_tokenizer(Processor())

    assert found is not None
    for text in ("ab ab", "a ß", "x"):
        assert found.encode(text) == Processor().encode(text)
        assert found.decode(found.encode(text)) == text
    assert found.encode("a", add_special_tokens=False) == Processor().encode("a", add_bos=False)
    assert found.decode_plainly([1, 260, 2]) == "<s>a</s>"
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    with pytest.raises(InvalidInput, match=r"^tokenizer has token ids up to 262; vocab_size is 100"):
        found.within(100)


def test_an_llm_takes_a_tokenizer_of_transformers() -> None:
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=64, num_scheduler_steps=1, fixed_shapes=True)
    model, _, own = load_model(embedded_model_folder())
    greedy = SamplingParams(temperature=0.0, max_tokens=4)

    texts = [
        LLM(model, tokenizer=each, config=config).generate("The list", greedy)[0].outputs[0].text
        for each in (fast(), own)
    ]

    assert texts[0] == texts[1] != ""


class Slow:
    """A class of transformers that has no fast tokenizer."""


Slow.__module__ = "transformers.models.slow"


def test_tokenizers_that_cannot_be_used_are_named() -> None:
    with pytest.raises(Unsupported, match=r"^tokenizer is a Slow, which transformers does not convert"):
        as_text_tokenizer(Slow())
    with pytest.raises(InvalidInput, match=r"^tokenizer is 5; it must be a jattn.llm.load.TextTokenizer, a tokenizer"):
        as_text_tokenizer(5)
