"""One of two processes that generate with layers that keep a state: `python -m tests.engine.followed PORT PROCESS`.

Process 0 prints its tokens: of prompts with a common prefix, whose snapshots are copied, of two samples of a prompt,
of a pool that holds back or preempts requests, and with guessed tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace

from jattn.llm.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig, join
from jattn.llm.models import Decoder
from tests.engine.test_states_on_meshes import SIZES, decoder

# Few programs: compiling them takes longest.
CONFIG = EngineConfig(**SIZES, num_scheduler_steps=1)
GUESSES = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1)
CASES = {
    "plain": CONFIG,
    "small pool": replace(CONFIG, num_blocks=18),
    "guesses": replace(CONFIG, speculative_config=GUESSES),
}
COMMON = list(range(30, 46))
PROMPTS = [[*COMMON, *range(start, start + 3)] for start in (1, 20, 40, 60, 80)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TWO = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=8, ignore_eos=True)


def said(engine: Engine) -> list[list[int]]:
    """Returns the tokens behind each prompt, each twice (the second time after hits), and those of two samples."""
    found: list[list[int]] = []
    for params in (GREEDY, GREEDY, TWO):
        added = [engine.add(prompt, params) for prompt in PROMPTS]
        while engine.num_unfinished:
            engine.step()
        found.extend(sample.output_token_ids for request in added for sample in request.samples)
    return found


def engines(model: Decoder, **options: int) -> Iterator[tuple[str, Engine]]:
    """Yields the engine of each case."""
    for name, config in CASES.items():
        yield name, Engine(model, replace(config, **options))


def main(port: str, process: int) -> None:
    """Generates with every engine, or follows who does."""
    join(f"127.0.0.1:{port}", 2, process)
    found: dict[str, list[list[int]]] = {}
    for name, engine in engines(decoder(), tensor_parallel_size=2):
        if process == 0:
            found[name] = said(engine)
            engine.close()
        else:
            engine.follow()
    if process == 0:
        print("found", json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
