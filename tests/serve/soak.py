"""A long run of AsyncLLM: `python -m tests.serve.soak --ledger FILE [--requests N] [--seconds S]`.

Requests of many kinds at once, some of them dropped midway, each with an answer that is known. A round appends one line
to the ledger; a run that was killed goes on behind the last one. Exits 1 if anything in the ledger is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.serve import AsyncLLM

#: Small enough a pool that requests are preempted and cached prefixes evicted.
CONFIG = EngineConfig(max_num_seqs=32, max_num_batched_tokens=256, max_model_len=128, num_blocks=129)
_AT_ONCE = 48
_NUM_KINDS = 400
_DROPPED = 0.1
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Kind:
    """One request of the soak and its answer.

    Attributes:
        prompt, params: the request.
        expected: token ids and text of each sample.
    """

    prompt: list[int]
    params: SamplingParams
    expected: list[tuple[tuple[int, ...], str]]


def kinds_of(llm: LLM, count: int = _NUM_KINDS) -> list[Kind]:
    """Returns requests of every kind, answered one at a time."""
    choose = random.Random(0)
    vocabulary = range(1, 256)
    prefixes = [choose.choices(vocabulary, k=48) for _ in range(8)]
    kinds = []
    for index in range(count):
        changes: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.8, "seed": index},
            {"temperature": 0.8, "seed": index, "top_k": 20, "top_p": 0.9},
            {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 2},
            {"temperature": 0.8, "seed": index, "n": 2},
            {"temperature": 0.0, "stop": ["e", "\n"]},
        ]
        params = SamplingParams(max_tokens=choose.randint(1, 20), **changes[index % len(changes)])
        prefix = choose.choice(prefixes) if choose.random() < 0.5 else []
        prompt = prefix + choose.choices(vocabulary, k=choose.randint(1, 40))
        (output,) = llm.generate([prompt], params)
        kinds.append(Kind(prompt, params, [(each.token_ids, each.text) for each in output.outputs]))
    return kinds


def soak(llm: AsyncLLM, kinds: Sequence[Kind], ledger: Path, *, rounds: int, size: int, seconds: float) -> None:
    """Runs what the ledger lacks of so many rounds of `size` requests, for about so many seconds at most."""
    done = len(read(ledger))
    end, run = time.monotonic() + seconds, f"{time.time_ns()} {os.getpid()}"
    compiled = llm.llm.engine.num_compilations
    with ledger.open("a") as lines:
        for index in range(done, rounds):
            if time.monotonic() > end:
                break
            started = time.monotonic()
            counts = asyncio.run(_round(llm, kinds, index, size))
            while llm.llm.engine.num_unfinished:
                # Those that were dropped last.
                time.sleep(0.01)
            gc.collect()
            line = counts | {
                "run": run,
                "leaked_blocks": llm.llm.engine.cache_stats().used,
                "unfinished": llm.num_unfinished,
                "compilations": llm.llm.engine.num_compilations - compiled,
                "resident_mib": round(_resident_bytes() / _MIB, 2),
                "seconds": round(time.monotonic() - started, 2),
            }
            lines.write(json.dumps(line) + "\n")
            lines.flush()


def read(ledger: Path) -> list[dict[str, Any]]:
    """Returns the rounds of a ledger, and cuts off a line that was written in part."""
    if not ledger.exists():
        return []
    text = ledger.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        ledger.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the sums of a ledger; the memory's slope is that of each process's second half."""
    sums = {
        name: sum(each[name] for each in rounds)
        for name in ("requests", "dropped", "tokens", "wrong", "leaked_blocks", "unfinished", "compilations", "seconds")
    }
    requests, memory = [], []
    runs = list(dict.fromkeys(each["run"] for each in rounds))
    for run in runs:
        own = [each for each in rounds if each["run"] == run]
        # Before that, programs run for the first time.
        own = own[len(own) // 2 :]
        at, used = np.cumsum([each["requests"] for each in own]), np.array([each["resident_mib"] for each in own])
        requests += (at - at.mean()).tolist()
        memory += (used - used.mean()).tolist()
    spread = float(np.dot(requests, requests))
    slope = float(np.dot(requests, memory)) / spread * 10_000 if spread else 0.0
    return sums | {"processes": len(runs), "mib_per_10000_requests": round(slope, 3)}


async def _round(llm: AsyncLLM, kinds: Sequence[Kind], index: int, size: int) -> dict[str, int]:
    choose = random.Random(index)
    counts = {"requests": size, "dropped": 0, "tokens": 0, "wrong": 0}
    waiting = iter([(choose.choice(kinds), choose.random() < _DROPPED) for _ in range(size)])

    async def work() -> None:
        for kind, drop in waiting:
            said: list[tuple[tuple[int, ...], str]] = [((), "") for _ in kind.expected]
            async with contextlib.aclosing(llm.stream(kind.prompt, kind.params)) as updates:
                update = None
                async for update in updates:
                    tokens, text = said[update.new.index]
                    said[update.new.index] = (tokens + update.new.token_ids, text + update.new.text)
                    if drop:
                        break
            counts["tokens"] += sum(len(tokens) for tokens, _ in said)
            output = update.output if update is not None and update.finished else None
            if output is not None:
                right = said == [(each.token_ids, each.text) for each in output.outputs] == kind.expected
            else:
                counts["dropped"] += 1
                right = drop and all(
                    tokens == wanted[: len(tokens)] and full.startswith(text)
                    for (tokens, text), (wanted, full) in zip(said, kind.expected, strict=True)
                )
            counts["wrong"] += not right

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_AT_ONCE):
            tasks.create_task(work())
    return counts


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Soaks the embedded model and prints the ledger's sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end about then, to go on another time")
    arguments = parser.parse_args()
    size = 500
    with AsyncLLM(LLM(config=CONFIG)) as llm:
        llm.llm.engine.warmup()
        rounds = -(-arguments.requests // size)
        soak(llm, kinds_of(llm.llm), arguments.ledger, rounds=rounds, size=size, seconds=arguments.seconds)
    sums = summary(read(arguments.ledger))
    print(json.dumps(sums, indent=2))
    return int(any(sums[name] for name in ("wrong", "leaked_blocks", "unfinished", "compilations")))


if __name__ == "__main__":
    sys.exit(main())
