"""`jattn bench engine`: decode steps, first tokens and throughput of the generation loop, with random weights.

What lies in front of the measured part is not computed: the pool holds noise, and the prefix cache is told that it is
the prompts. So a row compiles the programs that it measures, and no others.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jattn.bench.kernels import profiled
from jattn.llm.engine import EngineConfig, SamplingParams, open_engine
from jattn.llm.engine.clients.replicas import AnyEngine
from jattn.llm.models import (
    Decoder,
    ModelConfig,
    TensorParallel,
    decoder_of,
    parameter_shards,
    quantize_fp8,
    tensor_parallel_of,
)
from jattn.table import aligned

__all__ = ["SHAPES", "main", "random_decoder"]

_LARGE = ModelConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=16384,
    dtype="bfloat16",
)
#: Llama 3.1's shapes of 8B and 70B, and one for trying this out on a CPU.
SHAPES = {
    "70b": _LARGE,
    "8b": replace(_LARGE, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
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
# Runs of a program until it is what it stays: the first compiles, in the second XLA makes a graph of it (8 ms).
_UNCOUNTED = 2


class _Measured(NamedTuple):
    """What a row says.

    Attributes:
        values: of each round.
        unit: of them.
        compile_seconds: before it.
        late: seconds of compiling within it, which should be 0.
    """

    values: list[float]
    unit: str
    compile_seconds: float
    late: float = 0.0


def main(argv: Sequence[str]) -> None:
    """Prints a row for each shape of load and each of the engine's settings."""
    parser = argparse.ArgumentParser(prog="jattn bench engine", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--decode", nargs="*", default=["1x1024", "64x2048", "256x512"], help="SEQUENCESxCONTEXT")
    parser.add_argument("--prompt", type=int, nargs="*", default=[8192], help="tokens of a prompt, alone")
    parser.add_argument("--hits", nargs="*", default=["7168x64"], help="CACHEDxNEW tokens of a prompt, alone")
    parser.add_argument("--throughput", nargs="*", default=["512x512x128"], help="REQUESTSxINxOUT")
    parser.add_argument(
        "--groups",
        nargs="*",
        default=[],
        help="GROUPSxSAMPLESxPROMPT, decoding, with and without attending a prompt once",
    )
    parser.add_argument(
        "--startup",
        action="store_true",
        help="seconds from the start of this process to a first answer, all programs compiled; first of all rows",
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="decoded by each sequence (64)")
    parser.add_argument("--rounds", type=int, default=3, help="of a row, after those that warm it up (3)")
    parser.add_argument("--batched-tokens", type=int, default=2048, help="of a step (2048)")
    parser.add_argument(
        "--settings", nargs="*", default=[""], help="of EngineConfig, as in steps_in_flight=1,scrub_on_free=true"
    )
    parser.add_argument(
        "--cut", type=int, default=1, help="devices over which a model is made that one does not hold (1)"
    )
    parser.add_argument("--fp8-weights", action="store_true", help="linear layers that multiply in fp8")
    parser.add_argument("--profile", type=Path, help="a folder for traces; time by kernel behind each decode row")
    options = parser.parse_args(argv)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.shape}, random weights", flush=True)
    mesh = jax.make_mesh((options.cut,), ("tp",)) if options.cut > 1 else None
    model = random_decoder(SHAPES[options.shape], mesh)
    if options.fp8_weights:
        quantize_fp8(model)
    bench = _Bench(model, options.batched_tokens, options.new_tokens, options.rounds, options.profile)
    for number, settings in enumerate(options.settings):
        chosen = {
            name: json.loads(value) for name, _, value in (each.partition("=") for each in settings.split(",") if each)
        }
        if mesh is not None:
            chosen["mesh"] = mesh
        if options.startup and not number:
            _tell(settings, "start-up", bench.startup(chosen))
        for load in options.decode:
            _tell(settings, f"decode {load}", bench.decode(chosen, *_sizes(load)))
        for load in options.hits:
            _tell(settings, f"hit {load}", bench.hit(chosen, *_sizes(load)))
        for num_tokens in options.prompt:
            _tell(settings, f"prompt {num_tokens}", bench.hit(chosen, 0, num_tokens))
        for load in options.groups:
            _tell(settings, f"groups {load}", bench.groups(chosen, *_sizes(load)))
            apart = bench.groups(chosen | {"enable_cascade_attention": False}, *_sizes(load))
            _tell(settings, f"groups {load}, each alone", apart)
        for load in options.throughput:
            _tell(settings, f"throughput {load}", bench.throughput(chosen, *_sizes(load)))


