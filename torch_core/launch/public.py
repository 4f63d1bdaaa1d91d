"""Public functions of calls: their checks of keywords, their whole signature, and the meaning of each argument.

A public function names its positional arguments and takes the others as `**options: Unpack[SomeOptions[Array]]`, a
TypedDict. Type checkers and editors read that. For `help()` and `inspect.signature`, `documented` writes out the
options with the call's defaults, adds an argument's meaning, shape and dtype from the call's own docstring and
annotations wherever the function's "Args" do not describe it, and the "Raises" of `Call` if the function has none.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from torch_core.base.checks import call_named
from torch_core.launch.call import ArrayField, Call, array_fields

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C")
_F = TypeVar("_F", bound=Callable[..., Any])
_ORDER = ("Args", "Returns", "Raises", "Example")
# Columns of a docstring's text.
_WIDTH = 116


def documented(
    call_class: type[Call[Any]], array: str, also: Mapping[str, str] = MappingProxyType({})
) -> Callable[[_F], _F]:
    """Returns the decorator that completes a public function's signature and docstring from its call.

    Args:
        call_class: the call that the function makes; its docstring and those of its bases have the meanings.
        array: the name of the array type, "Tensor" or "jax.Array".
        also: the meanings of further arguments by name.
    """

    def decorate(function: _F) -> _F:
        signature = _full_signature(function, call_class, array)
        function.__signature__ = signature  # type: ignore[attr-defined]
        if function.__doc__ is not None:  # None under python -OO.
            function.__doc__ = _full_doc(function.__doc__, signature, call_class, also)
        return function

    return decorate


def operation(make_call: Callable[_P, _C], finish: Callable[[_C], _R], name: str, *, returns: str) -> Callable[_P, _R]:
    """Returns the public function of that name: it makes a call of its arguments, runs it and returns the results.

    Args:
        make_call: a documented function.
        finish: function that runs the call.
        name: name of the new function, also in Python's errors about wrong arguments.
        returns: return annotation of the new function.
    """
    signature = inspect.signature(make_call)
    known = frozenset(signature.parameters)

    @functools.wraps(make_call)
    def public(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # The call has fields that are no keywords of the function.
        if not kwargs.keys() <= known:
            unknown = next(key for key in kwargs if key not in known)
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown!r}")
        return finish(call_named(name, make_call, *args, **kwargs))

    public.__name__ = public.__qualname__ = name
    public.__annotations__ = {**public.__annotations__, "return": returns}
    # help() and editors would go on to the wrapped function, which returns a call.
    public.__signature__ = signature.replace(return_annotation=returns)  # pyright: ignore[reportAttributeAccessIssue]
    return public


def _full_signature(function: Callable[..., Any], call_class: type[Call[Any]], array: str) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            parameters.append(parameter)
            continue
        options = _options_of(function, parameter)
        parameters += [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(call_class, name),
                annotation=re.sub(r"\bA\b", array, annotation),
            )
            for name, annotation in options.items()
        ]
    return signature.replace(parameters=parameters)


def _options_of(function: Callable[..., Any], parameter: inspect.Parameter) -> dict[str, str]:
    """Returns the names and annotations of an unpacked TypedDict."""
    (name,) = re.findall(r"^Unpack\[(\w+)\[", str(parameter.annotation))
    annotations = inspect.unwrap(function).__globals__[name].__annotations__
    return {key: getattr(hint, "__forward_arg__", hint) for key, hint in annotations.items()}


def _default(call_class: type[Call[Any]], name: str) -> Any:
    default = call_class.__dataclass_fields__[name].default
    return inspect.Parameter.empty if default is MISSING else default


def _full_doc(doc: str, signature: inspect.Signature, call_class: type[Call[Any]], also: Mapping[str, str]) -> str:
    """Returns a docstring whose "Args" describe every parameter, in order."""
    before, sections = _sections(inspect.cleandoc(doc))
    own = {**also, **_entries(sections.pop("Args", ""))}
    meanings = {name: own.get(name) or _meaning(call_class, name) for name in signature.parameters}
    args = "\n".join(_wrapped(name, meaning) for name, meaning in meanings.items() if meaning)
    sections = {"Raises": _sections(inspect.cleandoc(Call.__doc__ or ""))[1]["Raises"], **sections, "Args": args}
    return "\n\n".join([before, *(f"{name}:\n{sections[name]}" for name in sorted(sections, key=_ORDER.index))])


def _sections(doc: str) -> tuple[str, dict[str, str]]:
    """Returns the text before the first section of a docstring, and the text of each section by its heading."""
    before, *rest = re.split(r"\n+^([A-Z][a-z]+):\n(?=    )", doc, flags=re.MULTILINE)
    return before, dict(zip(rest[::2], (text.rstrip() for text in rest[1::2]), strict=True))


def _entries(section: str) -> dict[str, str]:
    """Returns the texts of "name: text" and "name, name: text" by name."""
    found: dict[str, str] = {}
    for names, text in re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


@functools.cache
def _attributes(call_class: type[Call[Any]]) -> dict[str, str]:
    """Returns the meanings of a call's fields, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed(call_class.__mro__):
        found |= _entries(_sections(inspect.cleandoc(base.__doc__ or ""))[1].get("Attributes", ""))
    return found


def _meaning(call_class: type[Call[Any]], name: str) -> str:
    meaning, field = _attributes(call_class).get(name, ""), array_fields(call_class).get(name)
    return meaning if field is None else f"{_shape(field)}; {meaning}"


def _shape(field: ArrayField) -> str:
    """Returns dtype and shape of a field: "int32[num_seqs]", "float32[1] or a number"."""
    kinds = {kind.rstrip("_") for kind in field.dtypes or ()}
    kind = "" if not kinds else kinds.pop() if len(kinds) == 1 else "float"
    return f"{kind}{field}{' or a number' if field.number else ''}"


def _wrapped(name: str, meaning: str) -> str:
    return textwrap.fill(f"{name}: {meaning}", _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
