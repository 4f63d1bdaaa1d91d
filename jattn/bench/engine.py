"""Decode steps, first tokens and throughput of the generation loop, with random weights.

Tokens before the measured part are not computed: the pool holds random keys and values, and the prefix cache takes them
for the prompts'. A row therefore compiles only the programs that it measures.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from flax import nnx

from jattn.bench.collector import without_old_objects
from jattn.bench.measure import jax_copy_bytes_per_second, profiled
from jattn.bench.report import HIDDEN
from jattn.bench.runner import Benchmark, sizes
from jattn.bench.shapes import normal, random_decoder, shape_config, step_bytes
from jattn.llm.arguments import engine_fields
from jattn.llm.engine import EngineConfig, Outbox, SamplingParams, open_engine
from jattn.llm.engine.clients.replicas import AnyEngine
from jattn.llm.engine.options.defaults import default_config
from jattn.llm.engine.request.lora import prefix_salt
from jattn.llm.load.kv_scales import cached_spec
from jattn.llm.models import Adapters, Decoder, ModelConfig, quantize_fp8
from torch_core.base.errors import JattnError

_BLOCK_SIZE = 16
# Runs of a program until its time is stable: the first compiles it, in the second XLA builds its graph (8 ms).
_UNCOUNTED = 2


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One load under one group of settings; `details` are times by kernel of three steps, if they were profiled.

    `compile_seconds` are those before the measured part, `late_seconds` those within it, which should be 0. `error` is
    the reason why the load was refused; there are no numbers then. `bytes_ms` are the milliseconds that a large copy
    takes for the bytes of a decode step.
    """

    load: str
    median: float
    unit: str
    rounds: tuple[float, ...]
    bytes_ms: float | None
    compile_seconds: float
    late_seconds: float
    settings: str
    details: str | None = field(default=None, metadata=HIDDEN)
    error: str | None = field(default=None, metadata=HIDDEN)


