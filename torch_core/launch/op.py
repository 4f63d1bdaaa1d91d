"""Op: all that belongs to one operation, in one record that the operation's room registers.

A room registers its ops in its `op.py`, which its `__init__` imports: a call can only be made by a room that has been
imported, so the registry knows every call that it is asked about. Functions are given by name, "module:function" as in
entry points, and loaded when they are first needed: torch when tensors are computed, Triton when a launch is planned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from torch_core.base.errors import InvalidInput
from torch_core.launch.call import Call


class Served(NamedTuple):
    """A row of the table of supported features.

    Attributes:
        feature: the feature; ops that share a row give it the same one.
        text: for each implementation the part that it serves, for people.
        limit: takes a call and an implementation and returns the part of the call that the implementation does not
            serve, or None.
    """

    feature: str
    text: dict[str, str]
    limit: Callable[[Any, str], str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation.

    Attributes:
        call: the class of its calls.
        reference: its specification in plain torch, which every implementation is tested against.
        cpu: the function that computes a call of CPU tensors and returns its results by name.
        plan: the function from a call of specs and `DeviceLimits` to an `OperationPlan`.
        serves: its rows of the table of supported features; the first exceeded limit is reported.
    """

    call: type[Call[Any]]
    reference: str
    cpu: str
    plan: str
    serves: tuple[Served, ...] = ()


_OPS: dict[type[Call[Any]], Op] = {}


def register(*ops: Op) -> None:
    """Makes ops known to `torch_core.launch`."""
    _OPS.update({op.call: op for op in ops})


def registered_ops() -> tuple[Op, ...]:
    """Returns the ops of the rooms that have been imported, in the order in which they were registered."""
    return tuple(_OPS.values())


def op_of(call: Call[Any]) -> Op:
    """Returns the op of a call.

    Raises:
        InvalidInput: no op is registered for it.
    """
    op = _OPS.get(type(call))
    if op is None:
        wanted = "register one in its room's op.py"
        raise InvalidInput("call", f"is a {type(call).__name__}, which is not the call of an op", wanted)
    return op


@functools.cache
def loaded(name: str) -> Callable[..., Any]:
    """Returns the function "module:function"; its module is imported by the first call."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
