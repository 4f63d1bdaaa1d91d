"""Answers to requests whose body was not read to its end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

# A short rest of a body is read before the answer, so that the connection can be used again.
_SHORT_BYTES, _SHORT_SECONDS = 1 << 16, 0.5
# After the answer: a client that is still sending reads it only if its bytes are taken, and not if it is cut off.
_LINGER_SECONDS = 2.0


class UnreadBodies:
    """ASGI middleware: an answer before the end of a long body is sent at once, and then the connection is closed.

    Args:
        app: the application.
        most_bytes: bytes of the body that are read and dropped after the answer.
    """

    def __init__(self, app: Any, most_bytes: int) -> None:
        self._app, self._most_bytes = app, most_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        is_read = b"transfer-encoding" not in headers and headers.get(b"content-length", b"0") == b"0"
        is_closing = False

        async def receive_and_note() -> Any:
            nonlocal is_read
            message = await receive()
            is_read = is_read or message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def drop(num_bytes: int, seconds: float) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not is_read and num_bytes > 0:
                        num_bytes -= len((await receive_and_note()).get("body", b""))

        async def send_and_close(message: Any) -> None:
            nonlocal is_closing
            if message["type"] == "http.response.start" and not is_read:
                # A client that waits for leave to send has sent nothing.
                if b"expect" not in headers:
                    await drop(_SHORT_BYTES, _SHORT_SECONDS)
                is_closing = not is_read
                if is_closing:
                    message = message | {"headers": [*message.get("headers", ()), (b"connection", b"close")]}
            if is_closing and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send(message | {"more_body": True})
                await drop(self._most_bytes, _LINGER_SECONDS)
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, receive_and_note, send_and_close)
