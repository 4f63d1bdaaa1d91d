"""Lengths of texts before they are encoded: bounds that hold, and long texts in another process."""

from __future__ import annotations

import random
import unicodedata

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from jattn.llm.load import TextTokenizer
from jattn.llm.load.text_sizes import text_sizes
from jattn.llm.workers.pool import Task
from tests.support.tiny_models import byte_tokenizer
from torch_core.base.errors import InvalidInput, RequestTooLong

# Those beyond have no other forms.
CHARACTERS = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
PIECES = [
    "a",
    "bc",
    " ",
    "   ",
    "\n",
    "é",
    "e\u0301",
    "\u212b",
    "漢",
    "가",
    "\u1f82",
    "😀",
    "<|endoftext|>",
    "0",
    "\u0390",
]


def byte_pairs() -> Tokenizer:
    """Returns a byte-level tokenizer with a token of two and one of four letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: index for index, each in enumerate([*alphabet, "bc", "bcbc"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("b", "c"), ("bc", "bc")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Returns a tokenizer of the kind of Llama 1: words begin with a mark, unknown characters become bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "bc"]
    vocabulary = {name: index for index, name in enumerate(names)}
    model = models.BPE(vocabulary, [("b", "c")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def canonical() -> Tokenizer:
    tokenizer = byte_pairs()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize("make", [byte_tokenizer, byte_pairs, byte_fallback, canonical])
def test_no_text_has_fewer_tokens_than_its_length_says(make, seed) -> None:
    choose, tokenizer = random.Random(seed), make()
    sizes = text_sizes(tokenizer)
    texts = ["".join(choose.choices(PIECES, k=40)) for _ in range(50)] + [each * 50 for each in PIECES]

    counts = [(len(tokenizer.encode(text, add_special_tokens=False)), sizes.fewest_tokens(text)) for text in texts]

    assert sizes.longest > 0
    assert all(0 < fewest <= count for count, fewest in counts)


def losing(**parts: object) -> Tokenizer:
    tokenizer = byte_tokenizer()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def before_bytes(part: pre_tokenizers.PreTokenizer) -> Tokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return losing(pre_tokenizer=pre_tokenizers.Sequence([part, byte_level]))


def swallowing() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: losing(normalizer=normalizers.Strip()),
        lambda: losing(normalizer=normalizers.Replace("aa", "a")),
        lambda: before_bytes(pre_tokenizers.Whitespace()),
        lambda: before_bytes(pre_tokenizers.Split(" ", "removed")),
        lambda: losing(model=models.WordLevel({"a": 0, "<unk>": 1}, "<unk>")),
        lambda: losing(model=models.BPE({"a": 0}, [])),
        lambda: losing(model=models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
        swallowing,
    ],
    ids=["strip", "replace", "whitespace", "removed", "words", "dropped", "fused", "swallowed"],
)
def test_a_tokenizer_that_can_drop_text_gives_no_bound(make) -> None:
    assert text_sizes(make()).fewest_tokens("a" * 99) == 0


def test_no_spelling_of_a_composed_character_is_longer_than_the_factor() -> None:
    """Each character of the decomposed form may have come as another character that decomposes to it alone."""
    plain = {each: unicodedata.normalize("NFD", each) for each in CHARACTERS if unicodedata.decomposition(each)}
    longest = {spelling: each for each, spelling in plain.items() if len(spelling) == 1}

    for composed in (each for each in plain if unicodedata.normalize("NFC", each) == each):
        spelling = "".join(
            max(part, longest.get(part, ""), key=lambda each: len(each.encode())) for part in plain[composed]
        )
        assert len(spelling.encode()) <= 4 * len(composed.encode())
        assert len(spelling) <= 4


@pytest.mark.parametrize("make", [byte_pairs, byte_fallback])
def test_a_long_text_has_the_same_tokens_in_another_process(make, seed) -> None:
    text = "".join(random.Random(seed).choices(PIECES, k=20_000))
    tokenizer = TextTokenizer(make())

    tokens = tokenizer.encode(text)

    assert tokens == tokenizer.tokenizer.encode(text).ids
    # Another one, which no process knows yet.
    assert TextTokenizer(make()).decode(tokens) == tokenizer.tokenizer.decode(tokens)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch) -> None:
    monkeypatch.setattr(Task, "run", lambda *_, **__: pytest.fail("encoded"))

    with pytest.raises(RequestTooLong, match=r"^the prompt has 4194304 characters and at least 322639 tokens; the"):
        TextTokenizer(byte_pairs()).encode("x" * (4 << 20), most=1000)


def test_a_text_that_turns_out_too_long_is_refused() -> None:
    with pytest.raises(
        RequestTooLong, match=r"^the prompt has 20000 characters and at least 20000 tokens; the longest"
    ):
        TextTokenizer(byte_pairs()).encode("x" * 20_000, most=19_999)


def test_a_long_text_that_is_cut_has_its_last_tokens_and_its_process_returns_no_others(monkeypatch) -> None:
    run, answers = Task.run, []
    monkeypatch.setattr(Task, "run", lambda *args, **options: answers.append(run(*args, **options)) or answers[-1])
    tokenizer, text = TextTokenizer(byte_pairs()), "abc" * 9_000

    tokens = tokenizer.encode(text, most=5, cut=True)

    assert tokens == tokenizer.tokenizer.encode(text).ids[-5:]
    assert [len(each) for each in answers] == [5 * 4]


def test_a_normaliser_that_grows_text_is_bounded() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Replace("a", "b" * (1 << 20))

    with pytest.raises(InvalidInput, match=r"^the text takes more than 2048 MiB of memory"):
        TextTokenizer(tokenizer).encode("a" * 16_000)


@pytest.mark.parametrize("text", ["\ud800" * 20_000, 5], ids=["surrogates", "no text"])
def test_what_is_no_text_is_refused(text) -> None:
    with pytest.raises(InvalidInput, match=r"^the tokenizer cannot encode the text: "):
        TextTokenizer(byte_pairs()).encode(text)
