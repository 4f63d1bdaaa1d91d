"""One server with the embedded model for the room's tests, and OpenAI's client for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import openai
import pytest
import uvicorn

from jattn.engine import LLM, EngineConfig
from jattn.load import ChatTemplate
from jattn.serve import AsyncLLM
from jattn.serve.app import ServeConfig, create_app

MODEL = "embedded"
KEY = "a key"
TEMPLATE = (
    "{% for tool in tools or [] %}Tool {{ tool.function.name }}. {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MAX_UNFINISHED = 24


class Running:
    """A server on loopback in a thread of its own."""

    def __init__(self) -> None:
        # One shape for every step, so that few programs compile.
        config = EngineConfig(
            max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, num_scheduler_steps=1, batch_invariant=True
        )
        self.llm = AsyncLLM(LLM(config=config))
        served = ServeConfig(
            model_name=MODEL,
            api_keys=("another", KEY),
            max_body_bytes=1 << 16,
            max_unfinished=MAX_UNFINISHED,
            chat_template=ChatTemplate(TEMPLATE),
        )
        self._server = uvicorn.Server(
            uvicorn.Config(create_app(self.llm, served), host="127.0.0.1", port=0, log_level="error")
        )
        started = threading.Event()
        startup = self._server.startup

        async def start(sockets: list | None = None) -> None:
            await startup(sockets)
            started.set()

        self._server.startup = start
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        assert started.wait(60)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client
