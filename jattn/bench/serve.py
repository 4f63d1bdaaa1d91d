"""Latency under load: users who wait for answers, or requests that arrive at a rate, independent of earlier ones."""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import jax
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from jattn.bench.arrivals import Load, ServeRow, row_of
from jattn.bench.clients import Client, Direct, Http, send
from jattn.bench.collector import without_old_objects
from jattn.bench.engine import settings_of
from jattn.bench.pictures import draw_loads
from jattn.bench.runner import Benchmark
from jattn.bench.shapes import SHAPES, random_decoder
from jattn.llm.engine import LLM, EngineConfig
from jattn.llm.engine.options.defaults import serving_sizes
from jattn.llm.models import quantize_fp8
from jattn.llm.serve import AsyncLLM
from torch_core.base.errors import InvalidInput, Unsupported

# Requests of the round that warms up.
_WARM_UP = 8
# Threads that add requests; each may wait for a step to end.
_ADDERS = 256


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
        shape: random weights of this shape for the own server instead of a folder; a token is a word of letters.
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
        sender = send
        if direct:
            stack.callback((llm := _own_llm(model, shape, fp8_weights, found, settings)).close)
            client: Client = Direct(AsyncLLM(llm), stack.enter_context(ThreadPoolExecutor(_ADDERS)))
        else:
            if url is None:
                # In one process, server and clients would wait for each other at Python's lock.
                clients = stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
                sender = lambda *arguments: clients.submit(send, *arguments).result()  # noqa: E731
                llm = _own_llm(model, shape, fp8_weights, found, settings)
                url = str(stack.enter_context(_own_server(llm)).url)
            client = Http(url, api_key)
        # As `jattn serve` does.
        stack.enter_context(without_old_objects())
        # The first round warms up and is not told.
        warm_up = replace(found[0], users=0, rate=math.inf, num_requests=_WARM_UP)
        for number, load in enumerate([warm_up, *found]):
            timelines, usage = sender(client, load, seed + number, vocab_size, watch_pool)
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
    kind = ", plain" if jax.default_backend() == "cpu" else ", greedy"
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


BENCHMARK = Benchmark("serve", __doc__, run, draw=draw_loads, when_drawn={"watch_pool": True})
