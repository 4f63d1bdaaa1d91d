"""Encoders with labels: the logits of pairs are those of transformers, and `LLM.score` makes scores of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import processors

from jattn.llm.engine import LLM
from jattn.llm.load import TextTokenizer, load_model, parse_config
from jattn.llm.text.pairs import as_pieces
from tests.support.saved import assert_saved_as_it_was
from tests.support.tiny_models import byte_tokenizer, reference_bound, tiny_config, tiny_model
from torch_core.base.errors import InvalidInput, RequestTooLong, Unsupported

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 34,
    "initializer_range": 0.3,
    "num_labels": 1,
}
#: Two tokens on each side in the second layer.
MODERN: dict[str, Any] = {"local_attention": 4, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
MODERN |= {"cls_token_id": 1, "sep_token_id": 2, "initializer_range": 0.5}


def pair_tokenizer() -> TextTokenizer:
    """Bytes between special tokens, as BERT's."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    vocabulary = tokenizer.get_vocab()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    return TextTokenizer(tokenizer)


def written(folder: Path, kind: str, seed: int, **options: Any) -> Any:
    """Writes a cross-encoder of transformers into a folder, and returns it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Bert", {}),
        ("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}),
        ("ModernBert", MODERN),
        ("ModernBert", MODERN | {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}),
    ],
)
def test_logits_of_pairs_are_those_of_transformers(tmp_path, kind, options, seed) -> None:
    import torch

    theirs = written(tmp_path, kind, seed, **options)
    random = np.random.default_rng(seed)
    # Some rows lose many more digits than others: of fewer of them torch's largest error is small by chance.
    lengths = random.integers(2, 10, 128)
    tokens, types = random.integers(3, 260, (128, 9)), random.integers(0, 2, (128, 9)) if kind == "Bert" else None
    mask = torch.tensor([[place < length for place in range(9)] for length in lengths])
    passed = {} if types is None else {"token_type_ids": torch.from_numpy(types)}

    model, config, _ = load_model(tmp_path, with_tokenizer=False)
    found = model.label_logits(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths), None if types is None else jnp.asarray(types, jnp.int32)
    )

    with torch.no_grad():
        same, exact = (
            theirs.to(dtype)(torch.from_numpy(tokens), attention_mask=mask, **passed).logits.double().numpy()
            for dtype in (torch.float32, torch.float64)
        )
    assert (found.shape, config.max_position_embeddings) == ((128, 1), 32 if kind == "XLMRoberta" else 34)
    assert np.abs(np.asarray(found, np.float64) - exact).max() <= reference_bound(exact, same)
    assert_saved_as_it_was(tmp_path, tmp_path / "again")


@pytest.fixture(scope="module")
def scorer() -> LLM:
    config = tiny_config(
        is_encoder=True,
        position_embedding="learned",
        max_position_embeddings=32,
        eos_token_ids=(),
        vocab_size=260,
        token_types=2,
        num_labels=1,
    )
    return LLM(tiny_model(config, 0), tokenizer=pair_tokenizer())


def test_a_score_is_the_sigmoid_of_the_logit_of_a_pair(scorer) -> None:
    model: Any = scorer.model
    found = scorer.score("abc", ["de", "fghi"])
    logits = [each.outputs.score for each in scorer.score("abc", ["de", "fghi"], use_activation=False)]

    (first, _) = as_pieces(pair_tokenizer(), [("abc", "de"), ("abc", "fghi")], 32)
    assert first.types == [0] * 5 + [1] * 3
    tokens, types = (jnp.asarray([each], jnp.int32) for each in (first.token_ids, first.types))
    expected = model.label_logits(tokens, jnp.asarray([8]), types)[0, 0]
    np.testing.assert_allclose(logits[0], float(expected), rtol=0, atol=2.0**-18)
    np.testing.assert_allclose(
        [each.outputs.score for each in found], 1 / (1 + np.exp(-np.asarray(logits))), rtol=0, atol=2.0**-22
    )
    assert found[0].prompt_token_ids == tuple(first.token_ids)


@pytest.mark.parametrize("cut", [5, 6, 9, 12, 32])
def test_pairs_are_cut_as_the_tokenizers_library_cuts_them(cut, seed) -> None:
    tokenizer, random = pair_tokenizer(), np.random.default_rng(seed)
    library = tokenizer.tokenizer
    for first, second in random.integers(1, 14, (20, 2)):
        pair = "a" * first, "b" * second
        library.enable_truncation(cut, strategy="longest_first")
        expected = library.encode(*pair)
        library.no_truncation()

        (found,) = as_pieces(tokenizer, [pair], 32, cut=cut)
        assert (found.token_ids, found.types) == (expected.ids, expected.type_ids)


def test_a_pair_that_is_too_long_is_refused_or_cut(scorer) -> None:
    message = r"^prompts\[1\] has 36 tokens; the model reads 32 at most; truncate_prompt_tokens=-1 cuts it\.$"
    with pytest.raises(RequestTooLong, match=message):
        scorer.score("abc", ["d", "e" * 30])
    with pytest.raises(InvalidInput, match=r"^truncate_prompt_tokens is 4; it must be -1, or at least 5\.$"):
        scorer.score("abc", ["d", "e" * 30], truncate_prompt_tokens=4)

    assert len(scorer.score("abc", "e" * 30, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 32


def test_without_labels_a_score_is_the_cosine_of_two_vectors() -> None:
    config = tiny_config(is_encoder=True, position_embedding="learned", max_position_embeddings=32, eos_token_ids=())
    llm = LLM(tiny_model(config, 0), tokenizer=TextTokenizer(byte_tokenizer()))
    first, second = (each.outputs.embedding for each in llm.embed(["abc", "de"]))

    assert llm.score("abc", "de")[0].outputs.score == float(first @ second)


@pytest.mark.parametrize(
    ("text_1", "text_2", "message"),
    [
        (None, "a", "text_1 is a NoneType; pass a text or a list of them"),
        ("b", 3, "text_2 is a int; pass a text or a list of them"),
        (b"ab", "a", "text_1 is a bytes; pass"),
        ({"a": 1}, "a", "text_1 is a dict; pass"),
        ("a", ["b", 3], r"text_2\[1\] is 3; it must be a text"),
    ],
)
def test_what_is_no_text_is_refused_by_name(scorer, text_1, text_2, message) -> None:
    with pytest.raises(InvalidInput, match=f"^{message}"):
        scorer.score(text_1, text_2)


def test_texts_of_other_numbers_and_models_of_several_labels_are_refused(scorer) -> None:
    with pytest.raises(
        InvalidInput, match=r"^text_1 has 2 texts and text_2 3; pass one text, or as many as text_2 has"
    ):
        scorer.score(["a", "b"], ["c", "d", "e"])
    config = tiny_config(is_encoder=True, num_labels=3, eos_token_ids=())
    with pytest.raises(Unsupported, match=r"^model has 3 labels; a score needs a model with one\.$"):
        LLM(tiny_model(config, 0), tokenizer=pair_tokenizer()).score("a", "b")


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5"}}, "identity"),
    ],
)
def test_the_activation_of_a_cross_encoder_is_read(keys, kind) -> None:
    raw = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "id2label": {"0": "x"}}
    sizes = {name: SIZES[name] for name in SIZES if name not in ("initializer_range", "num_labels")}
    assert parse_config(raw | sizes | keys).label_activation == kind
    with pytest.raises(Unsupported, match=r"^config\.json: activation_fn is 'torch\.nn\.Tanh'"):
        parse_config(raw | sizes | {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}})
    with pytest.raises(InvalidInput, match=r"^config\.json: id2label is 5; it must be an object\.$"):
        parse_config(raw | sizes | {"id2label": 5})
