"""Every exception that jattn and torch_core raise on purpose, and the text of values in their messages.

A new class is added only if a caller would react differently to it. Code that handles an error reads its fields,
never its text.
"""

from __future__ import annotations

import copy
import itertools
import numbers
import re
from collections.abc import Iterable
from typing import Self, cast, overload

_NOT_GIVEN = object()
_LONGEST_NAME, _LONGEST_TEXT = 160, 80
# Levels of a value that messages shorten.
_MAX_DEPTH = 3


class JattnError(Exception):
    """The base of every error that this project raises on purpose."""


class ArgumentError(JattnError):
    """The base of errors that concern the caller's input; not raised itself.

    The message is built here alone, as "`argument` `problem`; `wanted`." or "`argument` is `value`; `wanted`.".

    Args:
        argument: the argument that is wrong, as a path: "top_p", "prompts[1]", "messages[0].content".
        problem: the predicate of the sentence, such as "has 3 dimensions" or "is missing".
        wanted: the limit and the fix, as a clause without a full stop: "it must be from 1 to 20".
        value: the argument's value; the message shows it, shortened, if there is no `problem`.
        text: whole sentences instead of all these, for an error that concerns no single argument; with `argument`
            for one whose sentence has another subject.

    Attributes:
        argument: None if no single argument is wrong.
        value: None if none was given.
        wanted: None if the problem says all.

    Example:
        >>> str(InvalidInput("prompts", "is empty", "pass at least one"))
        'prompts is empty; pass at least one.'
        >>> error = InvalidInput("prompt[3]", value=-1, wanted="it must be a token id")
        >>> str(error)
        'prompt[3] is -1; it must be a token id.'
        >>> str(error.renamed("prompts[1]"))
        'prompts[1][3] is -1; it must be a token id.'
        >>> str(error.under("line 2"))
        'line 2: prompt[3] is -1; it must be a token id.'
    """

    @overload
    def __init__(self, text: str, /, *, argument: str | None = None) -> None: ...
    @overload
    def __init__(self, argument: str, /, problem: str, wanted: str | None = None, *, value: object = None) -> None: ...
    @overload
    def __init__(self, argument: str, /, *, value: object, wanted: str | None = None) -> None: ...
    @overload
    def __init__(
        self, *, argument: str, problem: str | None = None, wanted: str | None = None, value: object = None
    ) -> None: ...

    def __init__(
        self,
        text: str | None = None,
        problem: str | None = None,
        wanted: str | None = None,
        *,
        argument: str | None = None,
        value: object = _NOT_GIVEN,
    ) -> None:
        if text is not None and not (problem is None and value is _NOT_GIVEN):
            argument, text = text, None
        self.argument = argument
        self.value = None if value is _NOT_GIVEN else value
        self.wanted = wanted
        self._text = text
        self._problem = f"is {shown(value)}" if problem is None else problem
        self._places: tuple[str, ...] = ()
        super().__init__(self._message())

    @property
    def root(self) -> str | None:
        """The first name of `argument`: "prompts" of "prompts[1]"; None if there is no argument."""
        return None if self.argument is None else re.split(r"[.\[ ]", self.argument, maxsplit=1)[0]

    def renamed(self, new: str, *, old: str | None = None) -> Self:
        """Returns the same error with another name at the start of its argument; itself if that is another one.

        An error whose message is a `text` gets the new argument before it, since the text may not name it.

        Args:
            new: the name.
            old: the beginning of the argument that it replaces, a whole path; by default `root`.
        """
        old = old or self.root
        if (
            self.argument is None
            or old is None
            or old == new
            or not f"{self.argument}.".startswith((f"{old}.", f"{old}["))
        ):
            return self
        argument = new + self.argument[len(old) :]
        return self._changed(argument=argument, _places=self._places if self._text is None else (argument,))

    def under(self, place: str) -> Self:
        """Returns the same error with a place before its message, such as a file's name; the argument stays."""
        return self._changed(_places=(place, *self._places))

    def _changed(self, **fields: object) -> Self:
        changed = copy.copy(self)
        vars(changed).update(fields)
        changed.args = (changed._message(),)
        return changed

    def _message(self) -> str:
        text = self._text
        if text is None:
            text = f"{_name(self.argument)} {self._problem}{f'; {self.wanted}' if self.wanted else ''}."
        return "".join(f"{_name(place)}: " for place in self._places) + text


class InvalidInput(ArgumentError, ValueError):
    """The caller passed something that can never be right; no state has changed."""


class EngineAsleep(InvalidInput):
    """The engine released its pool's memory until `wake`; its requests survive, and callers can wait and try again."""


class EngineClosed(InvalidInput):
    """The engine, or what it was given to, was closed; callers can ask another one."""


class OutOfMemory(InvalidInput):
    """A device lacks the memory for what was asked; nothing was allocated.

    Attributes:
        share: of the arrays that were asked for, those that had room; 0 where none was tried.
    """

    share = 0.0


class RequestTooLong(InvalidInput):
    """A request needs more blocks or tokens than the pool or the model can ever give it."""


class Unsupported(ArgumentError, NotImplementedError):
    """A valid request that this build, device or implementation does not serve; the message names an alternative."""


class OutOfBlocks(JattnError, RuntimeError):
    """The pool has too few blocks at the moment; wait, preempt or evict, then try again.

    Attributes:
        needed: blocks that the refused operation asked for.
        free: blocks on the free list when it was refused.
        evictable: cached blocks without a holder that could be evicted, counted apart from `free`.
    """

    def __init__(self, message: str, *, needed: int, free: int, evictable: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free
        self.evictable = evictable


class Overloaded(JattnError, RuntimeError):
    """The processes for templates, grammars and long texts are all busy; try again."""


class CacheCorruption(JattnError, RuntimeError):
    """An invariant of the block allocator does not hold: a bug, or memory that other code wrote.

    Attributes:
        report: one sentence for each broken invariant, with the ids of the blocks involved.
    """

    def __init__(self, message: str, *, report: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.report = report


class PoolLost(JattnError, RuntimeError):
    """A step failed after it had consumed the donated cache arrays; their contents are gone.

    Attributes:
        generation: the generation of the pool that was lost. A rebuilt pool has a higher one.
    """

    def __init__(self, message: str, *, generation: int) -> None:
        super().__init__(message)
        self.generation = generation


def shown(value: object) -> str:
    """Returns a value's text for a message: short, and also for an int that Python refuses to print."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    try:
        # numpy's numbers print as numbers: repr() would say np.int32(5).
        text = str(value) if isinstance(value, numbers.Number) else repr(_beginning(value, _MAX_DEPTH))
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _beginning(value: object, depth: int) -> object:
    """Returns as much of a value as a message shows: repr() of a long list holds every other thread up."""
    if type(value) is str:
        return value[: _LONGEST_TEXT + 1]
    if not depth or type(value) not in (list, tuple, dict):
        return value
    if isinstance(value, dict):
        return {name: _beginning(each, depth - 1) for name, each in itertools.islice(value.items(), _LONGEST_TEXT)}
    first = [_beginning(each, depth - 1) for each in itertools.islice(cast(Iterable[object], value), _LONGEST_TEXT)]
    return first if type(value) is list else tuple(first)


def _name(name: str | None) -> str:
    """Returns the name of an argument or a place, quoted and shortened where a caller made it up."""
    return name if name is not None and len(name) <= _LONGEST_NAME and name.isprintable() else shown(name)
