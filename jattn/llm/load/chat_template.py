"""Chat templates: a conversation becomes a prompt, by a program that came with a model and is not trusted."""

from __future__ import annotations

import functools
import itertools
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
from jinja2.visitor import NodeTransformer

from jattn.llm.load.chat_values import as_template_value, is_none
from torch_core.base.errors import InvalidInput

_MAX_SOURCE = 1 << 17
_MAX_PROMPT = 1 << 24
_MAX_STEPS = 1 << 18
# Limit for the result of one operation: the product of its two largest operands' sizes.
_MAX_PRODUCT = 1 << 26
# Of a list, as text, with all that is in it.
_MAX_WEIGHT = 1 << 24
# Bytes that all operations of one text may make together.
_MAX_MADE = 1 << 29
_MAX_INDENT = 64
_MAX_POWER = 64
# A number above it may be a width or a count.
_MAX_COUNT = 1 << 10
# A width within a format.
_WIDTH = re.compile(r"[%:]\D{0,3}(\d{5,20})")


class ChatTemplate:
    """A Jinja template as transformers has them: `messages`, `tools`, `add_generation_prompt`, `bos_token`, ...

    It runs in jinja2's immutable sandbox: it cannot reach attributes of Python's own objects or change its arguments.
    The length of its source, the length of its text and its evaluated steps are limited, so it always ends.

    Args:
        source: source of the template.
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
            raise InvalidInput("chat_template", f"must be text of {_MAX_SOURCE} characters at most")
        self._special_tokens = dict(special_tokens or {})
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidInput("chat_template", f"does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
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
            **variables: variables of the template.

        Raises:
            InvalidInput: the template fails, refuses the conversation, or goes beyond a limit.
        """
        given = [as_template_value(each) if isinstance(each, Mapping) else each for each in messages]
        names = {"messages": given, "tools": tools, "add_generation_prompt": add_generation_prompt}
        _work.begin()
        try:
            return _joined(self._template.generate(self._special_tokens | variables | names))
        except InvalidInput:
            raise
        except Exception as error:
            # A template is a program: it can raise any exception, including Python's TypeError.
            raise InvalidInput(f"the chat template fails on these messages: {type(error).__name__}: {error}.") from None


