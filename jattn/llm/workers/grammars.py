"""Grammars compiled on trial: the process shows that a grammar compiles within bounds, and that a text satisfies it."""

from __future__ import annotations

import functools
import importlib
import json
import time
from typing import Any

# A search over all texts ends soon where it can be complete.
_SEARCH_SECONDS = 0.05


def grammar_source(library: Any, name: str, value: Any, *, flexible: bool) -> str:
    """Returns llguidance's form of a constraint.

    Args:
        library: the module llguidance.
        name: field of `StructuredOutputsParams` that holds the constraint.
        value: value of the field; a schema is text.
        flexible: whitespace may come between the parts of JSON.
    """
    matcher = library.LLMatcher
    if name == "regex":
        return matcher.grammar_from_regex(value)
    if name == "choice":
        # A quoted string of Lark has JSON's escapes.
        return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
    if name == "grammar":
        return matcher.grammar_from_lark(value)
    schema = '{"type": "object"}' if name == "json_object" else value
    return matcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": flexible})


def started_matcher(library: Any, tokens: Any, source: str) -> Any:
    """Returns llguidance's matcher of a grammar whose first mask exists.

    Raises:
        ValueError: the grammar does not compile, or grows too large before the first token.
    """
    matcher = library.LLMatcher(tokens, source, log_level=0)
    if not matcher.get_error():
        matcher.compute_bitmask()
    if error := matcher.get_error():
        raise ValueError(error.partition("\n<state>")[0].strip())
    return matcher


def try_grammar(name: str, value: Any, flexible: bool) -> bytes:
    """Compiles a grammar over the 256 bytes as tokens; refuses one that no text satisfies, where a search finds that.

    Bounds that depend on a vocabulary are the library's own: its limits count the work of each mask.
    """
    library: Any = importlib.import_module("llguidance")
    tokens = _byte_tokens()
    matcher = started_matcher(library, tokens, grammar_source(library, name, value, flexible=flexible))
    if flexible and name in ("json", "json_object"):
        # Whitespace gives every text endless forms. Without it, the same values remain.
        matcher = started_matcher(library, tokens, grammar_source(library, name, value, flexible=False))
    if not _may_end(matcher):
        raise ValueError("no text satisfies it: every beginning leads to a place where nothing may follow")
    return b""


def _may_end(matcher: Any) -> bool:
    """Returns False if every text leads to a dead end; True also where the search takes too long."""
    paths: list[tuple[Any, list[int]]] = []
    end = time.process_time() + _SEARCH_SECONDS
    while time.process_time() < end:
        matcher.consume_tokens(matcher.compute_ff_tokens())
        if matcher.is_accepting():
            return True
        paths.append((matcher, _allowed(matcher)))
        while not paths[-1][1]:
            paths.pop()
            if not paths:
                return False
        last, allowed = paths[-1]
        matcher = last.deep_copy()
        matcher.consume_token(allowed.pop())
    return True


def _allowed(matcher: Any) -> list[int]:
    """Returns the bytes that may follow; the last ones are the likeliest to end a text."""
    # A place where nothing may follow is an error, which a matcher keeps.
    asked = matcher.deep_copy()
    mask = int.from_bytes(asked.compute_bitmask(), "little")
    if asked.is_error():
        return [byte for byte in range(256) if matcher.validate_tokens([byte])]
    return sorted((byte for byte in range(256) if mask >> byte & 1), key=b',0"]}'.find)


@functools.cache
def _byte_tokens() -> Any:
    return importlib.import_module("llguidance").LLTokenizer("byte")
