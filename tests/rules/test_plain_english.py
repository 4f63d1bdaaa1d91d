"""Pages and public docstrings use plain English: some words stand for a noun that the field has."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.syntax import tree_of

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/**/*.md", "torch_core/**/*.md", "jattn/**/*.md")
PAGES = sorted(path for place in PLACES for path in ROOT.glob(place))
SOURCES = sorted(path for package in ("jattn", "torch_core") for path in (ROOT / package).rglob("*.py"))

# How often a word may stand in 10,000 words.
LIMITS = {
    "what": 15.0,
    "whoever": 0.0,
    "nobody": 0.0,
    "anew": 0.0,
    "beside": 0.0,
    "so many": 0.0,
    "makes of": 0.0,
}
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


def prose_of_page(text: str) -> str:
    """The page without its code; lines keep their numbers."""
    without_blocks = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", lambda code: "\n" * code[0].count("\n"), without_blocks)


def public_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The first line's number and the text of each docstring of a module, or of a public class or function."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if not isinstance(node, ast.Module) and node.name.startswith("_"):
            continue
        text = ast.get_docstring(node, clean=False)
        if text is not None:
            yield node.body[0].lineno, prose_of_page(text)


@functools.cache
def texts() -> tuple[tuple[Path, int, str], ...]:
    """Each page and each public docstring: its file, the number of its first line, its prose."""
    pages = [(page, 1, prose_of_page(page.read_text())) for page in PAGES]
    trees = ((source, tree_of(source)) for source in SOURCES)
    return (*pages, *((source, line, text) for source, tree in trees for line, text in public_docstrings(tree)))


def found_in(text: str, phrase: str) -> list[int]:
    """The lines, counted from 0, in which a phrase begins; it may be broken over two lines."""
    pattern = r"\b" + r"\s+".join(map(re.escape, phrase.split())) + r"\b"
    return [text.count("\n", 0, match.start()) for match in re.finditer(pattern, text, re.IGNORECASE)]


@pytest.mark.parametrize("phrase", LIMITS)
def test_a_word_that_hides_a_noun_is_rare(phrase: str) -> None:
    places = [
        f"{path.relative_to(ROOT)}:{first + line}" for path, first, text in texts() for line in found_in(text, phrase)
    ]
    words = sum(len(WORD.findall(text)) for _, _, text in texts())
    most = Counter(place.split(":")[0] for place in places).most_common(10)

    rate = 10_000 * len(places) / words

    assert rate <= LIMITS[phrase], f"{phrase!r}: {rate:.1f} in 10,000 of {words} words; most in {most}; all: {places}"


def test_code_does_not_count_and_lines_keep_their_numbers() -> None:
    text = prose_of_page("```\nwhat\n```\n`what` and what\nmakes\nof\n")

    assert found_in(text, "what") == [3]
    assert found_in(text, "makes of") == [4]


def test_private_docstrings_do_not_count() -> None:
    tree = ast.parse('"""A."""\n\ndef _f():\n    """B."""\n\nclass C:\n    def d(self):\n        """E."""\n')

    assert [text for _, text in public_docstrings(tree)] == ["A.", "E."]
