"""Runs scheduled steps on the device: one upload, one compiled program per bucket, sampling included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.llm.engine.adapter_slots import AdapterSlots
from jattn.llm.engine.device.adapters import AdapterMemory
from jattn.llm.engine.device.buckets import Bucket, Cascade, StepBuckets
from jattn.llm.engine.device.placement import Placement
from jattn.llm.engine.device.program import Sampled, jitted_prompt_logprobs
from jattn.llm.engine.device.programs import Programs
from jattn.llm.engine.device.request_arrays import fill_adapters, fill_requests
from jattn.llm.engine.device.routing import RoutingRecord
from jattn.llm.engine.device.tables import SamplerState, Slots, SlotTables
from jattn.llm.engine.device.warmup import WarmUp
from jattn.llm.engine.device.weights import Weights
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.options.params import SamplingKind
from jattn.llm.engine.request.outputs import Logprobs
from jattn.llm.engine.request.request import Request
from jattn.llm.engine.scheduler import ScheduledRow, ScheduledStep
from jattn.llm.models import Fp8Linear, PagedModel
from jattn.llm.processes import Announce
from jattn.pool import KVPool
from torch_core.base.specs import DTYPE_BYTES
from torch_core.cache import CommittedStep, LayerGroups
from torch_core.metadata import (
    BlockTableCache,
    CommonAttentionMetadata,
    EncoderRow,
    PackedLayout,
    SequenceRow,
    build_common_metadata,
    build_group_metadata,
)

# Prompt tokens whose logits are computed at once.
_PROMPT_LOGPROBS = 64
_OF_REQUESTS = ("token_ids", "sampling", "sample_index")
_NO_STATE = SamplerState(None, None)
# A step without rows, and the runs after which a program takes as long as later.
_EMPTY = ScheduledStep((), CommittedStep(step_id=0))
_FIRST_RUNS = 2


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The log-probabilities of some tokens of a prompt.

    Attributes:
        request: the request that has the prompt.
        start: position of the first token.
        count: number of tokens; later entries of `found` are undefined.
        found: values of the tokens.
    """

    request: Request
    start: int
    count: int
    found: Logprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step, on the device until `read`.

    Attributes:
        tokens: int32[num_decode_steps, max_num_seqs], a column for each row.
        logprobs: log-probabilities of the tokens, int32 and float32[num_decode_steps, num_seqs, ...]; None of a plain
            step.
        prompts: parts of prompts.
    """

    tokens: jax.Array | np.ndarray
    logprobs: Logprobs | None
    prompts: list[PromptPart]

    def read(self, step: ScheduledStep) -> StepResult:
        """Waits for the step; returns numpy arrays, and log-probabilities only if a request wants them.

        Those of prompts are given to their requests.
        """
        for part in self.prompts:
            found = part.found.read()
            for index in range(part.count):
                part.request.prompt_logprobs[part.start + index] = found.at(index)
        logprobs = self.logprobs
        if logprobs is not None and any(row.request.wants_logprobs for row in step.rows):
            return StepResult(np.asarray(self.tokens), logprobs.read(), [])
        return StepResult(np.asarray(self.tokens), None, [])

    def keep_logprobs(self, request: Request, row: int, count: int) -> None:
        """Adds those of a row's first tokens to its request, before the tokens themselves."""
        if self.logprobs is not None and request.wants_logprobs:
            # An exception may have come between the last ones and their tokens.
            del request.logprobs[len(request.output_token_ids) :]
            request.logprobs += [self.logprobs.at((step, row)) for step in range(count)]


