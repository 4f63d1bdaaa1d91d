"""`jattn bench engine`: decode steps, first tokens and throughput of the generation loop, with random weights."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jattn.engine import EngineConfig, SamplingParams, open_engine
from jattn.engine.replicas import AnyEngine
from jattn.models import Decoder, ModelConfig
from jattn.table import aligned

__all__ = ["SHAPES", "main", "random_decoder"]

#: Llama 3.1's 8B shape, and one for trying this out on a CPU.
SHAPES = {
    "8b": ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=16384,
        dtype="bfloat16",
    ),
    "tiny": ModelConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        dtype="float32",
    ),
}
_BLOCK_SIZE = 16
# A number, its unit, and the seconds of compiling before it.
_Measured = tuple[float, str, float]


def main(argv: Sequence[str]) -> None:
    """Prints a row for each shape of load and each of the engine's settings."""
    parser = argparse.ArgumentParser(prog="jattn bench engine", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--decode", nargs="*", default=["1x1024", "64x2048", "256x512"], help="SEQUENCESxCONTEXT")
    parser.add_argument("--prompt", type=int, nargs="*", default=[8192], help="tokens of a prompt, alone")
    parser.add_argument("--throughput", nargs="*", default=["512x512x128"], help="REQUESTSxINxOUT")
    parser.add_argument("--groups", nargs="*", default=[], help="GROUPSxSAMPLESxPROMPT, decoding")
    parser.add_argument("--new-tokens", type=int, default=64, help="decoded by each sequence (64)")
    parser.add_argument("--batched-tokens", type=int, default=2048, help="of a step (2048)")
    parser.add_argument(
        "--settings", nargs="*", default=[""], help="of EngineConfig, as in steps_in_flight=1,scrub_on_free=true"
    )
    options = parser.parse_args(argv)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.shape}, random weights", flush=True)
    bench = _Bench(SHAPES[options.shape], options.batched_tokens, options.new_tokens)
    for settings in options.settings:
        chosen = {
            name: json.loads(value) for name, _, value in (each.partition("=") for each in settings.split(",") if each)
        }
        for load in options.decode:
            _tell(settings, f"decode {load}", *bench.decode(chosen, *_sizes(load)))
        for load in options.groups:
            _tell(settings, f"groups {load}", *bench.groups(chosen, *_sizes(load)))
        for num_tokens in options.prompt:
            _tell(settings, f"prompt {num_tokens}", *bench.prompt(chosen, num_tokens))
        for load in options.throughput:
            _tell(settings, f"throughput {load}", *bench.throughput(chosen, *_sizes(load)))


def random_decoder(config: ModelConfig) -> Decoder:
    """Returns a decoder with random weights, each made where it stays."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    filled = [jax.random.normal(key, leaf.shape, leaf.dtype) * 0.02 for key, leaf in zip(keys, leaves, strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(treedef, filled))


class _Bench:
    def __init__(self, config: ModelConfig, batched_tokens: int, new_tokens: int) -> None:
        self._model, self._vocab = random_decoder(config), config.vocab_size
        self._batched_tokens, self._new_tokens = batched_tokens, new_tokens

    def decode(self, settings: dict[str, Any], batch: int, context: int) -> _Measured:
        """Returns the milliseconds of a decode step with so many sequences."""
        return self._decode(self._prompts(batch, context), settings)

    def groups(self, settings: dict[str, Any], groups: int, samples: int, context: int) -> _Measured:
        """Returns those of a step in which samples share a prompt."""
        prompts = [prompt for prompt in self._prompts(groups, context) for _ in range(samples)]
        return self._decode(prompts, settings, temperature=1.0)

    def prompt(self, settings: dict[str, Any], num_tokens: int) -> _Measured:
        """Returns the milliseconds to the first token of a prompt in one piece."""
        with self._engine(1, num_tokens + 1, settings | {"max_num_batched_tokens": num_tokens}) as engine:
            times = []
            for prompt in self._prompts(4, num_tokens):
                started = time.perf_counter()
                self._run(engine, [prompt], 1)
                times.append((time.perf_counter() - started) * 1e3)
            return statistics.median(times[1:]), "ms", engine.compile_seconds

    def throughput(self, settings: dict[str, Any], requests: int, inputs: int, outputs: int) -> _Measured:
        """Returns the output tokens of a second, of requests that all come at once."""
        with self._engine(requests, inputs + outputs, settings) as engine:
            for each in self._prompts(requests, inputs), self._prompts(requests, inputs, seed=1):
                before, started = engine.compile_seconds, time.perf_counter()
                self._run(engine, each, outputs)
                seconds = time.perf_counter() - started
            if engine.compile_seconds != before:
                print("  (something was compiled in the measured run)")
            return requests * outputs / seconds, "tokens/s", engine.compile_seconds

    def _decode(self, prompts: list[list[int]], settings: dict[str, Any], temperature: float = 0.0) -> _Measured:
        with self._engine(len(prompts), len(prompts[0]) + self._new_tokens, settings) as engine:
            # The first round compiles and fills the prefix cache; in the second all decode together at once.
            self._run(engine, prompts, self._new_tokens, temperature)
            requests = self._add(engine, prompts, self._new_tokens, temperature)
            while not all(request.output_token_ids for request in requests):
                engine.step()
            started, before = time.perf_counter(), sum(len(request.output_token_ids) for request in requests)
            while all(request.finish_reason is None for request in requests):
                engine.step()
            seconds = time.perf_counter() - started
            tokens = sum(len(request.output_token_ids) for request in requests) - before
            while engine.num_unfinished:
                engine.step()
            return seconds * 1e3 * len(prompts) / tokens, "ms a step", engine.compile_seconds

    def _engine(self, batch: int, length: int, settings: dict[str, Any]) -> AnyEngine:
        sizes: dict[str, Any] = {
            "block_size": _BLOCK_SIZE,
            "max_num_seqs": batch,
            "max_num_batched_tokens": max(self._batched_tokens, batch),
            "max_model_len": length,
            "num_blocks": batch * -(-length // _BLOCK_SIZE) + 1,
        }
        return open_engine(self._model, EngineConfig(**(sizes | settings)))

    def _prompts(self, count: int, length: int, seed: int = 0) -> list[list[int]]:
        return np.random.default_rng((seed, count, length)).integers(0, self._vocab, (count, length)).tolist()

    def _add(self, engine: AnyEngine, prompts: list[list[int]], count: int, temperature: float = 0.0) -> list[Any]:
        params = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True)
        return [engine.add(prompt, params) for prompt in prompts]

    def _run(self, engine: AnyEngine, prompts: list[list[int]], count: int, temperature: float = 0.0) -> None:
        self._add(engine, prompts, count, temperature)
        while engine.num_unfinished:
            engine.step()


def _sizes(load: str) -> Any:
    return [int(size) for size in load.split("x")]


def _tell(settings: str, load: str, value: float, unit: str, compile_seconds: float) -> None:
    columns = (load, f"{value:.2f} {unit}", f"compiled {compile_seconds:.0f} s", settings or "defaults")
    print("  ".join(aligned([columns])), flush=True)
