"""Text that arrives in pieces, and functions that wait for as much of it as they need."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")
#: A function that yields where it needs more text, and returns a value.
Wait: TypeAlias = Generator[None, None, _T]

_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_SCALAR_END = re.compile(r"[\s,;:{}\[\]()<\"]")
_MOST_DEPTH = 200


class Malformed(Exception):
    """The text at a place is no part of a call."""


class Source:
    """The text, and the place up to which it was read.

    The functions look at characters in their order, and never at the size of a piece.

    Attributes:
        text: all text so far.
        at: place of the next character.
    """

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self._ended = False

    def feed(self, text: str, ended: bool) -> None:
        """Adds text."""
        self.text += text
        self._ended = self._ended or ended

    def sees(self, characters: str) -> Wait[bool]:
        """Returns whether one of some characters comes next; not at the end of the text."""
        while self.at >= len(self.text):
            if self._ended:
                return False
            yield
        return self.text[self.at] in characters

    def space(self) -> Wait[None]:
        """Passes over white space."""
        while True:
            while self.at < len(self.text):
                if not self.text[self.at].isspace():
                    return
                self.at += 1
            if self._ended:
                return
            yield

    def takes(self, marker: str) -> Wait[bool]:
        """Passes over a marker if it comes next, and returns whether it does."""
        while not self.text.startswith(marker, self.at):
            if self._ended or not marker.startswith(self.text[self.at : self.at + len(marker)]):
                return False
            yield
        self.at += len(marker)
        return True

    def must(self, marker: str) -> Wait[None]:
        """Passes over a marker.

        Raises:
            Malformed: something else comes next.
        """
        if not (yield from self.takes(marker)):
            raise Malformed

    def until(self, markers: Sequence[str], write: Callable[[str], None]) -> Wait[str | None]:
        """Passes over the first of some markers and returns it; None at the end of the text.

        Args:
            markers: the markers, none of which begins with another one.
            write: receives the text in front, except for an end of it that may become a marker.
        """
        firsts = re.compile("[" + re.escape("".join({marker[0] for marker in markers})) + "]") if markers else None
        longest = max(map(len, markers), default=0)
        while True:
            place = self.at
            while True:
                found = None if firsts is None else firsts.search(self.text, place)
                if found is None:
                    place = len(self.text)
                    break
                place = found.start()
                rest = self.text[place : place + longest]
                marker = next((each for each in markers if rest.startswith(each)), None)
                if marker is not None:
                    self._write(write, place)
                    self.at = place + len(marker)
                    return marker
                if not self._ended and any(each.startswith(rest) for each in markers):
                    break
                place += 1
            self._write(write, place)
            if self._ended:
                return None
            yield

    def up_to(self, marker: str, most: int) -> Wait[str]:
        """Returns the text in front of a marker, which comes next then.

        Raises:
            Malformed: there is none within `most` characters.
        """
        while True:
            place = self.text.find(marker, self.at, self.at + most + len(marker))
            if place >= 0:
                found, self.at = self.text[self.at : place], place
                return found
            if self._ended or len(self.text) >= self.at + most + len(marker):
                raise Malformed
            yield

    def word(self) -> Wait[str]:
        """Returns the letters, digits and any of _.- that come next, from a letter or _ on."""
        start = self.at
        if (yield from self.sees("0123456789.-")):
            return ""
        while True:
            while self.at < len(self.text):
                if not (self.text[self.at].isalnum() or self.text[self.at] in "_.-"):
                    return self.text[start : self.at]
                self.at += 1
            if self._ended:
                return self.text[start:]
            yield

    def value(self, write: Callable[[str], None], *, python: bool = False) -> Wait[None]:
        """Passes over a JSON value, or over brackets of Python, and writes it as it comes.

        It finds the end by brackets and quotes alone.

        Raises:
            Malformed: there is no value, brackets do not match or are too deep, or the text ends.
        """
        if not (yield from self.sees('"{[(')):
            yield from self._scalar(write)
            return
        closers, quote, escaped = list[str](), "", False
        while True:
            start = self.at
            while self.at < len(self.text):
                found = _next_of(quote, python).search(self.text, self.at) if not escaped else None
                if escaped:
                    self.at, escaped = self.at + 1, False
                    continue
                if found is None:
                    self.at = len(self.text)
                    break
                self.at, character = found.start(), found[0]
                if quote:
                    escaped, quote = character == "\\", "" if character == quote else quote
                elif character in "\"'":
                    quote = character
                elif character in _CLOSERS and len(closers) < _MOST_DEPTH:
                    closers.append(_CLOSERS[character])
                elif not closers or closers.pop() != character:
                    write(self.text[start : self.at])
                    raise Malformed
                self.at += 1
                if not closers and not quote:
                    write(self.text[start : self.at])
                    return
            write(self.text[start : self.at])
            if self._ended:
                raise Malformed
            yield

    def _scalar(self, write: Callable[[str], None]) -> Wait[None]:
        while (found := _SCALAR_END.search(self.text, self.at)) is None:
            if self._ended:
                raise Malformed
            yield
        if found.start() == self.at:
            raise Malformed
        start, self.at = self.at, found.start()
        write(self.text[start : self.at])

    def _write(self, write: Callable[[str], None], end: int) -> None:
        start, self.at = self.at, end
        if start < end:
            write(self.text[start:end])


@functools.cache
def _next_of(quote: str, python: bool) -> re.Pattern[str]:
    """Returns the characters that count within a string, or outside of all strings."""
    if quote:
        return re.compile(f"[{quote}\\\\]")
    return re.compile(r"[{}\[\]()\"']" if python else r"[{}\[\]\"]")
