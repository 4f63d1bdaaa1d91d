"""The server among bad requests, clients that go away, and too many of them."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import jattn
from jattn.llm.engine import LLM, EngineConfig
from jattn.llm.load import tokenizer as text_tokenizer
from jattn.llm.serve import AsyncLLM
from jattn.llm.serve.app import create_app
from jattn.llm.serve.config import ServeConfig
from jattn.llm.serve.protocol import parse_completion
from jattn.llm.workers.pool import Task
from tests.serve.conftest import KEY, MAX_UNFINISHED, MODEL, wait_for_samples, wait_until_idle
from tests.serve.malformed import BAD_CHATS, BAD_COMPLETIONS, Malformed, drawn
from torch_core.base.errors import Overloaded

HEADERS = {"Authorization": f"Bearer {KEY}"}
LONG = {"prompt": "The", "max_tokens": 240, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def http_client(server):
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=600) as client:
        yield client


def check_refusal(http_client, bad: Malformed) -> None:
    headers = {} if bad.key is None else {"Authorization": f"Bearer {bad.key}"}
    response = http_client.post(bad.path, content=bad.content, headers=headers)
    assert 400 <= response.status_code < 500, (bad, response.text)
    assert bad.status in (None, response.status_code), (bad, response.text)
    error = response.json()["error"]
    assert error["param"] == bad.param, (bad, error)
    assert error["message"]


def check_among_good_ones(server, http_client, malformed: list[Malformed], num_good: int, seed: int) -> None:
    """Sends them in any order, several at a time: the good ones are answered as if they were alone."""
    good = {"prompt": "The list", "max_tokens": 6, "temperature": 0}
    expected = http_client.post("/v1/completions", json=good).json()["choices"][0]["text"]
    work: list[Malformed | None] = [*malformed, *[None] * num_good]
    random.Random(seed).shuffle(work)

    def ask(bad: Malformed | None) -> None:
        if bad is not None:
            check_refusal(http_client, bad)
        else:
            assert http_client.post("/v1/completions", json=good).json()["choices"][0]["text"] == expected

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(ask, work))

    wait_until_idle(server)


def test_every_bad_request_is_refused_by_name_and_good_ones_beside_them_are_answered(server, http_client, seed) -> None:
    by_path = {"/v1/completions": BAD_COMPLETIONS, "/v1/chat/completions": BAD_CHATS}
    malformed = [
        Malformed(path, body if isinstance(body, bytes) else json.dumps(body).encode(), param)
        for path, bodies in by_path.items()
        for body, param in bodies
    ]
    check_among_good_ones(server, http_client, malformed, 12, seed)


@pytest.mark.parametrize(("num_malformed", "num_good"), [(80, 20), pytest.param(2000, 500, marks=pytest.mark.nightly)])
def test_malformed_requests_of_any_kind_disturb_nobody(server, http_client, seed, num_malformed, num_good) -> None:
    choose = random.Random(seed)
    malformed = [drawn(choose) for _ in range(num_malformed)]

    check_among_good_ones(server, http_client, malformed, num_good, seed)


def test_a_body_beyond_the_limit_is_not_read(http_client) -> None:
    response = http_client.post("/v1/completions", content=b" " * (1 << 19))

    assert response.status_code == 413


@pytest.mark.parametrize(
    ("path", "status", "allowed"),
    [("/v1/completions", 405, "POST"), ("/nowhere", 404, None), ("/v1/models/other", 404, None)],
)
def test_what_is_not_served_is_said_in_the_same_form(http_client, path, status, allowed) -> None:
    response = http_client.get(path)

    assert (response.status_code, response.headers.get("Allow")) == (status, allowed)
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health/", "/v1/models/", "/v1/completions/"])
def test_a_slash_behind_a_path_leads_nowhere(http_client, path) -> None:
    response = http_client.get(path, headers={"Host": "elsewhere.example"})

    assert (response.status_code, response.headers.get("location")) == (404, None)


def test_the_server_answers_while_a_long_body_is_read(server, http_client, monkeypatch) -> None:
    begun, answered = threading.Event(), threading.Event()

    def read(*args: Any) -> Any:
        begun.set()
        assert answered.wait(60)
        return parse_completion(*args)

    monkeypatch.setattr("jattn.llm.serve.app.parse_completion", read)
    with ThreadPoolExecutor(1) as threads:
        body = {"prompt": "x", "max_tokens": 1, "metadata": {"a": "x" * 20_000}}
        asked = threads.submit(http_client.post, "/v1/completions", json=body)
        assert begun.wait(60)
        assert httpx.get(f"{server.url}/health").status_code == 200
        answered.set()

    assert asked.result().status_code == 200


@pytest.mark.parametrize("key", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_without_a_key_nothing_is_read(server, key, path) -> None:
    headers = {} if key is None else {"Authorization": key}

    response = httpx.post(f"{server.url}{path}", headers=headers, content=b"{")

    assert response.status_code == 401


def test_tokens_of_text_and_of_a_chat(server, http_client) -> None:
    tokenizer = server.llm.llm.tokenizer

    text = http_client.post("/tokenize", json={"prompt": "The list"}).json()
    chat = http_client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()

    assert text == {"tokens": tokenizer.encode("The list"), "count": len(text["tokens"]), "max_model_len": 256}
    assert chat["tokens"] == tokenizer.encode("user: x\nassistant:", add_special_tokens=False)


def test_a_long_text_becomes_tokens_and_text_again(server, http_client) -> None:
    text = "The list " * 15_000

    found = http_client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()

    assert found["tokens"] == server.llm.llm.tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
    assert http_client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "field", "given"),
    [
        ("/v1/completions", "prompt", "x" * 200_000),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "x" * 200_000}]),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(http_client, monkeypatch, path, field, given) -> None:
    monkeypatch.setattr(text_tokenizer, "_ENCODE", None)

    response = http_client.post(path, json={field: given})

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)


def test_a_client_that_no_process_becomes_free_for_is_told_to_try_again(http_client, monkeypatch) -> None:
    def busy(*_: object, **__: object) -> None:
        raise Overloaded("busy")

    monkeypatch.setattr(Task, "run", busy)

    response = http_client.post("/tokenize", json={"prompt": "x" * 20_000})

    assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
    assert response.headers["retry-after"] == "1"


def test_tokens_become_the_text_again(server, http_client) -> None:
    tokens = http_client.post("/tokenize", json={"prompt": "The list", "add_special_tokens": False}).json()["tokens"]

    assert http_client.post("/detokenize", json={"tokens": tokens, "model": MODEL}).json() == {"prompt": "The list"}
    assert httpx.get(f"{server.url}/version").json() == {"version": jattn.__version__}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "model": "other"}, "model"),
        ("/tokenize", {"prompt": "x", "nothing": 1}, "nothing"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": [1, 99_999]}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(http_client, path, body, param) -> None:
    check_refusal(http_client, Malformed(path, json.dumps(body).encode(), param))


def test_more_ids_than_a_call_takes_are_refused(http_client, monkeypatch) -> None:
    monkeypatch.setattr("jattn.llm.serve.app._MAX_DECODED", 300)

    assert http_client.post("/detokenize", json={"tokens": [1] * 300}).status_code == 200
    check_refusal(http_client, Malformed("/detokenize", json.dumps({"tokens": [1] * 301}).encode(), "tokens"))


def test_health_and_metrics_need_no_key(server, http_client) -> None:
    http_client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "ignore_eos": True})

    metrics = httpx.get(f"{server.url}/metrics").text

    assert httpx.get(f"{server.url}/health").status_code == 200
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values["jattn_generation_tokens_total"]) >= 3
    assert float(values["jattn_time_to_first_token_seconds_count"]) >= 1
    assert 0 <= float(values[f'jattn_kv_cache_usage{{model_name="{MODEL}"}}']) <= 1


def test_a_server_that_compiles_is_alive_and_not_ready(server, monkeypatch) -> None:
    def answers() -> list[tuple[int, str]]:
        return [
            (found.status_code, found.json()["status"])
            for found in (httpx.get(f"{server.url}{path}") for path in ("/health", "/ready"))
        ]

    assert answers() == [(200, "ready"), (200, "ready")]
    monkeypatch.setattr(type(server.llm.llm.engine), "is_ready", False)
    assert answers() == [(200, "warming"), (503, "warming")]


def test_what_only_grows_is_a_counter(server) -> None:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    gauges = {name for name, kind in kinds.items() if kind == "gauge" and not name.endswith("_created")}
    assert gauges == {"jattn_unfinished_samples", "jattn_kv_cache_usage"}
    assert kinds["jattn_prefix_cache_hit_tokens_total"] == kinds["jattn_preemptions_total"] == "counter"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_request(server, stream) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps(LONG | {"stream": stream, "n": 4})
    connection.request("POST", "/v1/completions", body, HEADERS | {"Content-Type": "application/json"})
    if stream:
        assert connection.getresponse().read(10)
    else:
        wait_for_samples(server, 4)

    # Before its 240 tokens are there.
    connection.sock.shutdown(socket.SHUT_RDWR) if connection.sock else None
    connection.close()

    wait_until_idle(server)


@pytest.mark.parametrize("num_streams", [16, pytest.param(500, marks=pytest.mark.nightly)])
def test_streams_whose_clients_go_away_in_any_way_leave_nothing(server, seed, num_streams) -> None:
    body = json.dumps({"prompt": "The", "max_tokens": 12, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    sent = f"{head}Authorization: Bearer {KEY}\r\n\r\n".encode() + body

    def ask(number: int) -> bytes:
        choose = random.Random(seed + number)
        way = choose.choice(["close", "reset", "half", "stay"])
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(sent)
            if way in ("half", "stay"):
                if way == "half":
                    client.shutdown(socket.SHUT_WR)
                with client.makefile("rb") as answer:
                    return answer.read()
            client.recv(choose.choice([1, 400, 4000]))
            if way == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return b"[DONE]"

    with ThreadPoolExecutor(8) as threads:
        assert all(b"[DONE]" in answer for answer in threads.map(ask, range(num_streams)))

    wait_until_idle(server)


def test_beyond_the_limit_clients_are_asked_to_come_back(server, http_client) -> None:
    started = threading.Event()

    def hold() -> None:
        body = LONG | {"n": MAX_UNFINISHED, "stream": True}
        with http_client.stream("POST", "/v1/completions", json=body) as response:
            for _ in response.iter_lines():
                started.set()
                if refused.wait(60):
                    break

    refused = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    assert started.wait(60)
    response = http_client.post("/v1/completions", json={"prompt": "x", "model": MODEL})
    refused.set()
    holder.join()

    assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
    wait_until_idle(server)


def test_requests_that_come_at_once_are_counted_before_they_are_queued(server, http_client, monkeypatch) -> None:
    engine = server.llm.llm.engine
    refused, add = threading.Event(), engine.add
    # Nothing is queued before somebody was refused.
    monkeypatch.setattr(engine, "add", lambda *args, **options: refused.wait(60) and add(*args, **options))

    def ask(_: int) -> int:
        status = http_client.post("/v1/completions", json={"prompt": "x", "n": MAX_UNFINISHED // 2}).status_code
        if status == 429:
            refused.set()
        return status

    with ThreadPoolExecutor(3) as threads:
        statuses = sorted(threads.map(ask, range(3)))

    assert statuses == [200, 200, 429]
    wait_until_idle(server)


def test_a_request_that_is_queued_and_whose_task_has_not_gone_on_is_counted_once(
    server, http_client, monkeypatch
) -> None:
    engine = server.llm.llm.engine
    queued, answered, subscribe = threading.Event(), threading.Event(), engine.subscribe

    def subscribe_late(*args: Any) -> None:
        # Of the first request, on the thread that queues it.
        if not queued.is_set():
            queued.set()
            answered.wait(60)
        subscribe(*args)

    monkeypatch.setattr(engine, "subscribe", subscribe_late)

    def ask() -> int:
        body = {"prompt": "x", "n": MAX_UNFINISHED // 2, "max_tokens": 1}
        return http_client.post("/v1/completions", json=body).status_code

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(ask)
        assert queued.wait(60)
        second = ask()
        answered.set()

    assert (first.result(), second) == (200, 200)
    wait_until_idle(server)


def ask_and_go(server, path: str, body: dict[str, Any]) -> None:
    """Has an application answer a client that is gone after its body; nothing is unfinished then."""
    wait_until_idle(server)
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}

    async def receive() -> Any:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        # A connection whose buffer is full.
        await asyncio.sleep(0)

    async def ask() -> int:
        await create_app(server.llm, ServeConfig(model_name=MODEL))(scope, receive, send)
        return server.llm.num_unfinished

    assert asyncio.run(ask()) == 0
    wait_until_idle(server)


def test_a_client_that_is_gone_before_the_first_event_cancels_its_request(server) -> None:
    ask_and_go(server, "/v1/completions", {"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True})


def test_vectors_of_a_client_that_is_gone_are_not_computed(server, monkeypatch) -> None:
    computed: list[Any] = []
    monkeypatch.setattr("jattn.llm.serve.app.embeddings_answer", lambda *asked: computed.append(asked))

    ask_and_go(server, "/v1/embeddings", {"input": "x"})

    assert not computed


def test_of_streams_that_wait_for_their_first_token_those_of_gone_clients_end(server, client) -> None:
    wait_until_idle(server)
    server.llm.llm.engine.sleep()
    body = json.dumps(LONG | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nAuthorization: Bearer {KEY}"
    try:
        staying = client.completions.create(model=MODEL, prompt="The", max_tokens=3, stream=True, temperature=0)
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as gone:
            gone.sendall(f"{head}\r\n\r\n".encode() + body)
            # All of it: an end with unread bytes would be a reset, which the server sees at once.
            found = b""
            while b"\r\n\r\n" not in found:
                received = gone.recv(1 << 16)
                assert received
                found += received
            assert server.llm.num_unfinished == 2
        wait_for_samples(server, 1)
    finally:
        server.llm.llm.engine.wake()

    expected = client.completions.create(model=MODEL, prompt="The", max_tokens=3, temperature=0)
    assert "".join(each.choices[0].text for each in staying) == expected.choices[0].text
    wait_until_idle(server)


def test_a_stream_asks_proxies_not_to_hold_it_back(http_client) -> None:
    headers = http_client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "stream": True}).headers

    assert (headers["Cache-Control"], headers.get("X-Accel-Buffering")) == ("no-cache", "no")


def test_a_client_of_a_closed_engine_is_told_to_try_again() -> None:
    with AsyncLLM(LLM(config=EngineConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=256))) as llm:
        transport = httpx.ASGITransport(create_app(llm, ServeConfig(model_name=MODEL)))

    async def ask(*asked: str, **options: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(*asked, **options)

    response = asyncio.run(ask("POST", "/v1/completions", json=LONG))
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert response.json()["error"]["code"] == "unavailable"
    assert [asyncio.run(ask("GET", path)).status_code for path in ("/health", "/metrics")] == [503, 200]