def run(
    *,
    shape: Literal["70b", "8b", "nemotron-h-8b", "qwen3.5-9b", "falcon-h1-7b", "tiny", "tiny-hybrid"] = "8b",
    decode: Sequence[str] = ("1x1024", "64x2048", "256x512"),
    prompt: Sequence[int] = (8192,),
    hits: Sequence[str] = ("7168x64",),
    throughput: Sequence[str] = ("512x512x128",),
    groups: Sequence[str] = (),
    startup: bool = False,
    new_tokens: int = 64,
    rounds: int = 3,
    batched_tokens: int | None = None,
    settings: Sequence[str] = ("",),
    cut: int = 1,
    fp8_weights: bool = False,
    adapters: int = 0,
    rank: int = 16,
    profile: Path | None = None,
) -> Iterator[EngineRow]:
    """Yields a row for each load and each group of settings, with random weights.

    They are normal numbers of deviation 0.02, in norms too; at a card's power limit their bits count.

    Args:
        shape: shape of the model: Llama 3.1's of 70B and 8B, or one whose layers keep a state.
        decode: SEQUENCESxCONTEXT of each row: milliseconds of a decode step.
        prompt: tokens of a prompt that is alone: milliseconds to its first token.
        hits: CACHEDxNEW tokens of a prompt that is alone: milliseconds to its first token.
        throughput: REQUESTSxINxOUT of each row: output tokens per second of requests that arrive together. If the pool
            cannot hold all of them, some wait; the text below the table then has its size.
        groups: GROUPSxSAMPLESxPROMPT of each row: milliseconds of a decode step with cascade attention, and without.
        startup: first, the seconds from the start of this process to a first answer, all programs compiled.
        new_tokens: decoded tokens of each sequence.
        rounds: timed rounds of a row, after the warm-up.
        batched_tokens: most tokens of a step; None for the default of an engine on this machine.
        settings: fields of EngineConfig with values in JSON, a group of rows for each: kv_cache_dtype="fp8",seed=1.
        cut: devices that the weights are sharded over.
        fp8_weights: linear layers multiply in fp8.
        adapters: low-rank adapters, which sequences have in turns: each decode and prompt row once more, with them.
        rank: their rank.
        profile: a folder for traces; adds the kernels' times of decode rows.
    """
    fields_of = {text: settings_of(text) for text in settings}
    mesh = jax.make_mesh((cut,), ("tp",)) if cut > 1 else None
    # Before the model fills the memory.
    copied = jax_copy_bytes_per_second() if mesh is None and jax.default_backend() == "gpu" else None
    model = random_decoder(shape_config(shape), mesh)
    if fp8_weights:
        quantize_fp8(model)
    batched_tokens = batched_tokens or default_config(model).max_num_batched_tokens
    bench = _Bench(model, batched_tokens, new_tokens, rounds, profile)
    tuned = replace(bench, adapters=random_adapters(model.config, rank) if adapters else None)
    of_tuned = {"enable_lora": True, "max_lora_rank": rank}
    for number, (text, fields) in enumerate(fields_of.items()):
        chosen = fields | ({} if mesh is None else {"mesh": mesh})
        alone = chosen | {"enable_cascade_attention": False}
        rows: list[tuple[str, Callable[..., _Measured], dict[str, Any], list[int]]] = []
        rows += [("start-up", bench.startup, chosen, [])] if startup and not number else []
        for load in decode:
            rows += [(f"decode {load}", bench.decode, chosen, sizes(load))]
            count = min(adapters, sizes(load)[0])
            options = chosen | of_tuned | {"max_loras": count}
            rows += [(f"decode {load}, {count} adapters", tuned.decode, options, sizes(load))] if count else []
        rows += [(f"hit {load}", bench.hit, chosen, sizes(load)) for load in hits]
        for num_tokens in prompt:
            rows += [(f"prompt {num_tokens}", bench.hit, chosen, [0, num_tokens])]
            if adapters:
                rows += [(f"prompt {num_tokens}, 1 adapter", tuned.hit, chosen | of_tuned, [0, num_tokens])]
        for load in groups:
            rows += [(f"groups {load}", bench.groups, chosen, sizes(load))]
            rows += [(f"groups {load}, each alone", bench.groups, alone, sizes(load))]
        rows += [(f"throughput {load}", bench.throughput, chosen, sizes(load)) for load in throughput]
        name = text or "defaults"
        for load, measured, options, numbers in rows:
            try:
                values, unit, before, late, details = measured(options, *numbers)
            except JattnError as error:
                # Such as a pool that does not fit into memory: the rows before and after it have numbers.
                nan = math.nan
                yield EngineRow(load, nan, "-", (), None, nan, nan, name, error=f"{load} with {name}: {error}")
                continue
            details = None if details is None else f"{load}: {details}"
            moved = (
                bench.bytes_ms(copied, chosen, *numbers) if copied is not None and measured == bench.decode else None
            )
            yield EngineRow(load, statistics.median(values), unit, tuple(values), moved, before, late, name, details)


def settings_of(text: str) -> dict[str, Any]:
    """Returns the fields of `EngineConfig` in a text such as kv_cache_dtype="fp8",seed=1."""
    return engine_fields("{" + re.sub(r"(\w+)=", r'"\1":', text) + "}", "--settings")


