"""Grammars that are refused before a request starts: without an end, without a text, too long."""

from __future__ import annotations

import dataclasses

import pytest

from jattn.llm.engine import StructuredOutputsParams
from jattn.llm.engine.request import grammar
from jattn.llm.load import TextTokenizer
from jattn.llm.workers.grammars import try_grammar
from tests.support.tiny_models import byte_tokenizer
from torch_core.base.errors import InvalidInput


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"json": {"allOf": [{"pattern": f"^.*{index}.*$"} for index in range(200)]}}, "^json: the grammar takes"),
        (
            {"json": {"properties": {"ab": {"type": "string"}}, "patternProperties": {"^ab$": {"type": "integer"}},
                      "additionalProperties": False, "minProperties": 1, "type": "object"}},
            r"^json cannot be compiled: no text satisfies it",
        ),
        (
            {"json": {"properties": {"ab": {"type": "string"}}, "patternProperties": {"^a": {"type": "integer"}},
                      "required": ["ab"], "type": "object"}},
            r"^json cannot be compiled: Unsatisfiable schema",
        ),
    ],
    ids=["endless", "no text", "no property"],
)  # fmt: skip
def test_a_grammar_without_an_end_is_refused(monkeypatch, structured, message) -> None:
    monkeypatch.setattr(grammar, "_TRY", dataclasses.replace(grammar._TRY, seconds=0.2))
    compiler = grammar.GrammarCompiler(TextTokenizer(byte_tokenizer()), 257, [0])

    with pytest.raises(InvalidInput, match=message) as error:
        compiler.compile(StructuredOutputsParams(**structured))

    assert error.value.argument == "structured_outputs"


def test_a_grammar_that_was_refused_is_not_compiled_again(monkeypatch) -> None:
    compiler = grammar.GrammarCompiler(TextTokenizer(byte_tokenizer()), 257, [0])
    params = StructuredOutputsParams(json={"type": 5})
    with pytest.raises(InvalidInput, match=r"^json cannot be compiled: "):
        compiler.compile(params)
    monkeypatch.setattr(grammar.GrammarCompiler, "_compiled", lambda *_, **__: pytest.fail("compiled"))

    with pytest.raises(InvalidInput, match=r"^json cannot be compiled: ") as error:
        compiler.compile(params)

    assert error.value.argument == "structured_outputs"


def test_known_grammars_have_a_length_in_all() -> None:
    compiler = grammar.GrammarCompiler(TextTokenizer(byte_tokenizer()), 257, [0])

    for index in range(6):
        compiler.compile(StructuredOutputsParams(choice=[f"{index}", "x" * 100_000]))

    assert len(compiler._known) == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regex", "a{3000}"),
        ("choice", ["x" * 9000]),
        ("grammar", 'start: "(" start ")" | "y"'),
        ("json", '{"type": "array", "items": {"type": "integer"}, "minItems": 1000}'),
        (
            "json",
            '{"type": "object", "properties": {"c": {"items": {"$ref": "#"}, "type": "array"}}, "required": ["c"]}',
        ),
        ("json", "{}"),
    ],
)
def test_a_grammar_whose_shortest_text_is_far_is_not_refused(name, value) -> None:
    assert try_grammar(name, value, True) == b""


def test_choices_have_a_length_in_all() -> None:
    with pytest.raises(InvalidInput, match=r"^choice has 131073 characters; it must have 131072 at most\.$"):
        StructuredOutputsParams(choice=["x" * 65536, "y" * 65537])