class ModelRunner:
    """Holds a model's programs and the pool, and dispatches steps without waiting for them.

    A step's sampled tokens stay on the device, where the next step can read them: an input token of `-1 - row` is the
    token that row `row` of the last step sampled. Not thread-safe.

    Args:
        model: its leaves are captured now.
        pool: the cache arrays; the runner donates them to every step.
        config: sizes of a step.
        placement: the devices.
        layers: the model's cache groups.
        max_blocks: columns of a block table.
        ragged: attention costs by the tokens of a step, and not by its longest row times its rows.
        adapters: the memory of adapters; None without.
        announce: called with each operation before it runs; None in a single process.

    Attributes:
        adapter_slots: which adapter each slot of that memory holds; None without.
        programs: the compiled programs.
        weights: their weights.
        warming: compiles the programs in the background; None without.
        routing: the experts of each cached token, if the engine records them.
    """

    def __init__(
        self,
        model: PagedModel,
        pool: KVPool,
        config: EngineConfig,
        placement: Placement,
        layers: LayerGroups,
        *,
        max_blocks: int,
        ragged: bool,
        adapters: AdapterMemory | None = None,
        announce: Announce | None = None,
    ) -> None:
        self._adapters = adapters
        self.adapter_slots = None if adapters is None else AdapterSlots(config.max_loras, adapters.load)
        self._pool = pool
        self._announce = announce
        self._placement = placement
        self._max_blocks = max_blocks
        self._num_encoder_blocks = -(-model.paged_spec.max_encoder_len // config.block_size)
        self._layers = layers
        self._config = config
        self._num_blocks = pool.num_blocks
        self._element_bytes = DTYPE_BYTES[pool.spec.dtype]
        self._cascade = None if self._num_encoder_blocks else Cascade.of(cast(nnx.Module, model), config, layers)
        self._vocab_size, self._has_inputs = model.paged_spec.vocab_size, bool(model.paged_spec.inputs)
        processors = config.logits_processors or {}
        longest = max(max_blocks * config.tokens_per_block, model.paged_spec.max_encoder_len)
        self._num_logprobs = self._vocab_size if config.max_logprobs < 0 else config.max_logprobs
        self.buckets = StepBuckets(
            config,
            self._cascade,
            num_logprobs=self._num_logprobs,
            max_blocks=max_blocks,
            num_groups=len(layers.groups),
            longest_query=None if ragged else longest,
            num_encoder_blocks=self._num_encoder_blocks,
            num_request_inputs=len(model.paged_spec.inputs),
        )
        # Options of the metadata of each cache group. An encoder's steps have plain tables, those of the first group.
        windows, sizes = (group.sliding_window for group in layers.groups), layers.block_sizes(config.tokens_per_block)
        self._groups: list[dict[str, Any]] = [
            {"cache_group": group or None, "block_size": size, "window_left": None if window is None else window - 1}
            for group, (window, size) in enumerate(zip(windows, sizes, strict=True))
        ]
        self._slots = Slots(
            config.max_num_seqs,
            max_model_len=max_blocks * config.tokens_per_block,
            vocab_size=self._vocab_size,
            processors=tuple(processors),
            placement=placement,
            announce=announce,
        )
        self.warming: WarmUp | None = None
        self._rehearsed: set[Bucket] = set()
        self.routing: RoutingRecord | None = None
        if config.enable_return_routed_experts:
            sizes = pool.num_blocks, config.num_host_blocks, config.tokens_per_block
            self.routing = RoutingRecord(layers, *sizes)
        self._hidden: Any = None
        self._generation: int | None = None
        self.forget()
        self.weights = Weights(cast(nnx.Module, model))
        self._prompt_logprobs = jitted_prompt_logprobs(
            self.weights.structure,
            placement,
            self.weights.specs,
            batch_invariant=config.batch_invariant,
            adapters=None if adapters is None else adapters.layout,
        )
        modules = [module for _, module in nnx.iter_modules(cast(nnx.Module, model))]
        self.programs = Programs(
            self.weights,
            pool,
            placement,
            layers,
            self._slots.shapes,
            self._peers_table,
            config=config,
            spec=model.paged_spec,
            max_blocks=max_blocks,
            multiplies_fp8=any(isinstance(module, Fp8Linear) for module in modules),
            has_branches=any(getattr(module, "has_two_mixers", False) for module in modules),
            adapters=adapters,
        )

    def dispatch(self, step: ScheduledStep) -> StepResult:
        """Starts a step and returns its results, which are still on the device.

        Raises:
            PoolLost: the step failed and took the pool's contents with it.
        """
        bucket, layout = self.buckets.of(step)
        found = bucket if self.warming is None else self.warming.find(bucket)
        if found not in (bucket, None):
            bucket, layout = found, self.buckets.layout(found)
        # Schedule -> metadata: block tables, positions, slots, checked and packed into one buffer.
        buffer = np.zeros(layout.num_elements, np.int32)
        metadata = self._metadata(step, bucket, layout, buffer)
        fill_requests(step, *layout.views(buffer, _OF_REQUESTS))
        if self._has_inputs:
            layout["inputs"].of(buffer)[: len(step.rows)] = [row.request.inputs for row in step.rows]
        if self.adapter_slots is not None and bucket.adapters:
            fill_adapters(step, self.adapter_slots, layout["adapter"].of(buffer))
        state = _NO_STATE
        if bucket.sampler.kind is SamplingKind.FULL:
            state = self._sampler_state(step.rows, layout, buffer)
        if bucket.num_pieces and self._cascade is not None:
            shared = self._cascade.shared(bucket, metadata, layout, self._element_bytes)
            bucket = shared if self.warming is None else self.warming.find(shared) or bucket
        if self._announce is not None:
            masks = state.masks if isinstance(state.masks, np.ndarray) else None
            sizes = {field.name: getattr(bucket, field.name) for field in fields(bucket) if field.name != "sampler"}
            self._announce("step", sizes, int(bucket.sampler.kind), buffer, masks)
        # One upload and one program.
        sampled = self._run(bucket, state, buffer)
        if self.routing is not None:
            self.routing.dispatched(layout, buffer, sampled.experts)
        parts = [] if sampled.hidden is None else self._of_prompts(step.rows, sampled.hidden)
        return StepResult(sampled.tokens, sampled.logprobs, parts)

    def follow(self, what: str, *arguments: Any) -> None:
        """Repeats an operation of process 0's runner, after its announcement: see `jattn.llm.processes`."""
        getattr(self, f"_follow_{what}")(*arguments)

    def _follow_step(self, sizes: dict[str, Any], kind: int, buffer: np.ndarray, masks: np.ndarray | None) -> None:
        bucket = Bucket(**sizes, sampler=self.buckets.samplers[SamplingKind(kind)])
        state = _NO_STATE
        if bucket.sampler.kind is SamplingKind.FULL:
            state = SamplerState(self._slots.tables, self._slots.masks(bucket.num_seqs, ()) if masks is None else masks)
        self._hidden = self._run(bucket, state, buffer).hidden

    @property
    def _peers_table(self) -> jax.Array | None:
        return None if self._peers is None else self._peers.table

    def _follow_slot(self, slot: int, row: list[np.ndarray]) -> None:
        self._slots.load(slot, SlotTables(*row))

    def _follow_prompt(self, rows: np.ndarray, token_ids: np.ndarray, num_logprobs: int) -> None:
        self._predicted(self._hidden, rows, token_ids, num_logprobs)

    def _run(self, bucket: Bucket, state: SamplerState, buffer: np.ndarray) -> Sampled:
        # Compiled after the pool's checks of JAX's settings.
        programs = self.programs
        programs.last.append(bucket)
        sampled, self._last_tokens, state = self._pool.run(
            lambda *operands: (programs.compiled.get(bucket) or programs(bucket))(*operands),
            self.weights.leaves,
            self._last_tokens,
            state,
            buffer,
            self._peers_table,
            self._adapters.arrays if self._adapters is not None and bucket.adapters else None,
        )
        if state.tables is not None:
            self._slots.tables = state.tables
        return sampled

    def _with_encoder(self, step: ScheduledStep) -> tuple[list[SequenceRow], list[EncoderRow] | None]:
        """Returns the rows of a step without the encoder's slots before them, and those slots; or those alone."""
        rows: list[SequenceRow] = []
        encoder_rows: list[EncoderRow] = []
        for row, committed in zip(step.rows, step.committed.rows, strict=True):
            request, blocks = row.request, committed.block_ids
            first = request.num_encoder_slots // self._config.block_size
            length = len(request.encoder_token_ids)
            if step.encodes:
                rows.append(SequenceRow(blocks[:first], 0, length, committed.seq_id))
            else:
                rows.append(SequenceRow(blocks[first:], row.start, row.num_new_tokens, committed.seq_id))
                encoder_rows.append(EncoderRow(blocks[:first], length))
        return rows, None if step.encodes else encoder_rows

    def compile(self, report: Callable[[int, int, str], None], wanted: Callable[[str], bool] | None = None) -> None:
        """Compiles every program that a step can need, or the steps whose names are wanted; see `Programs.compile`."""
        with jax.transfer_guard("allow"):
            self.programs.compile(self._buckets_of(wanted), report)

    def warmup(self, report: Callable[[int, int, str], None], wanted: Callable[[str], bool] | None = None) -> None:
        """Like `compile`, with the programs around the steps if no names are asked for."""
        self.compile(report, wanted)
        if wanted is None:
            self.warm_small_programs()

    def start_warmup(
        self,
        report: Callable[[int, int, str], None],
        finished: Callable[[], object],
        wanted: Callable[[str], bool] | None,
    ) -> None:
        """Compiles those programs in the background; see `WarmUp`."""
        self.end_warmup()
        self.warming = WarmUp(self.programs, self._buckets_of(wanted), report, finished)

    def _buckets_of(self, wanted: Callable[[str], bool] | None) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets.all() if wanted is None or wanted(str(bucket)))

    def end_warmup(self) -> None:
        """Ends the background's work; steps compile the programs that are missing."""
        if self.warming is not None:
            self.warming.end()
            self.warming = None

    def rehearse_next(self) -> bool:
        """Runs a compiled program of a GPU on steps without rows, if one was not; no step may be in flight.

        The first run loads the kernels and the second records a graph, for 10 to 100 ms that a request would wait.
        """
        if not self.programs.on_gpu or self._announce is not None:
            return False
        for bucket in tuple(self.programs.compiled):
            if bucket not in self._rehearsed and not (bucket.encodes or bucket.piece_tokens or bucket.adapters):
                self._rehearsed.add(bucket)
                for _ in range(_FIRST_RUNS):
                    self._run_empty(bucket)
                jax.block_until_ready(self._last_tokens)
                return True
        return False

    def _run_empty(self, bucket: Bucket) -> None:
        layout = self.buckets.layout(bucket)
        buffer, state = np.zeros(layout.num_elements, np.int32), _NO_STATE
        self._metadata(_EMPTY, bucket, layout, buffer)
        if bucket.sampler.kind is SamplingKind.FULL:
            state = self._sampler_state((), layout, buffer)
        with jax.transfer_guard("allow"):
            self._run(bucket, state, buffer)

    def warm_small_programs(self) -> None:
        """Compiles the programs around the steps: tables, log-probabilities of prompts, moves of blocks."""
        buckets = self._buckets_of(None)
        with jax.transfer_guard("allow"):
            self._slots.warmup({bucket.num_seqs for bucket in buckets})
            self._warm_prompt_logprobs(buckets)
            if self._adapters is not None:
                self._adapters.warmup()
            self._pool.warmup(
                copies=self._config.max_num_seqs,
                scrubs=self._pool.num_blocks if self._config.scrub_on_free else 0,
                swaps=min(self._max_blocks, self._config.num_host_blocks),
            )

    @property
    def is_ready(self) -> bool:
        """Whether every step has a program that serves it, or no background compiles them."""
        return self.warming is None or self.warming.is_ready

    def is_served(self, rows: Sequence[ScheduledRow]) -> bool:
        """Returns whether a step of these rows with prompts need not wait for the background to compile a program."""
        if self.warming is None:
            return True
        bucket = self.buckets.of_prompts(rows)
        return self.warming.find(bucket) is not None or not self.warming.awaits(bucket)

    def step_bytes(self) -> int:
        """Returns the bytes that the largest step needs on a device in addition to weights and caches."""
        with jax.transfer_guard("allow"):
            return max(map(self.programs.step_bytes, self.buckets.largest()))

    def describe(self, step: ScheduledStep) -> dict[str, str]:
        """Returns the program of a step, for a report."""
        return {"program": str(self.buckets.of(step)[0])}

    def forget(self) -> None:
        """Drops the tokens and tables of earlier steps."""
        with jax.transfer_guard_host_to_device("allow"):
            self._last_tokens = self._placement.put(np.zeros(self._config.max_num_seqs, np.int32))
            if self._generation != self._pool.generation:
                # In a step that failed, and took the pool with it, devices may have counted their sums apart.
                self._generation, self._peers = self._pool.generation, self._placement.peers()
        self._tables = [BlockTableCache() for _ in self._layers.groups]
        self._slots.forget()
        if self.routing is not None:
            self.routing.forget()

    def _metadata(
        self, step: ScheduledStep, bucket: Bucket, layout: PackedLayout, buffer: np.ndarray
    ) -> CommonAttentionMetadata:
        """Packs the metadata of a step for every cache group; returns the record of the first one."""
        rows, encoder_rows, tables = step.committed.rows, None, self._tables
        if self._num_encoder_blocks:
            rows, encoder_rows = self._with_encoder(step)
            # Tables that were cut are other objects in every step.
            tables = [None] * len(self._groups)
        metadata = build_common_metadata(
            rows,
            num_blocks=self._num_blocks,
            num_seqs=bucket.num_seqs,
            num_tokens=bucket.num_tokens,
            max_blocks=self._num_encoder_blocks if step.encodes else self._max_blocks,
            encoder_rows=encoder_rows,
            num_slots=self._pool.num_slots or None,
            layout=layout,
            buffer=buffer,
            table_cache=tables[0],
            **self._groups[0],
        )
        for group in range(1, len(self._groups)):
            build_group_metadata(metadata, rows, table_cache=tables[group], **self._groups[group])
        return metadata

    def _sampler_state(self, rows: tuple[ScheduledRow, ...], layout: PackedLayout, buffer: np.ndarray) -> SamplerState:
        """Assigns the slot of each row that samples, and uploads the values that only the host has."""
        slots = layout["slot"].of(buffer)
        slots[:] = self._slots.neutral
        masks: list[tuple[int, np.ndarray]] = []
        for index, row in enumerate(rows):
            request = row.request
            if row.num_samples and request.needs_slot:
                slots[index] = self._slots.of(request)
            mask = request.mask() if row.num_samples else None
            if mask is not None:
                masks.append((index, mask))
        return SamplerState(self._slots.tables, self._slots.masks(len(slots), masks))

    def _of_prompts(self, rows: tuple[ScheduledRow, ...], hidden: jax.Array) -> list[PromptPart]:
        """Starts the prompt log-probabilities that the step's rows ask for."""
        parts, first = list[PromptPart](), 0
        for row in rows:
            request, prompt = row.request, row.request.prompt_token_ids
            # A token's hidden state foretells the next one.
            end = min(row.start + row.num_new_tokens, len(prompt) - 1)
            if (wanted := request.params.prompt_logprobs) is not None:
                for start in range(row.start, end, _PROMPT_LOGPROBS):
                    places = np.minimum(np.arange(start, start + _PROMPT_LOGPROBS), end - 1)
                    at = (first + places - row.start).astype(np.int32)
                    token_ids = np.asarray(prompt, np.int32)[places + 1]
                    count = self._vocab_size if wanted < 0 else self._num_logprobs
                    if self._announce is not None:
                        self._announce("prompt", at, token_ids, count)
                    found = self._predicted(hidden, at, token_ids, count, self._slot_of(request))
                    # Those of the whole vocabulary, of a long prompt, are more than the pool leaves free.
                    found = found.read() if count == self._vocab_size else found
                    parts.append(PromptPart(request, start + 1, min(end - start, _PROMPT_LOGPROBS), found))
            first += row.num_new_tokens
        return parts

    def _slot_of(self, request: Request) -> int | None:
        slots, adapter = self.adapter_slots, request.adapter
        return None if slots is None or adapter is None else slots.slot_of(adapter)

    def _predicted(
        self, hidden: Any, rows: np.ndarray, token_ids: np.ndarray, num_logprobs: int, slot: int | None = None
    ) -> Any:
        held = None if self._adapters is None or slot is None else (self._adapters.arrays, np.int32(slot))
        # Cut out first: the logits' program is one for steps of all sizes then.
        operands = self.weights.leaves, _cut(hidden, rows), token_ids, held
        return self._prompt_logprobs(*operands, num_logprobs=num_logprobs)

    def _warm_prompt_logprobs(self, buckets: tuple[Bucket, ...]) -> None:
        if self._num_encoder_blocks:
            return
        rows = np.zeros(_PROMPT_LOGPROBS, np.int32)
        full = [bucket for bucket in buckets if bucket.sampler.kind is SamplingKind.FULL and bucket.num_steps == 1]
        steps: list[Any] = [self.programs(bucket) for bucket in full]
        known = {spec.shape: spec for spec in (step.out_info[0][0].hidden for step in steps)}
        for spec in known.values():
            hidden = jnp.zeros(spec.shape, spec.dtype, device=spec.sharding)
            for count in (self._num_logprobs, self._vocab_size):
                for slot in (None,) if self._adapters is None else (None, 0):
                    self._predicted(hidden, rows, rows, count, slot)


@jax.jit
def _cut(hidden: jax.Array, rows: jax.Array) -> jax.Array:
    return hidden[rows]
