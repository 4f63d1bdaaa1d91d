"""An extension of griffe: functions of ops have the signature and the docstring that Python sees, not the source's.

Ops are made from call objects (`torch_core/launch/public.py`): their source does not name all arguments.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Replaces what source code cannot say of the public functions of the packages' ops."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Spells a docstring's sections as griffe reads them."""
        if obj.docstring is not None:
            obj.docstring.value = _text_of(obj.docstring.value)

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        if not mod.path.startswith(("jattn.ops.", "torch_core.")):
            return
        for name, member in list(mod.members.items()):
            if member.is_alias or name.startswith("_") or not (member.is_attribute or member.is_function):
                continue
            if member.is_function and not any("documented" in str(each.value) for each in member.decorators):
                continue
            if member.is_attribute and "operation(" not in str(member.value):
                continue
            mod.set_member(name, _function(getattr(import_module(mod.path), name), name, member))


def _function(function: Any, name: str, source: Any) -> griffe.Function:
    parameters = [
        griffe.Parameter(
            each.name,
            annotation=None if each.annotation is each.empty else _text(each.annotation),
            kind=getattr(griffe.ParameterKind, each.kind.name.lower()),
            default=None if each.default is each.empty else repr(each.default),
        )
        for each in inspect.signature(function).parameters.values()
    ]
    docstring = griffe.Docstring(_text_of(inspect.getdoc(function) or ""), lineno=source.lineno, parser="google")
    return griffe.Function(
        name,
        lineno=source.lineno,
        endlineno=source.endlineno,
        parameters=griffe.Parameters(*parameters),
        returns=_text(inspect.signature(function).return_annotation),
        docstring=docstring,
    )


def _text_of(docstring: str) -> str:
    # One line for the names of an entry that describes many arguments; "Example" would be plain text.
    names = re.compile(r"^( *)((?:\w+,\s+)+\w+)(?=:)", re.MULTILINE)
    docstring = names.sub(lambda entry: entry[1] + " ".join(entry[2].split()), docstring)
    return re.sub(r"^( *)Example:$", r"\1Examples:", docstring, flags=re.MULTILINE)


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
