"""The end of a server in a thread."""

from __future__ import annotations

import threading

import httpx

from jattn.llm.engine import LLM, EngineConfig
from jattn.llm.serve import AsyncLLM
from jattn.llm.serve.background import BackgroundServer
from jattn.llm.serve.config import ServeConfig


def test_a_server_whose_engine_sleeps_ends_its_answers_with_an_error() -> None:
    llm = AsyncLLM(LLM(config=EngineConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, num_blocks=9)))
    server = BackgroundServer(llm, ServeConfig(model_name="x"))
    llm.llm.engine.sleep()
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 1}
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=600))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    while not llm.llm.engine.num_unfinished:
        asking.join(0.01)
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(60)
    asking.join(60)
    assert not closing.is_alive()
    assert not llm.is_running
    (answer,) = answers
    assert answer.status_code == 503
    assert "the AsyncLLM was closed before the request ended." in answer.json()["error"]["message"]
