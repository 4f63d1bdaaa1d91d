"""Latency of the HTTP server under open-loop load: requests arrive at a rate, independent of earlier ones."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jattn.bench.pictures import draw_rates
from jattn.bench.report import HIDDEN
from jattn.bench.runner import Benchmark
from jattn.llm.engine import LLM, EngineConfig
from jattn.llm.serve import AsyncLLM
from torch_core.base.errors import InvalidInput, Unsupported

_PERCENTILES = (50, 90, 99)
_WATCH_SECONDS = 0.1
_BODY = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
# Ours, and vLLM's.
_POOL_USAGE = re.compile(r"^(?:jattn_kv_cache_usage|vllm:kv_cache_usage_perc)(?:{.*})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServeRow:
    """One rate. Latencies are in milliseconds, by percentile ("p50", "p90", "p99", "mean").

    Attributes:
        rate: requests a second that arrive, in a Poisson process; inf for all at once.
        duration_s: seconds from the first arrival to the last token.
        requests_per_second, output_tokens_per_second: rates of the completed requests.
        ttft_ms: from the arrival to the first token.
        tpot_ms: per token after the first, mean of a request.
        itl_ms: between two events with text; several tokens may come in one.
        e2e_ms: from the arrival to the last token.
        goodput: completed requests a second within both goals; None without goals.
        error: number of failed requests, and the error of the first one.
        pool_usage: seconds since the first arrival and the share of the pool's blocks that requests hold, if watched.
    """

    rate: float
    completed: int
    failed: int
    duration_s: float
    requests_per_second: float
    output_tokens_per_second: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]
    goodput: float | None
    error: str | None = field(default=None, metadata=HIDDEN)
    pool_usage: list[tuple[float, float]] = field(default_factory=list, metadata=HIDDEN)


@dataclass(slots=True)
class _Timeline:
    arrival: float
    events: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None


def run(
    *,
    url: str | None = None,
    api_key: str | None = None,
    model: str | None = None,
    rates: Sequence[float] = (1.0, 4.0, math.inf),
    num_requests: int = 32,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    vocab_size: int = 256,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    ttft_goal_ms: float | None = None,
    tpot_goal_ms: float | None = None,
    seed: int = 0,
    watch_pool: bool = False,
) -> list[ServeRow]:
    """Measures a server that runs at `url`, or one of this process with a model folder.

    Args:
        url: URL of a running server, without a path; a server in this process by default.
        api_key: API key of the server at `url`.
        model: a model folder for the own server; the embedded model by default.
        rates: requests per second, a row for each; inf for all at once.
        num_requests: number of requests of each rate.
        prompt_tokens: number of prompt tokens of each request; prompts are random and share no prefix.
        new_tokens: number of new tokens of each request.
        vocab_size: prompts have token ids from 1 to below it.
        max_num_seqs, max_num_batched_tokens: sizes of the server in this process.
        ttft_goal_ms: most milliseconds to the first token of a request that counts for `goodput`.
        tpot_goal_ms: most milliseconds for each further token of such a request.
        seed: seed of prompts and arrivals.
        watch_pool: ask the server for its metrics meanwhile, ten times a second.
    """
    if min(num_requests, prompt_tokens, new_tokens) < 1 or not rates or not all(rate > 0 for rate in rates):
        raise InvalidInput("num_requests, prompt_tokens and new_tokens must be at least 1, and rates above 0.")
    random_numbers = random.Random(seed)
    with contextlib.ExitStack() as stack:
        if url is None:
            config = EngineConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=prompt_tokens + new_tokens,
            )
            url = str(stack.enter_context(_own_server(model, config)).url)
        rows = []
        for rate in [math.inf, *rates]:
            # The first round warms up and is not told.
            prompts = [
                [random_numbers.randrange(1, vocab_size) for _ in range(prompt_tokens)] for _ in range(num_requests)
            ]
            bodies = [_BODY | {"prompt": prompt, "max_tokens": new_tokens} for prompt in prompts]
            gaps = [0.0 if math.isinf(rate) else random_numbers.expovariate(rate) for _ in bodies]
            timelines, usage = asyncio.run(_send(url, api_key, bodies, np.cumsum(gaps).tolist(), watch_pool))
            rows.append(replace(_row(rate, timelines, ttft_goal_ms, tpot_goal_ms), pool_usage=usage))
    return rows[1:]


def _own_server(model: str | None, config: EngineConfig) -> Any:
    try:
        background = importlib.import_module("jattn.llm.serve.background")
        served = importlib.import_module("jattn.llm.serve.config")
    except ImportError as error:
        raise Unsupported(f"serving needs {error.name}, which is not installed; pip install 'jattn[serve]'.") from None
    llm = LLM(model, config=config, use_generation_config=False)
    llm.engine.warmup(lambda *_: None)
    return background.BackgroundServer(AsyncLLM(llm), served.ServeConfig(model_name="bench", max_unfinished=1 << 20))


async def _send(
    url: str, api_key: str | None, bodies: list[dict[str, Any]], arrivals: list[float], watch_pool: bool
) -> tuple[list[_Timeline], list[tuple[float, float]]]:
    try:
        httpx = importlib.import_module("httpx")
    except ImportError:
        raise Unsupported("jattn bench serve needs httpx, which is not installed; pip install httpx.") from None
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    usage: list[tuple[float, float]] = []
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as client:
        start = time.perf_counter()
        ended = asyncio.Event()
        watching = [asyncio.ensure_future(_watch_pool(client, start + arrivals[0], usage, ended))] if watch_pool else []
        requests = (_ask(client, body, start + arrival) for body, arrival in zip(bodies, arrivals, strict=True))
        timelines = await asyncio.gather(*requests)
        ended.set()
        await asyncio.gather(*watching)
    return timelines, usage


async def _watch_pool(client: Any, start: float, usage: list[tuple[float, float]], ended: asyncio.Event) -> None:
    # A server that does not answer fails the requests, which are counted.
    with contextlib.suppress(Exception):
        while not ended.is_set():
            text = (await client.get("/metrics")).text
            if found := _POOL_USAGE.search(text):
                usage.append((time.perf_counter() - start, float(found[1])))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _WATCH_SECONDS)


async def _ask(client: Any, body: dict[str, Any], arrival: float) -> _Timeline:
    await asyncio.sleep(max(arrival - time.perf_counter(), 0))
    # From when it should have come: a client that is late must not flatter the server.
    timeline = _Timeline(arrival)
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
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
    except Exception as error:
        # Any error belongs to this request: it is counted, and the others continue.
        timeline.error = str(error) or type(error).__name__
    return timeline


def _row(rate: float, timelines: list[_Timeline], ttft_goal_ms: float | None, tpot_goal_ms: float | None) -> ServeRow:
    done = [timeline for timeline in timelines if timeline.error is None and timeline.events]
    failed = [each.error or "nothing came" for each in timelines if each.error or not each.events]
    first = [1e3 * (each.events[0] - each.arrival) for each in done]
    whole = [1e3 * (each.events[-1] - each.arrival) for each in done]
    each_token = [1e3 * (each.events[-1] - each.events[0]) / max(each.num_tokens - 1, 1) for each in done]
    between = [1e3 * (b - a) for each in done for a, b in itertools.pairwise(each.events)]
    start = min(timeline.arrival for timeline in timelines)
    duration = max((timeline.events[-1] for timeline in done), default=start) - start
    # Without an answer all numbers of them are 0.
    seconds = duration or math.inf
    goals = ttft_goal_ms is not None or tpot_goal_ms is not None
    good = sum(
        early <= (ttft_goal_ms or math.inf) and later <= (tpot_goal_ms or math.inf)
        for early, later in zip(first, each_token, strict=True)
    )
    return ServeRow(
        rate=rate,
        completed=len(done),
        failed=len(failed),
        duration_s=duration,
        requests_per_second=len(done) / seconds,
        output_tokens_per_second=sum(timeline.num_tokens for timeline in done) / seconds,
        ttft_ms=_percentiles(first),
        tpot_ms=_percentiles(each_token),
        itl_ms=_percentiles(between),
        e2e_ms=_percentiles(whole),
        goodput=good / seconds if goals else None,
        error=f"at {rate:g} requests a second {len(failed)} failed; the first: {failed[0]}" if failed else None,
    )


def _percentiles(values: list[float]) -> dict[str, float]:
    values = values or [math.nan]
    found = zip(_PERCENTILES, np.percentile(values, _PERCENTILES).tolist(), strict=True)
    return {f"p{percentile}": value for percentile, value in found} | {"mean": float(np.mean(values))}


BENCHMARK = Benchmark("serve", __doc__, run, draw=draw_rates, when_drawn={"watch_pool": True})
