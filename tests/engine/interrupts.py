"""Raises an exception at a chosen line of the engine, as an allocation that fails would.

Lines are counted while a trace function is set, in the files named here and in this thread only.
"""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import Any, Self

from jattn.llm.engine import Engine

ROOMS = ("/jattn/llm/engine/", "/jattn/pool/", "/torch_core/cache/")


class InterruptAt:
    """Raises `error` at the `line`-th line that runs within the block, once; `place` then says where."""

    def __init__(self, line: int, error: BaseException) -> None:
        self._left = line
        self._error = error
        self.place: str | None = None

    def __enter__(self) -> Self:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        return self._trace if self.place is None and any(room in name for room in ROOMS) else None

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        # `take` has nothing after its last call, so that nothing is raised where it returns.
        if event == "line" and self.place is None and frame.f_code.co_name != "take":
            self._left -= 1
            if self._left <= 0:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                raise self._error
        return self._trace


class InterruptAtReply:
    """Raises KeyboardInterrupt in place of the reply to the next command of an engine's caller, once it is armed."""

    def __init__(self, engine: Engine) -> None:
        self._result_of = engine._thread._result_of
        self.armed = False
        engine._thread._result_of = self.result_of

    def result_of(self, reply: Any) -> Any:
        result = self._result_of(reply)
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        return result
