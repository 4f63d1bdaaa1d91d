"""Connections over plain sockets: slow clients, half-closed ones, and what is no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from jattn.llm.serve.connection import TimeLimits, uvicorn_options
from jattn.llm.serve.unread import UnreadBodies

LIMITS = TimeLimits(head_seconds=0.2, body_seconds=0.2, idle_seconds=0.2, unread_seconds=0.2)
PATIENT = TimeLimits()
MOST_BYTES = 1 << 20
GET = b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /%s HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
EVENT = b"data: 1\n\n"
CHUNKED = b"POST /%s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class App:
    """An application whose paths read, wait, stream without end, send one event and wait, or refuse before the body."""

    def __init__(self) -> None:
        self.waits, self.may_answer, self.is_gone = threading.Event(), threading.Event(), threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, body, length = 200, b"", 0
        if scope["path"] == "/refuse":
            status = 413
        else:
            while (message := await receive())["type"] == "http.request":
                length += len(message["body"])
                if not message["more_body"]:
                    break
            else:
                self.is_gone.set()
                return
        path = scope["path"]
        if path == "/events":
            scope["state"]["is_event_stream"] = True
            await send({"type": "http.response.start", "status": status})
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        if path in ("/wait", "/events"):
            self.waits.set()
            gone = asyncio.ensure_future(receive())
            answer = asyncio.ensure_future(asyncio.to_thread(self.may_answer.wait, 60))
            await asyncio.wait((gone, answer), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.is_gone.set()
                self.may_answer.set()
                return
            gone.cancel()
        body = b"%d bytes" % length
        headers = [] if path == "/stream" else [(b"content-length", b"%d" % len(body))]
        if path != "/events":
            await send({"type": "http.response.start", "status": status, "headers": headers})
        if path == "/stream":
            gone = asyncio.ensure_future(receive())
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})
                await asyncio.sleep(0)
            self.is_gone.set()
        await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def serving(limits: TimeLimits) -> Iterator[tuple[App, int]]:
    app, listener = App(), socket.create_server(("127.0.0.1", 0))
    options: dict[str, Any] = {"log_config": None, "lifespan": "off", **uvicorn_options(limits)}
    server = uvicorn.Server(uvicorn.Config(UnreadBodies(app, MOST_BYTES), **options))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield app, listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.fixture(scope="module")
def impatient() -> Iterator[tuple[App, int]]:
    with serving(LIMITS) as served:
        yield served


@pytest.fixture(scope="module")
def patient() -> Iterator[tuple[App, int]]:
    with serving(PATIENT) as served:
        yield served


@pytest.fixture(autouse=True)
def _events_of_one_test(request: pytest.FixtureRequest) -> None:
    for name in ("impatient", "patient"):
        if name in request.fixturenames:
            app, _ = request.getfixturevalue(name)
            for event in (app.waits, app.may_answer, app.is_gone):
                event.clear()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def rest_of(client: socket.socket) -> bytes:
    """Returns all that comes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := client.recv(1 << 16):
            found += data
    return found


def answer_of(client: socket.socket) -> bytes:
    return received_until(client, b"bytes")


def received_until(client: socket.socket, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        data = client.recv(1 << 16)
        if not data:
            raise ConnectionError(f"the server closed the connection after {found!r}")
        found += data
    return found


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /ec", GET[:-2], POST % b"echo", POST % b"echo" + b"12345", CHUNKED % b"echo" + b"5\r\n12345\r\n"],
    ids=["nothing", "half a line", "half a head", "no body", "half a body", "half a chunked body"],
)
def test_a_client_that_stops_sending_is_dropped(impatient, sent) -> None:
    with connected(impatient[1]) as client, contextlib.suppress(ConnectionError):
        client.sendall(sent)

        assert rest_of(client) == b""


@pytest.mark.parametrize("sent", [b"", b"GET /ec"], ids=["idle", "half a head"])
def test_a_client_that_asks_no_further_is_dropped(impatient, sent) -> None:
    # On a busy machine this client may be too slow for its first answer, too.
    for _ in range(20):
        with connected(impatient[1]) as client, contextlib.suppress(ConnectionError):
            client.sendall(GET)
            answer_of(client)
            client.sendall(sent)
            assert rest_of(client) == b""
            return
    pytest.fail("no request was answered")


def test_a_client_that_does_not_read_its_stream_is_dropped() -> None:
    with serving(TimeLimits(unread_seconds=0.2)) as (app, port), connected(port) as client:
        client.sendall(GET.replace(b"echo", b"stream"))

        assert app.is_gone.wait(60)


@pytest.mark.parametrize("first", [b"", GET], ids=["first", "second"])
def test_a_half_closed_client_gets_its_answer(patient, first) -> None:
    app, port = patient
    with connected(port) as client:
        if first:
            client.sendall(first)
            answer_of(client)
        client.sendall(POST % b"wait" + b"1234567890")
        assert app.waits.wait(60)
        client.shutdown(socket.SHUT_WR)
        # The server has seen the end.
        assert client.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        app.may_answer.set()

        assert rest_of(client).endswith(b"10 bytes")


