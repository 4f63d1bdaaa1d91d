"""Connections of uvicorn with limits of time: slow clients are dropped, and half-closed ones get their answers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from torch_core.base.limits import Limits, check_fields

# Seconds between two probes of a half-closed client: the first, and the factor from one to the next.
_FIRST_PROBE, _PROBE_GROWTH = 0.1, 2
# Checks of a connection within its shortest limit.
_CHECKS = 4

_Seconds: TypeAlias = Annotated[float, Limits(above=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """The times after which a server drops a connection.

    Attributes:
        head_seconds: from a request's first byte, or from the connection on, to the end of its head.
        body_seconds: from the end of the head to the end of the body.
        idle_seconds: between an answer and the next request.
        unread_seconds: in which a client reads nothing of an answer that waits for it.

    Raises:
        InvalidInput: one is not above 0.
    """

    head_seconds: _Seconds = 20.0
    body_seconds: _Seconds = 60.0
    idle_seconds: _Seconds = 5.0
    unread_seconds: _Seconds = 60.0

    def __post_init__(self) -> None:
        check_fields(self)


def uvicorn_options(limits: TimeLimits) -> dict[str, Any]:
    """Returns the arguments of `uvicorn.Config` that give its connections these limits; there are no WebSockets."""
    # The keep-alive time is uvicorn's own.
    return {
        "http": functools.partial(_Connection, limits=limits),
        "timeout_keep_alive": limits.idle_seconds,
        "ws": "none",
        "access_log": False,
    }


class _Connection(H11Protocol):
    """uvicorn's protocol of one connection over h11, which limits the length of a head; httptools does not."""

    def __init__(self, *args: Any, limits: TimeLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = {"head": limits.head_seconds, "body": limits.body_seconds, "unread": limits.unread_seconds}
        self._period = min(self._limits.values()) / _CHECKS
        self._is_half_closed = False
        # The phase with its request, since when, and the bytes that the client had not read by then.
        self._phase: tuple[str | None, Any] = (None, None)
        self._since, self._num_unread = 0.0, 0
        self._timer: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._check()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception as error:
            # uvicorn fails to answer 400 if another answer has begun.
            self.logger.debug("a connection sent invalid HTTP during an answer: %s", error)
            self.transport.abort()

    # asyncio keeps the transport if it returns True; uvicorn's returns None.
    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        # A client that sent its request whole may close its sending side and still read.
        cycle = self.cycle
        self._is_half_closed = cycle is not None and not cycle.response_complete and not cycle.more_body
        if self._is_half_closed:
            self._probe(cycle, _FIRST_PROBE)
        return self._is_half_closed

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()

    def resume_writing(self) -> None:
        # The client has read.
        self._since = self.loop.time()
        super().resume_writing()

    def _check(self) -> None:
        """Drops the connection if its phase has taken too long."""
        now, num_unread = self.loop.time(), self.transport.get_write_buffer_size()
        phase = "unread" if num_unread else self._receiving(), self.cycle
        if phase != self._phase or num_unread < self._num_unread:
            self._phase, self._since = phase, now
        self._num_unread = num_unread
        if now - self._since >= self._limits.get(phase[0] or "", float("inf")):
            self.logger.debug("a connection is dropped: %s", phase[0])
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(self._period, self._check)

    def _receiving(self) -> str | None:
        """Returns the part of a request that has begun and not ended."""
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and self.timeout_keep_alive_task is None):
            return "head"
        return "body" if cycle.more_body and not cycle.response_complete else None

    def _probe(self, cycle: Any, seconds: float) -> None:
        """Sends what clients skip, which ends the connection if the client has closed its reading side, too."""
        if cycle.response_complete or self.transport.is_closing():
            return
        if not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.response_started and cycle.scope["state"].get("is_event_stream"):
            self.transport.write(self.conn.send(h11.Data(data=b": waiting\n\n")))
        self.loop.call_later(seconds, self._probe, cycle, seconds * _PROBE_GROWTH)
