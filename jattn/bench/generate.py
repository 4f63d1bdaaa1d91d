"""Tokens per second of greedy generation, next to transformers' `generate` in the same process and threads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jattn.bench.runner import Benchmark
from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.load import embedded_model_folder
from torch_core.base.errors import InvalidInput, Unsupported


@dataclass(frozen=True, slots=True)
class GenerateRow:
    """One implementation, or "transformers", on `batch` prompts.

    Attributes:
        tokens_per_second: median over the repeats, prefill included.
        step_ms: median milliseconds for each generated position.
        ratio: tokens per second over the peer's in the same round, median; None without a peer.
        same_tokens: every generated token equals the peer's; None without a peer.
    """

    implementation: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    tokens_per_second: float
    step_ms: float
    ratio: float | None
    same_tokens: bool | None
    torch_threads: int


def run(
    *,
    model: str | None = None,
    batches: Sequence[int] = (1, 8),
    prompt_tokens: int = 32,
    new_tokens: int = 64,
    repeats: int = 5,
    implementations: Sequence[str] = ("torch", "xla"),
    peer: str | None = None,
) -> list[GenerateRow]:
    """Measures in rounds: every configuration once, then all again, so that a drift of the machine affects all equally.

    Args:
        model: a model folder; the embedded model by default.
        batches: numbers of prompts.
        prompt_tokens: tokens of a prompt.
        new_tokens: generated tokens of a prompt.
        repeats: rounds after one that warms up and compiles.
        implementations: implementations of the attention ops.
        peer: measured in the same rounds.
    """
    if min(prompt_tokens, new_tokens, repeats, *batches) < 1:
        raise InvalidInput("batches, prompt_tokens, new_tokens and repeats must be at least 1.")
    folder = str(embedded_model_folder()) if model is None else model
    engines = {name: _engine(folder, name, max(batches)) for name in implementations}
    if peer not in (None, "transformers"):
        raise InvalidInput("peer", value=peer, wanted="the one that can be measured is 'transformers'")
    if peer is not None:
        engines[peer] = _transformers(folder)
    rows = []
    for batch in batches:
        prompts = np.random.default_rng(batch).integers(0, 256, (batch, prompt_tokens)).tolist()
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        tokens: dict[str, Any] = {}
        for _ in range(repeats + 1):
            for name, generate in engines.items():
                started = time.perf_counter()
                tokens[name] = generate(prompts, new_tokens)
                seconds[name].append(time.perf_counter() - started)
        for name in engines:
            measured = seconds[name][1:]
            middle, ratio, same = statistics.median(measured), None, None
            if peer is not None:
                ratio = statistics.median(p / own for p, own in zip(seconds[peer][1:], measured, strict=True))
                same = tokens[name] == tokens[peer]
            speed, step_ms = batch * new_tokens / middle, middle / new_tokens * 1e3
            sizes, threads = (batch, prompt_tokens, new_tokens), torch.get_num_threads()
            rows.append(GenerateRow(name, *sizes, speed, step_ms, ratio, same, threads))
    return rows


Generate = Callable[[list[list[int]], int], list[list[int]]]


def _engine(folder: str, implementation: str, max_num_seqs: int) -> Generate:
    # Without the prefix cache: a repeated prompt would skip its prefill, which the peer cannot.
    config = EngineConfig(max_num_seqs=max_num_seqs, enable_prefix_caching=False)
    llm = LLM(folder, dtype="float32", implementation=implementation, config=config)

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    return generate


def _transformers(folder: str) -> Generate:
    try:
        import transformers
    except ImportError:
        wanted = "pip install 'jattn[crosscheck]', or leave --peer out"
        raise Unsupported("peer", "'transformers' is not installed", wanted) from None
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[:, ids.shape[1] :].tolist()

    return generate


BENCHMARK = Benchmark("generate", __doc__, run)
