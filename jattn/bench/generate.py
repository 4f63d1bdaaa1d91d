"""Tokens per second of greedy generation, next to transformers' `generate` in the same process and threads."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.load import embedded_model_folder
from torch_core.base.errors import InvalidInput, Unsupported

__all__ = ["GenerateRow", "main", "run"]


@dataclass(frozen=True, slots=True)
class GenerateRow:
    """One measured configuration.

    Attributes:
        implementation: of the attention ops, or "transformers".
        prompt_tokens, new_tokens: of each of `batch` prompts.
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
    """Measures in rounds: every configuration once, then all again, so that a drift of the machine hits all alike.

    Args:
        model: a model folder; the embedded model if None.
        batches: numbers of prompts.
        prompt_tokens, new_tokens: the shape of each request.
        repeats: rounds after one that warms up and compiles.
        implementations: of the attention ops.
        peer: "transformers" or None.

    Raises:
        InvalidInput: sizes out of range or an unknown peer.
        Unsupported: the peer is not installed.
    """
    if min(prompt_tokens, new_tokens, repeats, *batches) < 1:
        raise InvalidInput("batches, prompt_tokens, new_tokens and repeats must be at least 1.")
    folder = str(embedded_model_folder()) if model is None else model
    engines = {name: _engine(folder, name, max(batches)) for name in implementations}
    if peer not in (None, "transformers"):
        raise InvalidInput(f"peer is {peer!r}; the one that can be measured is 'transformers'.")
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
            middle = statistics.median(measured)
            against = None if peer is None else [p / own for p, own in zip(seconds[peer][1:], measured, strict=True)]
            rows.append(
                GenerateRow(
                    implementation=name,
                    batch=batch,
                    prompt_tokens=prompt_tokens,
                    new_tokens=new_tokens,
                    tokens_per_second=batch * new_tokens / middle,
                    step_ms=middle / new_tokens * 1e3,
                    ratio=None if against is None else statistics.median(against),
                    same_tokens=None if peer is None else tokens[name] == tokens[peer],
                )
            )
    return rows


def main(argv: Sequence[str]) -> int:
    """Prints the table, or JSON; returns 0."""
    parser = argparse.ArgumentParser(prog="jattn bench generate", description=__doc__)
    parser.add_argument("--model", help="a model folder (default: the embedded model)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--implementations", nargs="+", default=["torch", "xla"])
    parser.add_argument("--peer", choices=["transformers"])
    parser.add_argument("--json", action="store_true")
    arguments = vars(parser.parse_args(argv))
    as_json = arguments.pop("json")
    rows = run(**arguments)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print(f"{'implementation':<14} {'batch':>5} {'tokens/s':>9} {'ms/step':>8} {'x peer':>7}  same tokens")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        same = "" if row.same_tokens is None else str(row.same_tokens)
        print(
            f"{row.implementation:<14} {row.batch:>5} {row.tokens_per_second:>9.0f} {row.step_ms:>8.2f} "
            f"{ratio:>7}  {same}"
        )
    print(f"torch threads {torch.get_num_threads()}; medians of {arguments['repeats']} interleaved rounds, greedy")
    return 0


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
        raise Unsupported(
            "peer 'transformers' is not installed; pip install 'jattn[crosscheck]', or leave --peer out."
        ) from None
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
