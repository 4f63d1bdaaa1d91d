"""Reads files before they are mapped, with several threads, which disks need for full speed, in bounded steps."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

_THREADS = 8
_CHUNK, _BUFFER = 16 << 20, 1 << 20
# Data that is read and not used yet stays in the page cache, from which a machine with little memory would drop it
# again.
_MOST_AHEAD = 1 << 30


class FileRange(NamedTuple):
    """Some bytes of a file."""

    path: Path
    offset: int
    size: int


def read_ahead(items: Sequence[Sequence[FileRange]]) -> Iterator[None]:
    """Yields once for each item, in order, when its ranges are in the page cache, and reads the next ones meanwhile.

    Mapped memory is read by page faults, one after the other; reading ahead avoids them. An unreadable file is reported
    when it is mapped.
    """
    with ExitStack() as stack:
        paths = {each.path for item in items for each in item}
        files = {path: stack.enter_context(path.open("rb")) for path in paths}
        threads = stack.enter_context(ThreadPoolExecutor(_THREADS))
        started: deque[tuple[int, list[Future[None]]]] = deque()
        rest = iter(items)

        def read_more() -> None:
            while sum(size for size, _ in started) < _MOST_AHEAD and (item := next(rest, None)) is not None:
                chunks = [
                    threads.submit(_touch, files[range_.path].fileno(), start, range_.offset + range_.size)
                    for range_ in item
                    for start in range(range_.offset, range_.offset + range_.size, _CHUNK)
                ]
                started.append((sum(range_.size for range_ in item), chunks))

        read_more()
        for _ in items:
            for chunk in started.popleft()[1]:
                chunk.result()
            # Before this one is used: the disk would stand still while one larger than the bound is used.
            read_more()
            yield


def _touch(file: int, start: int, end: int) -> None:
    try:
        buffer = bytearray(_BUFFER)
        for offset in range(start, min(start + _CHUNK, end), _BUFFER):
            os.preadv(file, [buffer], offset)
    except OSError:
        return
