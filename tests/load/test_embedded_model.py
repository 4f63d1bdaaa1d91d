"""The model that ships with the package: small, readable by transformers, and it has learnt something."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jattn.llm.load import embedded_model_folder, load_model, load_tokenizer
from tests.support.tiny_models import dense_logits, reference_bound, transformers_logits

#: Written for this test in the manner of the training text; no sentence of it is from there.
PROBE = (
    "The statement is evaluated each time the function is called. If the object does not define this method, a "
    "TypeError exception is raised. Otherwise, the value of the expression is assigned to the name in the local scope."
)


@pytest.fixture(scope="module")
def embedded():
    return load_model(embedded_model_folder(), dtype="float32")


def test_its_files_take_at_most_four_megabytes():
    assert sum(path.stat().st_size for path in embedded_model_folder().iterdir()) <= 4_000_000


def test_its_logits_equal_those_of_transformers(embedded):
    model, _, tokenizer = embedded
    tokens = np.array(tokenizer.encode(PROBE))
    exact = transformers_logits(embedded_model_folder(), tokens[None], "float64")
    allowed = reference_bound(exact, transformers_logits(embedded_model_folder(), tokens[None]))
    assert np.abs(dense_logits(model, tokens, padded_to=len(tokens)) - exact[0]).max() <= allowed


def test_transformers_encodes_and_decodes_as_we_do():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(embedded_model_folder())
    ours = load_tokenizer(embedded_model_folder())
    for text in ("", PROBE, "  x = [1, 2]\n\tnaïve 漢字 🙂"):
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text


def test_every_text_starts_with_the_end_of_text_token_that_separated_the_training_documents(embedded):
    _, config, tokenizer = embedded
    assert tokenizer.encode("")[0] == config.bos_token_id == config.eos_token_ids[0]


def test_it_has_learnt_the_language_of_its_text(embedded):
    """Knowing nothing gives a loss of log(vocab_size), 7.6; after a tenth of the training it is still 5."""
    model, config, tokenizer = embedded
    tokens = np.array(tokenizer.encode(PROBE))
    logits = dense_logits(model, tokens, padded_to=len(tokens))[:-1].astype(np.float64)
    chosen = logits[np.arange(len(tokens) - 1), tokens[1:]]
    loss = float((np.log(np.exp(logits).sum(-1)) - chosen).mean())
    assert loss < 4.6 < math.log(config.vocab_size)
