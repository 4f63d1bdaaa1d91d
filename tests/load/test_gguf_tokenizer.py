"""Tokenizers of GGUF files: words, merges, special tokens and templates from the metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from jattn.llm.load import load_tokenizer
from jattn.llm.load.gguf.metadata import Metadata
from jattn.llm.load.gguf.pre_tokenizers import BPE_KINDS
from jattn.llm.load.gguf.tokenizer import end_ids, tokenizer_of_gguf
from tests.support.gguf_files import write_gguf
from torch_core.base.errors import InvalidInput, Unsupported

TEXTS = ["Hello  world\n\n", "12345 ½", "I'm WE'LL", " é 你好 🙂", "<s>", "a<|end|>b", "▁", ""]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def bpe(**more: Any) -> Metadata:
    tokens = ["<|begin|>", "<|end|>", "<tool>", *BYTES, "He", "ll", "12", "Ġw"]
    kinds = np.array([3, 3, 4] + [1] * (len(tokens) - 3), np.int32)
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds}
    values["merges"] = ["H e", "l l", "1 2", "Ġ w"]
    values |= {"bos_token_id": 0, "eos_token_id": 1} | more
    return Metadata((f"tokenizer.ggml.{key}", value) for key, value in values.items() if value is not None)


def sentencepiece(**more: Any) -> Metadata:
    special, byte_tokens = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "H", "e", "l", "o", "He", "ll", "Hell", "▁He", "▁Hell", "▁▁", "w", "\n", "\n\n"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces))]
    kinds[259 + pieces.index("\n\n")] = 4
    values = {"model": "llama", "tokens": [*special, *byte_tokens, *pieces]}
    values |= {"scores": np.array(scores, "f4"), "token_type": np.array(kinds, np.int32)}
    values |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | more
    return Metadata((f"tokenizer.ggml.{key}", value) for key, value in values.items() if value is not None)


@pytest.mark.parametrize("kind", [{"pre": name} for name in BPE_KINDS], ids=str)
def test_every_kind_of_bpe_gives_a_text_back(kind):
    tokenizer = tokenizer_of_gguf(bpe(**kind), None)
    for text in TEXTS:
        assert tokenizer.decode_plainly(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gpt-2", ["123", "ĠI", "'m", "Ġ", "ĠWE", "'", "LL", "!", "Ċ", "Ġx"]),
        ("starcoder", ["1", "2", "3", "ĠI", "'m", "Ġ", "ĠWE", "'", "LL", "!", "Ċ", "Ġx"]),
        ("llama-bpe", ["123", "ĠI", "'m", "Ġ", "ĠWE", "'LL", "!Ċ", "Ġx"]),
        ("qwen2", ["1", "2", "3", "ĠI", "'m", "Ġ", "ĠWE", "'LL", "!Ċ", "Ġx"]),
        ("tekken", ["1", "2", "3", "ĠI", "'m", "Ġ", "ĠWE", "'LL", "!Ċ", "Ġx"]),
        ("gpt-4o", ["123", "ĠI'm", "Ġ", "ĠWE'LL", "!Ċ", "Ġx"]),
    ],
)
def test_words_are_those_of_the_kind(kind, expected):
    words = tokenizer_of_gguf(bpe(pre=kind), None).tokenizer.pre_tokenizer.pre_tokenize_str("123 I'm  WE'LL!\n x")
    assert [word for word, _ in words] == expected


def test_merges_special_and_user_defined_tokens_are_found():
    tokenizer = tokenizer_of_gguf(bpe(), None)
    names = [tokenizer.tokenizer.id_to_token(token) for token in tokenizer.encode("Hell w<|end|><tool>")]
    assert names == ["He", "ll", "Ġw", "<|end|>", "<tool>"]
    # Special ones are left out of a text, and those of the model's user are not.
    assert tokenizer.decode(tokenizer.encode("a<|end|><tool>")) == "a<tool>"
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (bpe(), [None, None]),
        (bpe(pre="llama-bpe"), [0, None]),
        (bpe(add_bos_token=True, add_eos_token=True), [0, 1]),
        (sentencepiece(), [1, None]),
        (sentencepiece(add_bos_token=False), [None, None]),
    ],
    ids=["gpt-2", "llama-bpe", "both", "sentencepiece", "none"],
)
def test_a_text_begins_and_ends_as_the_file_says(metadata, expected):
    tokenizer = tokenizer_of_gguf(metadata, None)
    plain, found = tokenizer.encode("He", add_special_tokens=False), tokenizer.encode("He")
    assert found == [token for token in (expected[0], *plain, expected[1]) if token is not None]


def test_sentencepiece_merges_the_highest_score_first_and_falls_back_to_bytes():
    tokenizer = tokenizer_of_gguf(sentencepiece(add_bos_token=False), None)
    names = [tokenizer.tokenizer.id_to_token(token) for token in tokenizer.encode("Hello  é")]
    assert names == ["▁Hell", "o", "▁▁", "<0xC3>", "<0xA9>"]
    for text in ("Hello  wé\n\n", "  He", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_prefix_of_space_is_left_out_if_the_file_says_so():
    tokenizer = tokenizer_of_gguf(sentencepiece(add_bos_token=False, add_space_prefix=False), None)
    names = [tokenizer.tokenizer.id_to_token(token) for token in tokenizer.encode("Hell")]
    assert names == ["Hell"]
    assert tokenizer.decode(tokenizer.encode(" He")) == " He"


def test_chat_templates_and_ends_are_those_of_the_file():
    metadata = bpe(eot_token_id=4)
    metadata |= {"tokenizer.chat_template": "{{ 1 }}", "tokenizer.chat_template.tool_use": "{{ 2 }}"}
    tokenizer = tokenizer_of_gguf(Metadata(metadata), None)
    assert (tokenizer.chat_template, tokenizer.tool_chat_template) == ("{{ 1 }}", "{{ 2 }}")
    # <|end|> ends a text by its name too.
    assert end_ids(bpe(eot_token_id=4)) == (1, 4)
    assert end_ids(bpe(eos_token_id=None)) == (1,)


REFUSED = {
    "no model": (bpe(model=None), "tokenizer.ggml.model is missing"),
    "no tokens": (bpe(tokens=None, token_type=None), "tokenizer.ggml.tokens is missing"),
    "another model": (bpe(model="rwkv"), "tokenizer.ggml.model is 'rwkv'; this build reads gpt2 and llama"),
    "another kind": (bpe(pre="new"), "tokenizer.ggml.pre is 'new'; this build reads "),
    "no kind": (bpe(pre=None), "tokenizer.ggml.pre is missing"),
    "half a merge": (bpe(merges=["H"]), r"tokenizer.ggml.merges[0] is 'H'"),
    "a merge of no token": (bpe(merges=["H x"]), "the vocabulary makes no tokenizer"),
    "too few kinds": (bpe(token_type=np.ones(3, np.int32)), "token_type has 3 elements"),
    "kinds of text": (bpe(token_type=["1"]), "token_type is ["),
    "kinds of reals": (bpe(token_type=np.ones(3, "f4")), "token_type is a list of float32"),
    "an end outside": (bpe(eos_token_id=9999), "eos_token_id is 9999"),
    "no score": (sentencepiece(scores=None), "tokenizer.ggml.scores is missing"),
    "too few scores": (sentencepiece(scores=np.zeros(3, "f4")), "tokenizer.ggml.scores has 3 elements"),
    "a flag of text": (bpe(add_bos_token="yes"), "add_bos_token is 'yes'; it must be a boolean"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_vocabulary_that_is_not_served_is_refused_by_name(name):
    metadata, message = REFUSED[name]
    with pytest.raises((InvalidInput, Unsupported)) as caught:
        tokenizer_of_gguf(metadata, None)
    assert message in str(caught.value)


def test_the_tokenizer_of_a_file_is_loaded_by_its_path(tmp_path):
    metadata: dict[str, Any] = dict(bpe(pre=None)) | {"general.architecture": "gpt2"}
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"].tolist()
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", metadata, {}))
    assert tokenizer.decode(tokenizer.encode("Hell w")) == "Hell w"
