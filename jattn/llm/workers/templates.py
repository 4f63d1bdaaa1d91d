"""Chat templates in their sandbox; the process bounds their time and memory."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jattn.llm.workers.chat_values import as_template_value, is_none


def compile_template(source: str) -> bytes:
    """Refuses a source that is no template."""
    _compiled(source)
    return b""


def render_template(source: str, messages: Sequence[Any], variables: Mapping[str, Any]) -> bytes:
    """Returns the template's text, lone surrogates included."""
    given = [as_template_value(each) if isinstance(each, Mapping) else each for each in messages]
    try:
        return _compiled(source).render(variables, messages=given).encode("utf-8", "surrogatepass")
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


@functools.lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.tests["none"] = is_none
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: time.strftime(form)}
    return environment.from_string(source)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Not jinja2's: that escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