#: The values of the rounds, their unit, seconds of compilation before and within them, and text below the table.
_Measured: TypeAlias = tuple[list[float], str, float, float, str | None]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@dataclass(frozen=True)
class _Bench:
    model: Decoder
    batched_tokens: int
    new_tokens: int
    rounds: int
    profile: Path | None
    adapters: Adapters | None = None

    def startup(self, settings: dict[str, Any]) -> _Measured:
        """Returns the seconds of this process until a first answer, after `warmup`, and the seconds of compilation."""
        jax.block_until_ready(nnx.state(self.model))
        reached = {"weights": _process_seconds()}
        with open_engine(self.model, EngineConfig(**settings)) as engine:
            reached["pool"] = _process_seconds()
            engine.warmup(lambda *_: None)
            reached[f"{len(engine.programs)} programs"] = _process_seconds()
            engine.add(self._prompts(1, _BLOCK_SIZE)[0], _greedy(1))
            _drain(engine)
            details = ", ".join(f"{stage} after {seconds:.1f} s" for stage, seconds in reached.items())
            return [_process_seconds()], "s", engine.compile_seconds, 0.0, details

    def decode(self, settings: dict[str, Any], batch: int, context: int) -> _Measured:
        """Returns the milliseconds of a decode step with this number of sequences."""
        blocks = batch * _blocks(context + 1 + self.new_tokens)
        return self._decode(self._prompts(batch, context + 1), blocks, settings, _greedy(self.new_tokens))

    def bytes_ms(self, bytes_per_second: float, settings: dict[str, Any], batch: int, context: int) -> float:
        """Returns the milliseconds of a decode step's bytes at a speed."""
        spec = cached_spec(self.model.paged_spec, settings.get("kv_cache_dtype", "auto"))
        length = context + self.new_tokens // 2
        return step_bytes(self.model, spec, batch, _blocks(length), block_size=_BLOCK_SIZE) / bytes_per_second * 1e3

    def groups(self, settings: dict[str, Any], groups: int, samples: int, context: int) -> _Measured:
        """Returns those of a step in which samples share a prompt."""
        # A sample has the blocks that it writes for itself, and a copy of the one that the prompt ends in.
        blocks = groups * (_blocks(context + 1) + samples * (_blocks(1 + self.new_tokens) + 1))
        params = SamplingParams(n=samples, temperature=1.0, max_tokens=self.new_tokens, ignore_eos=True)
        return self._decode(self._prompts(groups, context + 1), blocks, settings, params)

    def hit(self, settings: dict[str, Any], cached: int, new: int) -> _Measured:
        """Returns the milliseconds to the first token of a prompt whose first tokens are cached."""
        sizes, params = {"max_num_batched_tokens": max(new, _BLOCK_SIZE)}, _greedy(1)
        rounds = self._prompts(self.rounds + _UNCOUNTED, cached + new)
        with self._engine(1, cached + new + 1, len(rounds) * _blocks(cached + new + 1), sizes | settings) as engine:
            names = self._loaded(engine)
            engine.assume_computed([prompt[:cached] for prompt in rounds if cached])
            times = []
            for prompt in rounds:
                started = time.perf_counter()
                _run(engine, [prompt], params, names)
                times.append((time.perf_counter() - started) * 1e3)
            return times[_UNCOUNTED:], "ms", engine.compile_seconds, 0.0, None

    def throughput(self, settings: dict[str, Any], requests: int, inputs: int, outputs: int) -> _Measured:
        """Returns the output tokens of a second, of requests that all come at once."""
        with self._engine(requests, inputs + outputs, None, settings) as engine:
            # Steps of prompts are full until the last ones, and requests end one after the other.
            params, decodes = _greedy(outputs), _names(r"\d+", "greedy", shared=False)
            engine.warmup(lambda *_: None, wanted=lambda name: decodes(name) or _prompt_tokens(name) >= requests)
            if self.model.paged_spec.states:
                # Steps also end where a snapshot is due, so that their sizes are known only when they have been run.
                _run(engine, self._prompts(requests + 1, inputs)[1:], params)
            with without_old_objects():
                before, started = engine.compile_seconds, time.perf_counter()
                _run(engine, self._prompts(requests, inputs), params)
                seconds, late = time.perf_counter() - started, engine.compile_seconds - before
            pool, wanted = engine.pool_plan, requests * _blocks(inputs + outputs) + 1
            details = (
                f"all requests together need {wanted:,} blocks; the pool has {pool}"
                if pool.num_blocks < wanted
                else None
            )
            return [requests * outputs / seconds], "tokens/s", before, late, details

    def _decode(
        self, prompts: list[list[int]], blocks: int, settings: dict[str, Any], params: SamplingParams
    ) -> _Measured:
        batch = len(prompts) * params.n
        with self._engine(batch, len(prompts[0]) + self.new_tokens, blocks, settings) as engine:
            shared = params.n > 1 and settings.get("enable_cascade_attention") is not False
            kind = "greedy" if params.temperature == 0 else "plain"
            wanted, is_tuned = _names(str(batch), kind, shared=shared), self.adapters is not None
            engine.warmup(lambda *_: None, wanted=lambda name: wanted(name) and ("adapters" in name) == is_tuned)
            names = self._loaded(engine)
            # All but one token of each prompt: the rest is one more step of decoding.
            salts = [prefix_salt(None, adapter=engine.adapters.of(name)) for name in names]
            engine.assume_computed([prompt[:-1] for prompt in prompts], salts)
            _step_ms(engine, prompts, params, names)
            before = engine.compile_seconds
            times = [_step_ms(engine, prompts, params, names) for _ in range(self.rounds)]
            late = engine.compile_seconds - before
            kernels = None
            if self.profile is not None:
                folder = self.profile / f"{batch}x{len(prompts[0]) - 1}"
                _start(engine, prompts, params, names)
                # With steps already in flight the device has no pause at the beginning.
                kernels = f"\n{profiled(folder, lambda: [engine.step() for _ in range(3)])}"
                _drain(engine)
            return times, "ms a step", before, late, kernels

    def _engine(self, batch: int, length: int, blocks: int | None, settings: dict[str, Any]) -> AnyEngine:
        """Opens an engine whose pool has these blocks; with None, the engine fits the pool to the free memory."""
        sizes: dict[str, Any] = {
            "block_size": _BLOCK_SIZE,
            "max_num_seqs": batch,
            "max_num_batched_tokens": max(self.batched_tokens, batch),
            "max_model_len": length,
            "num_blocks": None if blocks is None else blocks + 1,
        }
        return open_engine(self.model, EngineConfig(**(sizes | settings)))

    def _loaded(self, engine: AnyEngine) -> list[str | None]:
        """Loads as many adapters as have room, which differ in their memory alone; returns their names, or None."""
        if self.adapters is None:
            return [None]
        names: list[str | None] = [f"adapter {index}" for index in range(engine.adapters.max_loras)]
        for name in filter(None, names):
            engine.add_lora(name, self.adapters, follow=False)
        return names

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        return (
            np.random.default_rng((count, length)).integers(0, self.model.config.vocab_size, (count, length)).tolist()
        )


