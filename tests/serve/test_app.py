"""The server among bad requests, clients that go away, and too many of them."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serve.conftest import KEY, MAX_UNFINISHED, MODEL

HEADERS = {"Authorization": f"Bearer {KEY}"}
LONG = {"prompt": "The", "max_tokens": 240, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def http_client(server):
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=120) as client:
        yield client


def wait_until_idle(server) -> None:
    """Waits for cancelled requests to be gone."""
    for _ in range(600):
        if not server.llm.num_unfinished and not server.llm.llm.engine.num_unfinished:
            break
        time.sleep(0.05)
    assert server.llm.num_unfinished == 0
    assert server.llm.llm.engine.cache_stats().used == 0


# Bodies of /v1/completions without what is right, and the field that the answer must name.
BAD: list[tuple[Any, str | None]] = [
    (b"{", None),
    (b"[1]", None),
    (b"\xff", None),
    (b'{"prompt": "x", "prompt": "y"}', None),
    (b'{"prompt": "x", "temperature": NaN}', None),
    (b"[" * 50_000, None),
    ({}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["x", 5]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["x"] * 257}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": "x", "model": 5}, "model"),
    ({"prompt": "x", "model": "other"}, "model"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": "two"}, "n"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "temperature": 1e999}, None),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "top_k": -2}, "top_k"),
    ({"prompt": "x", "min_p": 2}, "min_p"),
    ({"prompt": "x", "presence_penalty": 3}, "presence_penalty"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "stop": 5}, "stop"),
    ({"prompt": "x", "seed": "x"}, "seed"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "stream_options": 5}, "stream_options"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"1": "x"}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"9999": 1}}, "logit_bias"),
    ({"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
    ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
    ({"prompt": "x", "echo": True, "stream": True}, "echo"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "x", "bad_words": "x"}, "bad_words"),
    ({"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"regexp": "x"}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"regex": "(["}}, "prompt"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format"),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format"),
    ({"prompt": "x", "unknown_field": 1}, "unknown_field"),
]
BAD_CHATS: list[tuple[Any, str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": {}}, "tools"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
]


def refusal(response: httpx.Response, param: str | None) -> None:
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert error["message"]


def test_every_bad_request_is_refused_by_name_and_good_ones_beside_them_are_answered(server, http_client, seed) -> None:
    choose = random.Random(seed)
    good = {"prompt": "The list", "max_tokens": 6, "temperature": 0}
    expected = http_client.post("/v1/completions", json=good).json()["choices"][0]["text"]
    work = [("/v1/completions", *each) for each in BAD] + [("/v1/chat/completions", *each) for each in BAD_CHATS]
    work += [("/v1/completions", good, expected)] * 12
    choose.shuffle(work)

    def ask(path: str, body: Any, wanted: str | None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = http_client.post(path, content=content)
        if body is good:
            assert response.json()["choices"][0]["text"] == wanted
        else:
            refusal(response, wanted)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda each: ask(*each), work))

    wait_until_idle(server)


def test_a_body_beyond_the_limit_is_not_read(http_client) -> None:
    response = http_client.post("/v1/completions", content=b" " * (1 << 17))

    assert response.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("GET", "/nowhere", 404), ("GET", "/v1/models/other", 404)],
)
def test_what_is_not_served_is_said_in_the_same_form(http_client, method, path, status) -> None:
    response = http_client.request(method, path)

    assert response.status_code == status
    assert response.json()["error"]["message"]


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


def test_health_and_metrics_need_no_key(server, http_client) -> None:
    http_client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "ignore_eos": True})

    metrics = httpx.get(f"{server.url}/metrics").text

    assert httpx.get(f"{server.url}/health").status_code == 200
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values["jattn_generation_tokens_total"]) >= 3
    assert float(values["jattn_time_to_first_token_seconds_count"]) >= 1
    assert 0 <= float(values["jattn_kv_cache_usage"]) <= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_request(server, stream) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps(LONG | {"stream": stream, "n": 4})
    connection.request("POST", "/v1/completions", body, HEADERS | {"Content-Type": "application/json"})
    if stream:
        assert connection.getresponse().read(10)
    else:
        for _ in range(6000):
            if server.llm.num_unfinished:
                break
            time.sleep(0.01)
        assert server.llm.num_unfinished

    # Before its 240 tokens are there.
    connection.sock.shutdown(socket.SHUT_RDWR) if connection.sock else None
    connection.close()

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
