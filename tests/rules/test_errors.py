"""Code reads an error's fields and never its text, which is for people."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.syntax import tree_of

ROOT = Path(__file__).parents[2]
#: Errors of other libraries that say in their text alone which one they are: file, and the reason.
FOREIGN = {
    "jattn/bridge/errors.py": "XLA hands on the text of a callback's error, with the key under which that is kept",
    "jattn/llm/processes.py": "jax's client raises one class for a time-out and for a lost coordinator",
    "jattn/pool/checks.py": "JAX raises one class for a buffer that is held elsewhere and for one that is deleted",
}
#: What shortens a text for a person to read and decides nothing.
SHORTENS = {"strip", "rstrip", "splitlines"}


def test_no_code_decides_anything_by_an_errors_text() -> None:
    found = {}
    for package in ("jattn", "torch_core"):
        for path in ROOT.glob(f"{package}/**/*.py"):
            if lines := sorted({*parsing_lines(tree_of(path))}):
                found[path.relative_to(ROOT).as_posix()] = lines

    assert {name: lines for name, lines in found.items() if name not in FOREIGN} == {}
    assert set(FOREIGN) <= set(found), "these no longer parse a text: take them out of the list"


def parsing_lines(tree: ast.AST) -> Iterator[int]:
    """Yields the lines where an exception's text, or what follows from it, is searched, cut or compared."""
    for scope in ast.walk(tree):
        if isinstance(scope, ast.ExceptHandler) and scope.name:
            names = {scope.name}
        elif isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*scope.args.args, *scope.args.kwonlyargs, *scope.args.posonlyargs]
            names = {each.arg for each in arguments if each.annotation and _is_error(each.annotation)}
        else:
            continue
        texts: set[str] = set()
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and _holds_text(node.value, names, texts):
                texts |= {each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)}
        found = (node for node in ast.walk(scope) if names and _parses(node, names, texts))
        yield from (node.lineno for node in found if isinstance(node, ast.expr))


def _is_error(annotation: ast.expr) -> bool:
    words = [each.id if isinstance(each, ast.Name) else "" for each in ast.walk(annotation)]
    return any(word.endswith(("Error", "Exception", "InvalidInput", "Unsupported")) for word in words)


def _holds_text(node: ast.expr, errors: set[str], texts: set[str]) -> bool:
    """Returns whether an expression is str(error), error.args, an f-string of one, or a part of such a text."""
    if isinstance(node, ast.Name):
        return node.id in texts
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
        return any(isinstance(each, ast.Name) and each.id in errors for each in node.args)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SHORTENS:
        return _holds_text(node.func.value, errors, texts)
    if isinstance(node, ast.Subscript):
        return _holds_text(node.value, errors, texts)
    if isinstance(node, ast.JoinedStr):
        values = [each.value for each in node.values if isinstance(each, ast.FormattedValue)]
        return len(values) == len(node.values) and any(isinstance(v, ast.Name) and v.id in errors for v in values)
    if isinstance(node, ast.Attribute) and node.attr == "args":
        return isinstance(node.value, ast.Name) and node.value.id in errors
    return False


def _parses(node: ast.AST, errors: set[str], texts: set[str]) -> bool:
    if isinstance(node, ast.Compare):
        return any(_holds_text(each, errors, texts) for each in (node.left, *node.comparators))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if _holds_text(node.func.value, errors, texts) and node.func.attr not in SHORTENS:
        return True
    # A pattern's method, or re's function.
    searches = node.func.attr in ("match", "search", "fullmatch", "findall", "finditer", "sub", "split", "find")
    return searches and any(_holds_text(each, errors, texts) for each in node.args)