def random_adapters(config: ModelConfig, rank: int) -> Adapters:
    """Returns an adapter with random numbers."""
    adapters = Adapters(config, rank=rank, rngs=nnx.Rngs(0))
    for layer in adapters.layers:
        for module in layer.values():
            module["lora_b"][...] = normal(module["lora_b"].shape, config.dtype, None)(jax.random.key(0))
    return adapters


def _start(
    engine: AnyEngine, prompts: list[list[int]], params: SamplingParams, names: Sequence[str | None]
) -> list[Any]:
    """Adds a request for each prompt and returns all samples, each with a token at least."""
    added = zip(prompts, itertools.cycle(names), strict=False)
    prepared = [engine.new_request(prompt, params, lora=name) for prompt, name in added]
    engine.queue(prepared)
    requests = [sample for request in prepared for sample in request.samples]
    while not all(request.output_token_ids for request in requests):
        engine.step()
    return requests


def _step_ms(engine: AnyEngine, prompts: list[list[int]], params: SamplingParams, names: Sequence[str | None]) -> float:
    """Returns the milliseconds of a step from where all decode to where the first one ends."""
    with without_old_objects():
        requests = _start(engine, prompts, params, names)
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


def _run(
    engine: AnyEngine, prompts: list[list[int]], params: SamplingParams, names: Sequence[str | None] = (None,)
) -> None:
    """Runs requests to their end, as `LLM` does."""
    outbox = Outbox()
    added = zip(prompts, itertools.cycle(names), strict=False)
    engine.queue([engine.new_request(prompt, params, lora=name, outbox=outbox) for prompt, name in added])
    while engine.wait(outbox):
        pass


def _drain(engine: AnyEngine) -> None:
    while engine.num_unfinished:
        engine.step()


def _names(num_seqs: str, kind: str, *, shared: bool) -> Callable[[str], bool]:
    """Returns a test for the names of decode steps; on a CPU greedy steps have no name of their own."""
    kind = "plain" if jax.default_backend() == "cpu" else kind
    pattern = re.compile(rf"{num_seqs} sequences, \d+ tokens, queries up to 1, (.*, )?{kind}")
    return lambda name: bool(pattern.fullmatch(name)) and (shared or "shared prefixes" not in name)


def _prompt_tokens(name: str) -> int:
    """Returns the tokens of a step with greedy prompts; 0 of others."""
    kind = "plain" if jax.default_backend() == "cpu" else "greedy"
    found = re.fullmatch(rf"\d+ sequences, (\d+) tokens, queries up to \1, {kind}", name)
    return int(found[1]) if found else 0


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // _BLOCK_SIZE)


BENCHMARK = Benchmark(
    "engine", __doc__, run, may_be_empty=("decode", "prompt", "hits", "throughput", "groups", "settings")
)
