"""A server in a thread of this process: for benchmarks and tests, and for notebooks."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import uvicorn

from jattn.llm.serve.app import create_app
from jattn.llm.serve.async_llm import AsyncLLM
from jattn.llm.serve.config import ServeConfig
from jattn.llm.serve.connection import uvicorn_options
from torch_core.base.errors import InvalidInput
from torch_core.base.owners import ClosingOwner

# How often `close` looks whether an engine sleeps, whose answers would never end.
_LOOK_SECONDS = 0.1


class BackgroundServer(ClosingOwner):
    """Listens on loopback, at a port that is free, until it is closed; the AsyncLLM is closed with it.

    Args:
        llm: the `LLM` to serve.
        config: config of the server.
        more: further models by name.

    Attributes:
        port: port of the server.
        url: without a path.

    Raises:
        InvalidInput: it cannot start.
    """

    def __init__(self, llm: AsyncLLM, config: ServeConfig, more: Mapping[str, AsyncLLM] | None = None) -> None:
        self._llms = (llm, *(more or {}).values())
        # The process's logging is its owner's: uvicorn's own would also close the handlers that are there.
        options: dict[str, Any] = {"log_config": None, "log_level": "error", **uvicorn_options(config.time_limits)}
        self._server = _Server(uvicorn.Config(create_app(llm, config, more), host="127.0.0.1", port=0, **options))
        self._thread = threading.Thread(target=self._server.run, name="jattn-serve", daemon=True)
        self._thread.start()
        self._server.ready.wait()
        if not self._server.started:
            raise InvalidInput("the server did not start; its log says why.")
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Finishes the running requests and stops; those of an engine that sleeps end with an error."""
        self._server.should_exit = True
        while self._thread.is_alive():
            for llm in self._llms:
                if llm.is_asleep:
                    llm.close()
            self._thread.join(_LOOK_SECONDS)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    def run(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().run(*args, **kwargs)
        finally:
            self.ready.set()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.ready.set()
