"""Clients of a served load: over HTTP, or at the engine of this process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import re
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from jattn.bench.arrivals import Load, Timeline
from jattn.llm.engine import RequestOutputKind, SamplingParams
from jattn.llm.serve import AsyncLLM
from jattn.llm.serve.async_llm import Update
from torch_core.base.errors import Unsupported

_WATCH_SECONDS = 0.1
_BODY = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
# Ours, and vLLM's.
_POOL_USAGE = re.compile(r"^(?:jattn_kv_cache_usage|vllm:kv_cache_usage_perc)(?:{.*})? (\S+)$", re.MULTILINE)


#: The times of all requests, and the use of the pool by the seconds since the start.
Sent: TypeAlias = tuple[list[Timeline], list[tuple[float, float]]]


def send(client: Client, load: Load, seed: int, vocab_size: int, watch_pool: bool) -> Sent:
    """Sends the requests of a load; returns their times, and the use of the pool by the seconds since the start."""
    return asyncio.run(_sent(client, load, seed, vocab_size, watch_pool))


async def _sent(client: Client, load: Load, seed: int, vocab_size: int, watch_pool: bool) -> Sent:
    timelines: list[Timeline] = []
    usage: list[tuple[float, float]] = []
    waiting = deque(zip(load.arrivals(seed), load.prompts(seed, vocab_size), load.sizes(seed), strict=True))
    async with client:
        start, ended = time.perf_counter(), asyncio.Event()

        async def ask(arrival: float, prompt: list[int], num_tokens: int) -> None:
            await asyncio.sleep(max(arrival - client.lead_seconds - time.perf_counter(), 0))
            # From when it should have come: a client that is late must not flatter the server.
            timelines.append(timeline := Timeline(arrival))
            try:
                await client.ask(timeline, prompt, num_tokens)
            except Exception as error:
                # Any error belongs to this request: it is counted, and the others continue.
                timeline.error = str(error) or type(error).__name__

        async def user() -> None:
            while waiting:
                _, prompt, (_, num_tokens) = waiting.popleft()
                await ask(time.perf_counter(), prompt, num_tokens)

        watching = [asyncio.ensure_future(_watch_pool(client, start, usage, ended))] if watch_pool else []
        if load.users and isinstance(client, Direct):
            await client.serve_users(load.users, waiting, timelines)
        elif load.users:
            await asyncio.gather(*(user() for _ in range(load.users)))
        else:
            await asyncio.gather(*(ask(start + after, prompt, size[1]) for after, prompt, size in waiting))
        ended.set()
        await asyncio.gather(*watching)
    return timelines, usage


async def _watch_pool(client: Client, start: float, usage: list[tuple[float, float]], ended: asyncio.Event) -> None:
    # A server that does not answer fails the requests, which are counted.
    with contextlib.suppress(Exception):
        while not ended.is_set():
            if (share := await client.pool_usage()) is not None:
                usage.append((time.perf_counter() - start, share))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _WATCH_SECONDS)


class Http:
    """A client of a server at a URL."""

    lead_seconds = 0.0

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url, self._api_key = url, api_key

    async def __aenter__(self) -> None:
        try:
            httpx = importlib.import_module("httpx")
        except ImportError:
            raise Unsupported("jattn bench serve needs httpx, which is not installed; pip install httpx.") from None
        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client: Any = httpx.AsyncClient(base_url=self._url, headers=headers, timeout=None, limits=limits)

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def ask(self, timeline: Timeline, prompt: list[int], num_tokens: int) -> None:
        """Sends a prompt that wants this number of tokens and keeps the times of its answer."""
        body = _BODY | {"prompt": prompt, "max_tokens": num_tokens}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise ConnectionError(f"status {response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ConnectionError(event["error"]["message"])
                if event["choices"]:
                    timeline.events.append(time.perf_counter())
                if event.get("usage"):
                    timeline.num_tokens = event["usage"]["completion_tokens"]

    async def pool_usage(self) -> float | None:
        """Returns the share of the pool's blocks that requests hold."""
        found = _POOL_USAGE.search((await self._client.get("/metrics")).text)
        return found and float(found[1])


@dataclass(frozen=True)
class Direct(contextlib.AbstractAsyncContextManager):
    """A client of an engine of this process; its thread notes the times.

    Attributes:
        lead_seconds: it is asked so long before an arrival, and waits itself: the event loop wakes 1 ms late.
    """

    llm: AsyncLLM
    adders: ThreadPoolExecutor
    lead_seconds = 0.005

    async def __aexit__(self, *error: object) -> None:
        pass

    async def ask(self, timeline: Timeline, prompt: list[int], num_tokens: int) -> None:
        """Sends a prompt that wants this number of tokens and keeps the times of its answer."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            time.sleep(max(timeline.arrival - time.perf_counter(), 0))
            self._send(timeline, prompt, num_tokens, lambda: loop.call_soon_threadsafe(ended.set))

        await loop.run_in_executor(self.adders, send)
        await ended.wait()

    async def serve_users(
        self, count: int, waiting: deque[tuple[float, list[int], tuple[int, int]]], timelines: list[Timeline]
    ) -> None:
        """Sends the requests of users. The engine's thread adds them between two steps, the first ones together."""
        loop, ended = asyncio.get_running_loop(), asyncio.Semaphore(0)

        def next_request() -> None:
            while True:
                try:
                    _, prompt, (_, num_tokens) = waiting.popleft()
                except IndexError:
                    loop.call_soon_threadsafe(ended.release)
                    return
                timelines.append(timeline := Timeline(time.perf_counter()))
                try:
                    self._send(timeline, prompt, num_tokens, next_request)
                except Exception as error:
                    timeline.error = str(error) or type(error).__name__
                else:
                    return

        def start() -> None:
            for _ in range(count):
                next_request()

        def start_at_the_end_of_another() -> None:
            try:
                self._send(Timeline(time.perf_counter()), [1], 1, start)
            except Exception:
                start()

        await loop.run_in_executor(self.adders, start_at_the_end_of_another)
        for _ in range(count):
            await ended.acquire()

    def _send(self, timeline: Timeline, prompt: list[int], num_tokens: int, then: Callable[[], object]) -> None:
        """Adds a request; `then` is called on the engine's thread at its end."""

        def deliver(update: Update | BaseException) -> None:
            if isinstance(update, BaseException):
                timeline.error, finished = str(update), True
            else:
                timeline.events.append(time.perf_counter())
                timeline.num_tokens += len(update.new.token_ids)
                finished = update.finished
            if finished:
                then()

        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=num_tokens, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self.llm.add(prompt, params, deliver=deliver)

    async def pool_usage(self) -> float | None:
        """Returns the share of the pool's blocks that requests hold."""
        return None


Client: TypeAlias = Http | Direct