def random_decoder(config: ModelConfig, mesh: Mesh | None = None) -> Decoder:
    """Returns a decoder with random weights, each made where it stays: on one device, or cut over a mesh axis "tp"."""
    parallel = None if mesh is None else tensor_parallel_of(mesh)
    shards = parameter_shards(config, parallel or TensorParallel(size=1))
    keys = jax.random.split(jax.random.key(0), len(shards))
    values = {
        path: _normal(each.cut_shape, config.dtype, None if mesh is None else NamedSharding(mesh, each.spec))(key)
        for key, (path, each) in zip(keys, shards.items(), strict=True)
    }
    return decoder_of(config, values, None, parallel)


@functools.lru_cache
def _normal(shape: tuple[int, ...], dtype: str, sharding: NamedSharding | None) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype) * 0.02, out_shardings=sharding)


class _Bench:
    def __init__(self, model: Decoder, batched_tokens: int, new_tokens: int, rounds: int, profile: Path | None) -> None:
        self._model, self._vocab = model, model.config.vocab_size
        self._batched_tokens, self._new_tokens, self._rounds = batched_tokens, new_tokens, rounds
        self._profile = profile

    def startup(self, settings: dict[str, Any]) -> _Measured:
        """Returns the seconds that this process took to a first answer, after `warmup`, and what of them compiled."""
        with open_engine(self._model, EngineConfig(**settings)) as engine:
            engine.warmup(lambda *_: None)
            engine.add(self._prompts(1, _BLOCK_SIZE)[0], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
            _drain(engine)
            return _Measured([_process_seconds()], "s", engine.compile_seconds)

    def decode(self, settings: dict[str, Any], batch: int, context: int) -> _Measured:
        """Returns the milliseconds of a decode step with so many sequences."""
        blocks = batch * _blocks(context + 1 + self._new_tokens)
        params = SamplingParams(temperature=0.0, max_tokens=self._new_tokens, ignore_eos=True)
        return self._decode(self._prompts(batch, context + 1), blocks, settings, params)

    def groups(self, settings: dict[str, Any], groups: int, samples: int, context: int) -> _Measured:
        """Returns those of a step in which samples share a prompt."""
        # A sample has the blocks that it writes for itself, and a copy of the one that the prompt ends in.
        blocks = groups * (_blocks(context + 1) + samples * (_blocks(1 + self._new_tokens) + 1))
        params = SamplingParams(n=samples, temperature=1.0, max_tokens=self._new_tokens, ignore_eos=True)
        return self._decode(self._prompts(groups, context + 1), blocks, settings, params)

    def hit(self, settings: dict[str, Any], cached: int, new: int) -> _Measured:
        """Returns the milliseconds to the first token of a prompt whose first tokens are cached."""
        sizes = {"max_num_batched_tokens": max(new, _BLOCK_SIZE)}
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        rounds = self._prompts(self._rounds + _UNCOUNTED, cached + new)
        with self._engine(1, cached + new + 1, len(rounds) * _blocks(cached + new + 1), sizes | settings) as engine:
            engine.assume_computed([prompt[:cached] for prompt in rounds if cached])
            times = []
            for prompt in rounds:
                started = time.perf_counter()
                engine.add(prompt, params)
                _drain(engine)
                times.append((time.perf_counter() - started) * 1e3)
            return _Measured(times[_UNCOUNTED:], "ms", engine.compile_seconds)

    def throughput(self, settings: dict[str, Any], requests: int, inputs: int, outputs: int) -> _Measured:
        """Returns the output tokens of a second, of requests that all come at once."""
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        with self._engine(requests, inputs + outputs, requests * _blocks(inputs + outputs), settings) as engine:
            # Steps of prompts are full until the last ones, and requests end one after the other.
            decodes = _names(r"\d+", "greedy", shared=False)
            engine.warmup(lambda *_: None, wanted=lambda name: decodes(name) or _prompt_tokens(name) >= requests)
            before, started = engine.compile_seconds, time.perf_counter()
            for prompt in self._prompts(requests, inputs):
                engine.add(prompt, params)
            _drain(engine)
            seconds = time.perf_counter() - started
            late = engine.compile_seconds - before
            return _Measured([requests * outputs / seconds], "tokens/s", before, late)

    def _decode(
        self, prompts: list[list[int]], blocks: int, settings: dict[str, Any], params: SamplingParams
    ) -> _Measured:
        batch = len(prompts) * params.n
        with self._engine(batch, len(prompts[0]) + self._new_tokens, blocks, settings) as engine:
            shared = params.n > 1 and settings.get("enable_cascade_attention") is not False
            kind = "greedy" if params.temperature == 0 else "plain"
            engine.warmup(lambda *_: None, wanted=_names(str(batch), kind, shared=shared))
            # All but a token of each prompt: what is left of it is one more step of decoding.
            engine.assume_computed([prompt[:-1] for prompt in prompts])
            _step_ms(engine, prompts, params)
            before = engine.compile_seconds
            times = [_step_ms(engine, prompts, params) for _ in range(self._rounds)]
            late = engine.compile_seconds - before
            if self._profile is not None:
                folder = self._profile / f"{batch}x{len(prompts[0]) - 1}"
                _start(engine, prompts, params)
                # With what is in flight already the device has no pause at the beginning.
                print(profiled(folder, lambda: [engine.step() for _ in range(3)]), flush=True)
                _drain(engine)
            return _Measured(times, "ms a step", before, late)

    def _engine(self, batch: int, length: int, blocks: int, settings: dict[str, Any]) -> AnyEngine:
        sizes: dict[str, Any] = {
            "block_size": _BLOCK_SIZE,
            "max_num_seqs": batch,
            "max_num_batched_tokens": max(self._batched_tokens, batch),
            "max_model_len": length,
            "num_blocks": blocks + 1,
        }
        return open_engine(self._model, EngineConfig(**(sizes | settings)))

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        return np.random.default_rng((count, length)).integers(0, self._vocab, (count, length)).tolist()


def _start(engine: AnyEngine, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """Adds a request for each prompt and returns all samples, each with a token at least."""
    requests = [sample for prompt in prompts for sample in engine.add(prompt, params).samples]
    while not all(request.output_token_ids for request in requests):
        engine.step()
    return requests


def _step_ms(engine: AnyEngine, prompts: list[list[int]], params: SamplingParams) -> float:
    """Returns the milliseconds of a step from where all decode to where the first one ends."""
    requests = _start(engine, prompts, params)
    started, before = time.perf_counter(), sum(len(request.output_token_ids) for request in requests)
    while all(request.finish_reason is None for request in requests):
        engine.step()
    seconds = time.perf_counter() - started
    tokens = sum(len(request.output_token_ids) for request in requests) - before
    _drain(engine)
    return seconds * 1e3 * len(requests) / tokens


def _process_seconds() -> float:
    """Returns how long this process has been there."""
    # The 22nd field, in ticks since the machine's start; the second may have spaces and ends with a parenthesis.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _drain(engine: AnyEngine) -> None:
    while engine.num_unfinished:
        engine.step()


def _names(num_seqs: str, kind: str, *, shared: bool) -> Callable[[str], bool]:
    """Returns what knows the names of decode steps; on a CPU greedy ones are as plain as the others."""
    kind = "plain" if jax.default_backend() == "cpu" else kind
    pattern = re.compile(rf"{num_seqs} sequences, \d+ tokens, queries up to 1, (.*, )?{kind}")
    return lambda name: bool(pattern.fullmatch(name)) and (shared or "shared prefixes" not in name)


def _prompt_tokens(name: str) -> int:
    """Returns the tokens of a step with prompts; 0 of others."""
    found = re.fullmatch(r"\d+ sequences, (\d+) tokens, queries up to \1, plain", name)
    return int(found[1]) if found else 0


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // _BLOCK_SIZE)


def _sizes(load: str) -> Any:
    return [int(size) for size in load.split("x")]


def _tell(settings: str, load: str, row: _Measured) -> None:
    value = f"{statistics.median(row.values):.2f} {row.unit}"
    rounds = " ".join(f"{each:.2f}" for each in row.values) if len(row.values) > 1 else ""
    late = f", {row.late:.0f} s of it late" if row.late else ""
    columns = (load, value, rounds, f"compiled {row.compile_seconds + row.late:.0f} s{late}", settings or "defaults")
    print("  ".join(aligned([tuple(column for column in columns if column)])), flush=True)
