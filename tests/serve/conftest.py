"""One server with the embedded model for the room's tests, and OpenAI's client for it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest

from jattn.llm.engine import LLM, EngineConfig
from jattn.llm.serve import AsyncLLM
from jattn.llm.serve.background import BackgroundServer
from jattn.llm.serve.config import ServeConfig

MODEL = "embedded"
KEY = "a key"
TEMPLATE = (
    "{% for tool in tools or [] %}Tool {{ tool.function.name }}. {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MAX_UNFINISHED = 24


class Running(BackgroundServer):
    """The server, and what it serves."""

    def __init__(self) -> None:
        # One shape for every step, so that few programs compile.
        self.llm = AsyncLLM(
            LLM(
                config=EngineConfig(
                    max_num_seqs=8,
                    max_num_batched_tokens=256,
                    max_model_len=256,
                    num_scheduler_steps=1,
                    fixed_shapes=True,
                    enable_lora=True,
                    max_lora_rank=4,
                )
            )
        )
        config = ServeConfig(
            model_name=MODEL,
            api_keys=("another", KEY),
            max_body_bytes=1 << 18,
            max_unfinished=MAX_UNFINISHED,
            chat_template=TEMPLATE,
            trust_request_chat_template=True,
            allow_runtime_lora_updating=True,
        )
        super().__init__(self.llm, config)


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with Running() as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=600) as client:
        yield client


def wait_for_samples(server: Running, num_samples: int) -> None:
    """Waits until as many samples are unfinished."""
    for _ in range(6000):
        if server.llm.num_unfinished == num_samples:
            return
        time.sleep(0.01)
    raise AssertionError(f"{server.llm.num_unfinished} samples are unfinished, not {num_samples}")


def wait_until_idle(server: Running) -> None:
    """Waits for cancelled requests to be gone."""
    for _ in range(600):
        if not server.llm.num_unfinished and not server.llm.llm.engine.num_unfinished:
            break
        time.sleep(0.05)
    assert server.llm.num_unfinished == 0
    assert server.llm.llm.engine.cache_stats().used == 0