class _Work(threading.local):
    """The work that the thread's current text has taken so far."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._steps = self._made = 0
        # Lists do not change here. They are kept, so that their ids stay theirs.
        self._weights: dict[int, tuple[Any, int]] = {}

    def step(self) -> None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise InvalidInput(f"the chat template takes more than {_MAX_STEPS} steps.")

    def made(self, value: Any) -> Any:
        """Returns a value that an operation made; refuses one that is too large, or one too many.

        A list that contains another list twice doubles with each line: the cost of printing or comparing it is its
        total size, not its length.
        """
        if isinstance(value, str):
            self._add(len(value))
        elif isinstance(value, list | tuple | dict):
            self._weight(value)
        return value

    def _weight(self, value: Any) -> int:
        if isinstance(value, str):
            return 1 + len(value)
        if not isinstance(value, list | tuple | dict):
            return 1
        if (known := self._weights.get(id(value))) is not None:
            return known[1]
        self._add(8 * len(value))
        parts = itertools.chain.from_iterable(value.items()) if isinstance(value, dict) else value
        weight = 1 + sum(map(self._weight, parts))
        if weight > _MAX_WEIGHT:
            raise InvalidInput(f"the chat template makes lists that are longer as text than {_MAX_WEIGHT} characters.")
        self._weights[id(value)] = value, weight
        return weight

    def _add(self, size: int) -> None:
        self._made += size
        if self._made > _MAX_MADE:
            raise InvalidInput(f"the chat template makes values of more than {_MAX_MADE} bytes in all.")


_work = _Work()


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with transformers' helpers; it counts a template's steps and limits the size of its values."""

    # These go through call_binop.
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["tojson"] = _to_json
        self.tests["none"] = is_none
        for name, applied in list(self.filters.items()):
            self.filters[name] = _bounded(applied, 1 if name == "indent" else _MAX_COUNT)
        self.filters |= {"jattn_turns": _counted, "jattn_part": _part, "jattn_made": _work.made}
        self.globals |= {"raise_exception": _raise, "strftime_now": lambda form: time.strftime(form)}
        # Random words, at length.
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _Hooks().visit(super()._parse(source, name, filename))

    def getattr(self, obj: Any, attribute: str) -> Any:
        _work.step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _work.step()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _, called, *values = args
        # The sandbox has str.format wrapped.
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        least = 1 if getattr(called, "__name__", "") == "expandtabs" else _MAX_COUNT
        _check_size([owner, *values, *kwargs.values()], least)
        return _work.made(super().call(*args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_size([left, right, *(right if operator == "%" and isinstance(right, tuple) else ())])
        if operator == "**" and not (isinstance(right, int) and 0 <= right <= _MAX_POWER):
            raise InvalidInput(f"the chat template raises to a power that is not from 0 to {_MAX_POWER}.")
        if operator == "*" and any(isinstance(each, list | tuple) for each in (left, right)):
            # An element takes the memory of eight characters.
            _check_size([left, right], 1, _MAX_PRODUCT // 8)
        return _work.made(super().call_binop(context, operator, left, right))


class _Hooks(NodeTransformer):
    """Puts filters where the sandbox has no hook: turns of loops, `~`, and lists that a template writes."""

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        node = self.generic_visit(node, *args, **kwargs)
        if isinstance(node, jinja2.nodes.For):
            node.iter = _filtered(node.iter, "jattn_turns")
        elif isinstance(node, jinja2.nodes.Concat):
            node.nodes = [_filtered(each, "jattn_part") for each in node.nodes]
        is_list = isinstance(node, jinja2.nodes.List | jinja2.nodes.Dict) or (
            isinstance(node, jinja2.nodes.Tuple) and node.ctx == "load"
        )
        return _filtered(node, "jattn_made") if is_list or isinstance(node, jinja2.nodes.Concat) else node


def _filtered(node: Any, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _bounded(applied: Callable[..., Any], least: int) -> Callable[..., Any]:
    @functools.wraps(applied)
    def check_and_apply(*args: Any, **kwargs: Any) -> Any:
        _check_size([*args, *kwargs.values()], least)
        return _work.made(applied(*args, **kwargs))

    return check_and_apply


def _check_size(values: Sequence[Any], least: int = _MAX_COUNT, most: int = _MAX_PRODUCT) -> None:
    """Refuses operations whose result could exceed the size of a prompt: repeat, pad, replace, format, power.

    Numbers above `least` may be a count; `most` elements may be in the result.
    """
    _work.step()
    sizes = [len(each) for each in values if isinstance(each, (str, list, tuple))]
    sizes += [abs(each) for each in values if isinstance(each, int) and abs(each) > least]
    sizes += [int(digits) for each in values if isinstance(each, str) for digits in _WIDTH.findall(each)]
    if math.prod(sorted(sizes)[-2:]) > most:
        raise InvalidInput(f"the chat template makes values of more than {most} elements.")


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _work.step()
        yield value


def _part(value: Any) -> Any:
    _joined([str(value)])
    return value


def _joined(parts: Iterable[str]) -> str:
    found, length = [], 0
    for part in parts:
        length += len(part)
        if length > _MAX_PROMPT:
            raise InvalidInput(f"the chat template's text goes beyond {_MAX_PROMPT} characters.")
        found.append(part)
    return "".join(found)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Not jinja2's: that escapes for HTML.
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= _MAX_INDENT):
        raise InvalidInput(f"the chat template indents JSON by a value outside 0 to {_MAX_INDENT}.")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _joined(encoder.iterencode(value))


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