def test_requests_that_came_before_the_end_are_all_answered(patient) -> None:
    with connected(patient[1]) as client:
        client.sendall(GET * 3)
        client.shutdown(socket.SHUT_WR)

        assert rest_of(client).count(b"0 bytes") == 3


def test_a_client_that_is_gone_is_noticed_while_its_answer_is_made(patient) -> None:
    app, port = patient
    with connected(port) as client:
        client.sendall(POST % b"wait" + b"1234567890")
        assert app.waits.wait(60)

    assert app.is_gone.wait(60)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_goes_between_two_events_is_noticed(patient, version) -> None:
    app, port = patient
    with connected(port) as client:
        client.sendall(GET.replace(b"echo", b"events").replace(b"1.1", version))
        # All of it: an end with unread bytes would be a reset, which the server sees at once.
        received_until(client, EVENT if version == b"1.0" else EVENT + b"\r\n")

    assert app.is_gone.wait(60)


def test_a_half_closed_client_gets_the_rest_of_its_events(patient) -> None:
    app, port = patient
    with connected(port) as client:
        client.sendall(GET.replace(b"echo", b"events"))
        received_until(client, EVENT + b"\r\n")
        client.shutdown(socket.SHUT_WR)
        # Chunks of a stream begin with their length.
        received_until(client, b"b\r\n: waiting\n\n\r\n")
        app.may_answer.set()

        assert rest_of(client).endswith(b"0 bytes\r\n0\r\n\r\n")


def test_a_long_body_is_refused_before_it_has_come(patient) -> None:
    piece, sent, answers = b"10000\r\n" + b"x" * 0x10000 + b"\r\n", 0, []
    with connected(patient[1]) as client:
        reader = threading.Thread(target=lambda: answers.append(rest_of(client)))
        reader.start()
        client.sendall(CHUNKED % b"refuse")
        with contextlib.suppress(ConnectionError):
            for _ in range(1024):
                client.sendall(piece)
                sent += len(piece)
        reader.join()

    assert answers[0].startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answers[0]
    # The rest of it is what the sockets hold.
    assert sent < 32 << 20


def test_after_the_refusal_of_a_short_body_the_connection_serves_on(patient) -> None:
    with connected(patient[1]) as client:
        client.sendall(POST % b"refuse" + b"1234567890")
        assert answer_of(client).startswith(b"HTTP/1.1 413 ")
        client.sendall(GET)

        assert answer_of(client).endswith(b"0 bytes")


def malformed(choose: random.Random) -> bytes:
    """Returns a request with some bytes replaced, dropped or added."""
    sent = bytearray(
        choose.choice([GET, POST % b"echo" + b"1234567890", CHUNKED % b"wait" + b"5\r\n12345\r\n0\r\n\r\n"])
    )
    for _ in range(choose.randint(1, 6)):
        at = choose.randrange(len(sent))
        sent[at : at + choose.randint(0, 3)] = choose.randbytes(choose.randint(0, 4))
    return bytes(sent)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * (1 << 17) + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        CHUNKED % b"echo" + b"zz\r\n",
    ],
)
def test_what_is_no_request_is_answered_400(patient, sent, caplog) -> None:
    with connected(patient[1]) as client:
        client.sendall(sent)

        assert rest_of(client).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


@pytest.mark.parametrize(
    ("sent", "then"),
    [(GET, b"\x00\r\n\r\n"), (GET.replace(b"echo", b"stream"), b"\x00\r\n\r\n"), (CHUNKED % b"refuse", b"zz\r\n")],
    ids=["answered", "streamed", "refused"],
)
def test_what_is_no_request_during_or_after_an_answer_leaves_no_traceback(patient, sent, then, caplog) -> None:
    with connected(patient[1]) as client:
        client.sendall(sent)
        assert client.recv(8)
        client.sendall(then)
        if b"stream" not in sent:
            rest_of(client)
    with connected(patient[1]) as client:
        client.sendall(GET)
        answer_of(client)

    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


def test_malformed_requests_of_any_kind_leave_no_traceback(patient, seed, caplog) -> None:
    choose = random.Random(seed)
    app, port = patient
    app.may_answer.set()
    for _ in range(400):
        with connected(port) as client:
            client.sendall(malformed(choose))
    with connected(port) as client:
        client.sendall(GET)
        answer_of(client)

    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


@pytest.mark.parametrize("name", ["head_seconds", "body_seconds", "idle_seconds", "unread_seconds"])
def test_a_limit_that_is_no_time_is_refused(name) -> None:
    with pytest.raises(ValueError, match=f"^{name} is 0; it must be above 0"):
        TimeLimits(**{name: 0})
