"""Arguments of calls that are not written as JSON, as JSON text."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

_SPELLED = {"true": "true", "false": "false", "none": "null", "null": "null"}


def python_arguments(text: str) -> str | None:
    """Returns the keyword arguments `(a=1, b=[True])` as a JSON object; None if they are not literals with names."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        return None if None in values else json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def json_of_text(text: str, schema: Any) -> str:
    """Returns the JSON of an argument that came as text: a string, unless its schema has other types."""
    types = set(_types(schema, 0))
    if types and types != {"string"}:
        spelled = _SPELLED.get(text.strip().lower(), text)
        try:
            value = json.loads(spelled)
            if "string" not in types or not isinstance(value, str | int | float) or isinstance(value, bool):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or depth > 4:
        return
    given = schema.get("type")
    yield from (each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str))
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        for each in options if isinstance(options, list) else []:
            yield from _types(each, depth + 1)
    if isinstance(schema.get("$ref"), str):
        # It may be any type: a definition is mostly an object.
        yield "object"


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in ("true", "false", "null"):
            return json.loads(name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError
