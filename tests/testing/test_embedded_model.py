"""The bar of the cross-check on the model that ships: 20 prompts, greedy tokens equal to transformers' (nightly 64)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from jattn.llm.load import embedded_model_folder, load_tokenizer
from jattn.llm.testing import compare_with_torch

pytestmark = pytest.mark.skipif(
    not (embedded_model_folder() / "model.safetensors").exists(), reason="this checkout has no embedded model"
)
#: 20 lengths from 1 to 200, on both sides of the block size and of its multiples.
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 48, 64, 79, 96, 113, 128, 161, 200)
TEXT = """A class definition defines a class object. The inheritance list usually gives a list of base classes, so
each item in the list should evaluate to a class object which allows subclassing. Classes without an inheritance list
inherit from the base class object. The for statement is used to iterate over the elements of a sequence (such as a
string, tuple or list) or other iterable object: for target in iterable: do something with it. The expression list is
evaluated once; it should yield an iterable object. An iterator is created for the result of that expression. If an
exception occurs during execution of the try clause, the rest of the clause is skipped. Then, if its type matches the
exception named after the except keyword, the except clause is executed, and then execution continues after the try
statement. The import statement combines two operations; it searches for the named module, then it binds the results
of that search to a name in the local scope. A module can contain executable statements as well as function
definitions. These statements are intended to initialize the module."""


def prompts() -> Sequence[Sequence[int]]:
    tokens = load_tokenizer(embedded_model_folder()).encode(TEXT)
    # Each prompt starts at another place, so that no two share a prefix.
    return [tokens[start : start + length] for start, length in enumerate(LENGTHS)]


def test_the_prompts_have_1_to_200_tokens() -> None:
    assert [len(prompt) for prompt in prompts()] == list(LENGTHS)


@pytest.mark.parametrize("max_tokens", [12, pytest.param(64, marks=pytest.mark.nightly)])
def test_generation_is_transformers_token_by_token_and_logits_are_within_twice_the_float32_error(max_tokens) -> None:
    pytest.importorskip("transformers")

    report = compare_with_torch(prompts=prompts(), implementations=["torch"], max_tokens=max_tokens)

    assert report.passed, str(report)
    assert report.torch_name == "transformers"
    assert report.limit == 2 * (report.torch_error + np.finfo(np.float32).eps)
    assert [(row.path, row.first_difference, row.ties) for row in report.rows] == [
        ("engine", None, 0),
        ("prefill", None, 0),
        ("decode", None, 0),
    ]
