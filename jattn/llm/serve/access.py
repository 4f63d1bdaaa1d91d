"""Each HTTP request gets an id, which its answer carries, and one line of JSON in the log."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from typing import Any

#: At level INFO; the frequent requests of probes (/health, /ready, /metrics) at DEBUG.
log = logging.getLogger("jattn.llm.serve.access")

_PROBES = ("/health", "/ready", "/metrics")
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_HEADER = b"x-request-id"


class AccessLog:
    """ASGI middleware. A client's own X-Request-Id is kept if it is 1 to 128 letters, digits, or any of `_.:-`.

    The application finds the id in `scope["state"]["request_id"]` and adds further fields of the line there, under
    "log". No line has prompts, answers or keys.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, is_whole = time.monotonic(), 0, False
        request_id = _given_id(scope) or uuid.uuid4().hex
        more: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, log=more)

        async def send_and_note(message: Any) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                message = message | {"headers": [*message.get("headers", ()), (_HEADER, request_id.encode())]}
            elif message["type"] == "http.response.body":
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            line = {
                "time": round(time.time(), 3),
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "whole": is_whole,
                "seconds": round(time.monotonic() - started, 4),
                **more,
            }
            log.log(logging.DEBUG if scope["path"] in _PROBES else logging.INFO, json.dumps(line))


def _given_id(scope: Any) -> str | None:
    given = next((value for name, value in scope["headers"] if name == _HEADER), b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else None
