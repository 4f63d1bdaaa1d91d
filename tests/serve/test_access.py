"""The id of a request and its line in the log."""

from __future__ import annotations

import json
import logging

import httpx
import pytest

from jattn.llm.engine.clients.stream import PromptReader
from jattn.llm.serve.access import log
from tests.serve.conftest import KEY
from torch_core.base.errors import PoolLost

BODY = {"prompt": "The list", "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def http_client(server):
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=600) as client:
        yield client


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == log.name]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_an_id_and_a_line_says_how_it_went(http_client, caplog, stream) -> None:
    with caplog.at_level(logging.INFO, log.name):
        response = http_client.post("/v1/completions", json=BODY | {"stream": stream})
        refused = http_client.post("/v1/completions", json={})
        # A stream's line is written behind its last piece, which the client may have read by then.
        for _ in range(1000):
            http_client.get("/health")
            if len(lines_of(caplog)) == 2:
                break

    lines = {line["request_id"]: line for line in lines_of(caplog)}
    assert len(lines) == 2
    answered, not_answered = (lines[each.headers["x-request-id"]] for each in (response, refused))
    assert (answered["method"], answered["path"], answered["status"]) == ("POST", "/v1/completions", 200)
    assert (answered["whole"], answered["completion_tokens"]) == (True, 3)
    assert answered["seconds"] > 0
    assert not_answered["status"] == 400
    assert "completion_tokens" not in not_answered
    assert not any(secret in caplog.text for secret in ("The list", KEY))


@pytest.mark.parametrize(("given", "is_kept"), [("job-7:a.b_c", True), ("x" * 129, False), ("a b", False), ("", False)])
def test_a_clients_own_id_is_kept_where_it_can_stand_in_a_log(http_client, given, is_kept) -> None:
    response = http_client.get("/version", headers={"X-Request-Id": given})

    assert (response.headers["x-request-id"] == given) == is_kept
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(ZeroDivisionError("inside"), 500), (PoolLost("inside", generation=1), 503)]
)
def test_a_failure_of_the_servers_own_is_logged_with_its_id_and_hides_its_inside(
    http_client, caplog, monkeypatch, error, status, stream
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(PromptReader, "read", fail)

    def num_failed() -> float:
        lines = dict(line.rsplit(" ", 1) for line in http_client.get("/metrics").text.splitlines())
        return float(lines.get(f'jattn_refused_requests_total{{status="{status}"}}', 0))

    before = num_failed()

    response = http_client.post("/v1/completions", json=BODY | {"stream": stream})

    assert (response.status_code, num_failed() - before) == (200 if stream else status, 1)
    assert "the server failed on this request." in response.text
    assert "inside" not in response.text
    (record,) = [record for record in caplog.records if record.name == "jattn.llm.serve"]
    assert response.headers["x-request-id"] in record.getMessage()
    assert "inside" in caplog.text
