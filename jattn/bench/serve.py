"""Latency under load: users who wait for answers, or requests that arrive at a rate, independent of earlier ones."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import math
import multiprocessing
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import jax
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from jattn.bench.arrivals import Load, ServeRow, Timeline, row_of
from jattn.bench.engine import settings_of
from jattn.bench.pictures import draw_loads
from jattn.bench.runner import Benchmark
from jattn.bench.shapes import SHAPES, random_decoder
from jattn.llm.engine import LLM, EngineConfig, RequestOutputKind, SamplingParams
from jattn.llm.engine.options.defaults import serving_sizes
from jattn.llm.models import quantize_fp8
from jattn.llm.serve import AsyncLLM
from jattn.llm.serve.async_llm import Update
from torch_core.base.errors import InvalidInput, Unsupported

_WATCH_SECONDS = 0.1
_BODY = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
# Ours, and vLLM's.
_POOL_USAGE = re.compile(r"^(?:jattn_kv_cache_usage|vllm:kv_cache_usage_perc)(?:{.*})? (\S+)$", re.MULTILINE)
# Requests of the round that warms up.
_WARM_UP = 8

# Threads that add requests; each may wait for a step to end.
_ADDERS = 32


def run(
    *,
    url: str | None = None,
    api_key: str | None = None,
    model: str | None = None,
    shape: Literal["70b", "8b", "tiny"] | None = None,
    fp8_weights: bool = False,
    direct: bool = False,
    loads: Sequence[str] = ("128x64:1/s:32", "128x64:4/s:32", "128x64:inf/s:32"),
    vocab_size: int = 256,
    settings: str = "",
    ttft_goal_ms: float | None = None,
    tpot_goal_ms: float | None = None,
    seed: int = 0,
    watch_pool: bool = False,
) -> Iterator[ServeRow]:
    """Yields a row for each load of a server that runs at `url`, or of an engine of this process.

    Args:
        url: URL of a running server, without a path; a server in this process by default.
        api_key: API key of the server at `url`.
        model: a model folder for the own server; the embedded model by default.
        shape: random weights of this shape for the own server, without a tokenizer, instead of a folder.
        fp8_weights: their linear layers multiply in fp8.
        direct: requests go to the engine of this process, without a server.
        loads: LENGTHS:ARRIVALS:REQUESTS of each row. Lengths are PROMPTxANSWER tokens, or chat, a seeded distribution;
            arrivals are 32users, who wait for their answers, 2.5/s in a Poisson process, or inf/s for all at once.
        vocab_size: prompts have random token ids from 1 to below it, and share no prefix.
        settings: fields of EngineConfig of the own engine with values in JSON: max_num_seqs=64,kv_cache_dtype="fp8".
        ttft_goal_ms: most milliseconds to the first token of a request that counts for `goodput`.
        tpot_goal_ms: most milliseconds for each further token of such a request.
        seed: seed of lengths, prompts and arrivals.
        watch_pool: ask the server for its metrics meanwhile, ten times a second.
    """
    found = [Load.of(text) for text in loads]
    if not found or (direct and url is not None):
        raise InvalidInput("loads must not be empty, and direct goes without a url.")
    with contextlib.ExitStack() as stack:
        send = _send
        if direct:
            stack.callback((llm := _own_llm(model, shape, fp8_weights, found, settings)).close)
            client: _Client = _Direct(AsyncLLM(llm), stack.enter_context(ThreadPoolExecutor(_ADDERS)))
        else:
            if url is None:
                # In one process, server and clients would wait for each other at Python's lock.
                clients = stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
                send = lambda *arguments: clients.submit(_send, *arguments).result()  # noqa: E731
                llm = _own_llm(model, shape, fp8_weights, found, settings)
                url = str(stack.enter_context(_own_server(llm)).url)
            client = _Http(url, api_key)
        # The first round warms up and is not told.
        warm_up = replace(found[0], users=0, rate=math.inf, num_requests=_WARM_UP)
        for number, load in enumerate([warm_up, *found]):
            timelines, usage = send(client, load, seed + number, vocab_size, watch_pool)
            if number:
                goals = {"ttft_goal_ms": ttft_goal_ms, "tpot_goal_ms": tpot_goal_ms}
                yield row_of(load, timelines, pool_usage=usage, **goals)


def _own_llm(model: str | None, shape: str | None, fp8_weights: bool, loads: Sequence[Load], settings: str) -> LLM:
    sizes: dict[str, Any] = serving_sizes() | {"max_model_len": max(load.longest for load in loads)}
    config = EngineConfig(**(sizes | settings_of(settings)))
    if shape is None:
        llm = LLM(model, config=config, use_generation_config=False)
    else:
        decoder = random_decoder(SHAPES[shape])
        if fp8_weights:
            quantize_fp8(decoder)
        llm = LLM(decoder, config=config, tokenizer=_tokenizer(decoder.config.vocab_size))
    llm.engine.warmup(lambda *_: None, wanted=_is_wanted)
    return llm


def _is_wanted(program: str) -> bool:
    """Returns whether greedy requests without a common prefix run a program; a CPU has none of its own for them."""
    decodes = ", queries up to 1, " in program
    kind = ", greedy" if decodes and jax.default_backend() != "cpu" else ", plain"
    return program.endswith(kind) and "shared prefixes" not in program


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Returns a tokenizer with a word of letters for each token, so that answers are texts."""
    words = {"".join(chr(97 + index // 26**place % 26) for place in range(5)): index for index in range(vocab_size)}
    tokenizer = Tokenizer(BPE(words, []))
    tokenizer.decoder = ByteLevel()
    return tokenizer


def _own_server(llm: LLM) -> Any:
    try:
        background = importlib.import_module("jattn.llm.serve.background")
        served = importlib.import_module("jattn.llm.serve.config")
    except ImportError as error:
        raise Unsupported(f"serving needs {error.name}, which is not installed; pip install 'jattn[serve]'.") from None
    return background.BackgroundServer(AsyncLLM(llm), served.ServeConfig(model_name="bench", max_unfinished=1 << 20))


_Sent: TypeAlias = tuple[list[Timeline], list[tuple[float, float]]]


def _send(client: _Client, load: Load, seed: int, vocab_size: int, watch_pool: bool) -> _Sent:
    """Sends the requests of a load; returns their times, and the use of the pool by the seconds since the start."""
    return asyncio.run(_sent(client, load, seed, vocab_size, watch_pool))


async def _sent(client: _Client, load: Load, seed: int, vocab_size: int, watch_pool: bool) -> _Sent:
    timelines: list[Timeline] = []
    usage: list[tuple[float, float]] = []
    waiting = deque(zip(load.arrivals(seed), load.prompts(seed, vocab_size), load.sizes(seed), strict=True))
    async with client:
        start, ended = time.perf_counter(), asyncio.Event()

        async def ask(arrival: float, prompt: list[int], num_tokens: int) -> None:
            await asyncio.sleep(max(arrival - time.perf_counter(), 0))
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
        if load.users and isinstance(client, _Direct):
            await client.serve_users(load.users, waiting, timelines)
        elif load.users:
            await asyncio.gather(*(user() for _ in range(load.users)))
        else:
            await asyncio.gather(*(ask(start + after, prompt, size[1]) for after, prompt, size in waiting))
        ended.set()
        await asyncio.gather(*watching)
    return timelines, usage


async def _watch_pool(client: _Client, start: float, usage: list[tuple[float, float]], ended: asyncio.Event) -> None:
    # A server that does not answer fails the requests, which are counted.
    with contextlib.suppress(Exception):
        while not ended.is_set():
            if (share := await client.pool_usage()) is not None:
                usage.append((time.perf_counter() - start, share))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _WATCH_SECONDS)


class _Http:
    """A client of a server at a URL."""

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
class _Direct(contextlib.AbstractAsyncContextManager):
    """A client of an engine of this process; its thread notes the times."""

    llm: AsyncLLM
    adders: ThreadPoolExecutor

    async def __aexit__(self, *error: object) -> None:
        pass

    async def ask(self, timeline: Timeline, prompt: list[int], num_tokens: int) -> None:
        """Sends a prompt that wants this number of tokens and keeps the times of its answer."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        send = functools.partial(self._send, timeline, prompt, num_tokens, lambda: loop.call_soon_threadsafe(ended.set))
        await loop.run_in_executor(self.adders, send)
        await ended.wait()

    async def serve_users(
        self, count: int, waiting: deque[tuple[float, list[int], tuple[int, int]]], timelines: list[Timeline]
    ) -> None:
        """Sends the requests of users. Behind the first ones the engine's thread adds them, before its next step."""
        loop, ended = asyncio.get_running_loop(), asyncio.Semaphore(0)

        def next_request() -> None:
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
                next_request()

        await asyncio.gather(*(loop.run_in_executor(self.adders, next_request) for _ in range(count)))
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


_Client: TypeAlias = _Http | _Direct
BENCHMARK = Benchmark("serve", __doc__, run, draw=draw_loads, when_drawn={"watch_pool": True})
