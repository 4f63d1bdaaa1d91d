"""Chat templates: a conversation becomes a prompt, by a program that came with a model and is not trusted."""

from __future__ import annotations

import functools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torch_core.errors import InvalidInput

__all__ = ["ChatTemplate"]

_MAX_SOURCE = 1 << 17
_MAX_PROMPT = 1 << 24
_MAX_STEPS = 1 << 18
# Of what one operation may make: the product of its two largest operands' sizes.
_MAX_PRODUCT = 1 << 26
_MAX_POWER = 64
# A number above it may be a width or a count.
_MAX_COUNT = 1 << 10
# A width within a format.
_WIDTH = re.compile(r"[%:]\D{0,3}(\d{5,20})")


class ChatTemplate:
    """A Jinja template as transformers has them: `messages`, `tools`, `add_generation_prompt`, `bos_token`, ...

    It runs in jinja2's immutable sandbox: no attribute of Python's own objects, no change of what it was given. What it
    may do is limited in length of the source, of the text, and in evaluated steps, so that it ends.

    Args:
        source: of the template.
        special_tokens: names (bos_token, eos_token, ...) to their texts.

    Raises:
        InvalidInput: the source is too long or does not compile.

    Example:
        >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}")
        >>> template.render([{"role": "user", "content": "Hello"}])
        'user: Hello\\n'
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        if not isinstance(source, str) or len(source) > _MAX_SOURCE:
            raise InvalidInput(f"chat_template must be text of {_MAX_SOURCE} characters at most.")
        self._special_tokens = dict(special_tokens or {})
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidInput(f"chat_template does not compile: {error}.") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Returns the prompt.

        Args:
            messages: mappings with role and content.
            tools: JSON schemas of functions, for templates that know of them.
            add_generation_prompt: end where the assistant's answer begins.
            **variables: of the template.

        Raises:
            InvalidInput: the template fails, refuses the conversation, or goes beyond a limit.
        """
        names = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        parts: list[str] = []
        length = 0
        _steps.left = _MAX_STEPS
        try:
            for part in self._template.generate(self._special_tokens | variables | names):
                length += len(part)
                if length > _MAX_PROMPT:
                    raise InvalidInput(f"the chat template's text goes beyond {_MAX_PROMPT} characters.")
                parts.append(part)
        except InvalidInput:
            raise
        except Exception as error:
            # A template is a program: it can raise what it likes, a TypeError of Python's own included.
            raise InvalidInput(f"the chat template fails on these messages: {type(error).__name__}: {error}.") from None
        return "".join(parts)


_steps = threading.local()


def _count() -> None:
    _steps.left -= 1
    if _steps.left < 0:
        raise InvalidInput(f"the chat template takes more than {_MAX_STEPS} steps.")


class _Generation(Extension):
    """`{% generation %}` marks, for training, what the assistant says; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with transformers' helpers, which counts what a template does and bounds what that makes."""

    # These go through call_binop.
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, applied in list(self.filters.items()):
            self.filters[name] = _bounded(applied)
        self.filters |= {"tojson": _to_json, "jattn_turns": _counted, "jattn_part": _part}
        self.globals |= {"raise_exception": _raise, "strftime_now": lambda form: time.strftime(form)}

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        # What the sandbox has no hook for: turns of loops, and `~`.
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "jattn_turns", [], [], None, None)
        for joined in tree.find_all(jinja2.nodes.Concat):
            joined.nodes = [jinja2.nodes.Filter(each, "jattn_part", [], [], None, None) for each in joined.nodes]
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        _count()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _count()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _, called, *values = args
        # The sandbox has str.format wrapped.
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        _check_size([owner, *values, *kwargs.values()])
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_size([left, right])
        if operator == "**" and not (isinstance(right, int) and 0 <= right <= _MAX_POWER):
            raise InvalidInput(f"the chat template raises to a power that is not from 0 to {_MAX_POWER}.")
        return super().call_binop(context, operator, left, right)


def _bounded(applied: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(applied)
    def check_and_apply(*args: Any, **kwargs: Any) -> Any:
        _check_size([*args, *kwargs.values()])
        return applied(*args, **kwargs)

    return check_and_apply


def _check_size(values: Sequence[Any]) -> None:
    """Refuses what could make of these values more than a prompt may have: repeat, pad, replace, format, raise."""
    _count()
    sizes = [len(each) for each in values if isinstance(each, (str, list, tuple))]
    sizes += [abs(each) for each in values if isinstance(each, int) and abs(each) > _MAX_COUNT]
    sizes += [int(digits) for each in values if isinstance(each, str) for digits in _WIDTH.findall(each)]
    if math.prod(sorted(sizes)[-2:]) > _MAX_PRODUCT:
        raise InvalidInput(f"the chat template makes values of more than {_MAX_PRODUCT} elements.")


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _count()
        yield value


def _part(value: Any) -> Any:
    if len(str(value)) > _MAX_PROMPT:
        raise InvalidInput(f"the chat template's text goes beyond {_MAX_PROMPT} characters.")
    return value


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Not jinja2's: that escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
