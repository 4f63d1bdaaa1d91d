"""Runs scheduled steps on the device: one upload, one compiled program per bucket, sampling included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.llm.engine.device.cascade import Cascade
from jattn.llm.engine.device.placement import Placement
from jattn.llm.engine.device.program import Bucket, Sampled, jitted_prompt_logprobs
from jattn.llm.engine.device.programs import Programs
from jattn.llm.engine.device.results import PromptPart, StepResult
from jattn.llm.engine.device.sampler import Sampler, SamplingKind
from jattn.llm.engine.device.tables import SamplerState, Slots, SlotTables
from jattn.llm.engine.device.weights import Weights
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.scheduler import ScheduledRow, ScheduledStep
from jattn.llm.models import Fp8Linear, PagedModel
from jattn.llm.processes import Announce
from jattn.pool import KVPool
from torch_core.base.specs import DTYPE_BYTES
from torch_core.cache import LayerGroups
from torch_core.metadata import (
    BlockTableCache,
    Buckets,
    CommonAttentionMetadata,
    EncoderRow,
    PackedLayout,
    SequenceRow,
    build_common_metadata,
    build_group_metadata,
)

# XLA's CPU backend sums a matrix product in one order for 2 to 32 rows and in another for one row and for 64 or more:
# prefill stays on one side, so that a prompt's bits do not depend on other prompts.
_SMALLEST_PREFILL = 64
_SMALLEST_QUERY = 16
# From this number of sequences on, a step has sizes between two powers of two.
_FIRST_BETWEEN = 256
# Prompt tokens whose logits are computed at once.
_PROMPT_LOGPROBS = 64


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
        announce: called with each operation before it runs.

    Attributes:
        programs: the compiled programs.
        weights: their weights.
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
        announce: Announce = lambda *_: None,
    ) -> None:
        self._pool = pool
        self._announce = announce
        self._placement = placement
        self._max_blocks = max_blocks
        self._num_encoder_blocks = -(-model.paged_spec.max_encoder_len // config.block_size)
        self._layers = layers
        self._config = config
        self._element_bytes = DTYPE_BYTES[pool.spec.dtype]
        self._num_seqs, self._num_tokens = _buckets(config)
        self._query_lens = None
        if not ragged and not config.batch_invariant:
            longest = max(max_blocks * config.tokens_per_block, model.paged_spec.max_encoder_len)
            largest = min(self._num_tokens.largest, longest)
            self._query_lens = Buckets.powers_of_two("new tokens of a row", largest, smallest=_SMALLEST_QUERY)
        self._cascade = None if self._num_encoder_blocks else Cascade.of(cast(nnx.Module, model), config, layers)
        self._vocab_size = model.paged_spec.vocab_size
        processors = config.logits_processors or {}
        self._plain = Sampler(SamplingKind.PLAIN)
        # On a CPU a plain program tests whether any row samples. Elsewhere the noise for a large vocabulary is most of
        # a decode step's work outside its layers.
        self._greedy = self._plain if jax.default_backend() == "cpu" else Sampler(SamplingKind.GREEDY)
        num_logprobs = self._vocab_size if config.max_logprobs < 0 else config.max_logprobs
        self._full = Sampler(SamplingKind.FULL, num_logprobs, tuple(processors.values()))
        self._samplers = tuple(dict.fromkeys((self._greedy, self._plain, self._full)))
        self._slots = Slots(
            config.max_num_seqs,
            max_model_len=max_blocks * config.tokens_per_block,
            vocab_size=self._vocab_size,
            processors=tuple(processors),
            placement=placement,
            announce=announce,
        )
        self._hidden: Any = None
        self._generation: int | None = None
        self.forget()
        self.weights = Weights(cast(nnx.Module, model))
        self._prompt_logprobs = jitted_prompt_logprobs(
            self.weights.graph, self.weights.treedef, placement, self.weights.specs
        )
        self.programs = Programs(
            self.weights,
            pool,
            placement,
            layers,
            self._slots.shapes,
            self._peers_table,
            max_num_seqs=config.max_num_seqs,
            max_blocks=max_blocks,
            multiplies_fp8=any(
                isinstance(module, Fp8Linear) for _, module in nnx.iter_modules(cast(nnx.Module, model))
            ),
        )

    def dispatch(self, step: ScheduledStep) -> StepResult:
        """Starts a step and returns its results, which are still on the device.

        Raises:
            PoolLost: the step failed and took the pool's contents with it.
        """
        bucket = self._bucket(step)
        layout = bucket.layout(self._max_blocks, len(self._layers.groups))
        metadata = self._metadata(step, bucket, layout)
        # Given a layout, the builder packs.
        buffer = cast(np.ndarray, metadata.packed)
        _fill_requests(step.rows, layout, buffer)
        state = SamplerState(None, None)
        if bucket.sampler is self._full:
            state = self._sampler_state(step.rows, layout, buffer)
        if bucket.num_pieces and self._cascade is not None:
            bucket = self._cascade.shared(bucket, metadata, layout, self._element_bytes)
        masks = state.masks if isinstance(state.masks, np.ndarray) else None
        sizes = {field.name: getattr(bucket, field.name) for field in fields(bucket) if field.name != "sampler"}
        self._announce("step", sizes, bucket.sampler.kind.value, buffer, masks)
        sampled = self._run(bucket, state, buffer)
        return StepResult(sampled.tokens, sampled.logprobs, self._of_prompts(step.rows, sampled.hidden))

    def follow(self, what: str, *arguments: Any) -> None:
        """Repeats an operation of process 0's runner, after its announcement: see `jattn.llm.processes`."""
        getattr(self, f"_follow_{what}")(*arguments)

    def _follow_step(self, sizes: dict[str, Any], kind: str, buffer: np.ndarray, masks: np.ndarray | None) -> None:
        bucket = Bucket(**sizes, sampler=next(each for each in self._samplers if each.kind.value == kind))
        state = SamplerState(None, None)
        if bucket.sampler is self._full:
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
        # Compiled behind the pool's checks of JAX's settings.
        sampled, self._last_tokens, state = self._pool.run(
            lambda *operands: self.programs(bucket)(*operands),
            self.weights.leaves,
            self._last_tokens,
            state,
            buffer,
            self._peers_table,
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

    def warmup(self, report: Callable[[int, int, str], None], wanted: Callable[[str], bool] | None = None) -> None:
        """Compiles every program that a step can need, or the steps whose names are wanted; see `Programs.compile`."""
        with jax.transfer_guard("allow"):
            buckets = tuple(bucket for bucket in self._all_buckets() if wanted is None or wanted(str(bucket)))
            self.programs.compile(buckets, report)
            if wanted is not None:
                return
            self._slots.warmup({bucket.num_seqs for bucket in buckets})
            self._warm_prompt_logprobs(buckets)
            self._pool.warmup(
                copies=self._config.max_num_seqs,
                scrubs=self._pool.num_blocks if self._config.scrub_on_free else 0,
                swaps=min(self._max_blocks, self._config.num_host_blocks),
            )

    def describe(self, step: ScheduledStep) -> dict[str, str]:
        """Returns the program of a step, for a report."""
        return {"program": str(self._bucket(step))}

    def forget(self) -> None:
        """Drops the tokens and tables of earlier steps."""
        with jax.transfer_guard_host_to_device("allow"):
            self._last_tokens = self._placement.put(np.zeros(self._config.max_num_seqs, np.int32))
            if self._generation != self._pool.generation:
                # In a step that failed, and took the pool with it, devices may have counted their sums apart.
                self._generation, self._peers = self._pool.generation, self._placement.peers()
        self._tables = [BlockTableCache() for _ in self._layers.groups]
        self._slots.forget()

    def _metadata(self, step: ScheduledStep, bucket: Bucket, layout: PackedLayout) -> CommonAttentionMetadata:
        """Packs the metadata of a step for every cache group; returns the record of the first one."""
        rows, encoder_rows = self._with_encoder(step) if self._num_encoder_blocks else (step.committed.rows, None)
        # Tables that were cut are other objects in every step.
        caches = [None] * len(self._tables) if self._num_encoder_blocks else self._tables
        windows = [group.sliding_window for group in self._layers.groups]
        first, *others = (
            {
                # Rows of an encoder's step have plain tables alone, which are the first group's.
                "cache_group": group or None,
                "window_left": None if window is None else window - 1,
                "table_cache": tables,
            }
            for group, (window, tables) in enumerate(zip(windows, caches, strict=True))
        )
        metadata = build_common_metadata(
            rows,
            block_size=self._config.tokens_per_block,
            num_blocks=self._pool.num_blocks,
            num_seqs=bucket.num_seqs,
            num_tokens=bucket.num_tokens,
            max_blocks=layout["block_tables"].shape[1],
            encoder_rows=encoder_rows,
            layout=layout,
            **first,
        )
        for group in others:
            build_group_metadata(metadata, rows, **group)
        return metadata

    def _sampler_state(self, rows: tuple[ScheduledRow, ...], layout: PackedLayout, buffer: np.ndarray) -> SamplerState:
        """Assigns the slot of each row that samples, and uploads the values that only the host has."""
        slots = layout["slot"].of(buffer)
        slots[:] = self._slots.neutral
        grammars: list[tuple[int, np.ndarray]] = []
        for index, row in enumerate(rows):
            request = row.request
            if row.num_samples and request.needs_slot:
                slots[index] = self._slots.of(request)
            if row.num_samples and request.grammar is not None:
                grammars.append((index, request.grammar.mask(request.output_token_ids, request.params)))
        return SamplerState(self._slots.tables, self._slots.masks(len(slots), grammars))

    def _of_prompts(self, rows: tuple[ScheduledRow, ...], hidden: jax.Array | None) -> list[PromptPart]:
        """Starts the prompt log-probabilities that the step's rows ask for."""
        parts: list[PromptPart] = []
        first = 0
        for row in rows:
            request, prompt = row.request, row.request.prompt_token_ids
            # A token's hidden state foretells the next one.
            end = min(row.start + row.num_new_tokens, len(prompt) - 1)
            wanted = request.params.prompt_logprobs
            if hidden is not None and wanted is not None:
                for start in range(row.start, end, _PROMPT_LOGPROBS):
                    places = np.minimum(np.arange(start, start + _PROMPT_LOGPROBS), end - 1)
                    at = (first + places - row.start).astype(np.int32)
                    token_ids = np.asarray(prompt, np.int32)[places + 1]
                    count = self._vocab_size if wanted < 0 else self._full.num_logprobs
                    self._announce("prompt", at, token_ids, count)
                    found = self._predicted(hidden, at, token_ids, count)
                    parts.append(PromptPart(request, start + 1, min(end - start, _PROMPT_LOGPROBS), found))
            first += row.num_new_tokens
        return parts

    def _predicted(self, hidden: Any, rows: np.ndarray, token_ids: np.ndarray, num_logprobs: int) -> Any:
        # Cut out first: the logits' program is one for steps of all sizes then.
        return self._prompt_logprobs(self.weights.leaves, _cut(hidden, rows), token_ids, num_logprobs=num_logprobs)

    def _warm_prompt_logprobs(self, buckets: tuple[Bucket, ...]) -> None:
        if self._num_encoder_blocks:
            return
        rows = np.zeros(_PROMPT_LOGPROBS, np.int32)
        steps: list[Any] = [
            self.programs(bucket) for bucket in buckets if bucket.sampler is self._full and bucket.num_steps == 1
        ]
        known = {spec.shape: spec for spec in (step.out_info[0][0].hidden for step in steps)}
        for spec in known.values():
            hidden = jnp.zeros(spec.shape, spec.dtype, device=spec.sharding)
            for count in (self._full.num_logprobs, self._vocab_size):
                self._predicted(hidden, rows, rows, count)

    def _bucket(self, step: ScheduledStep) -> Bucket:
        if step.encodes:
            longest = max(len(row.request.encoder_token_ids) for row in step.rows)
            return self._encode_bucket(len(step.rows), self._num_tokens.pad(step.num_tokens), longest)
        # A chunk that does not reach its prompt's end samples nothing: the smallest part of the sampler is enough.
        asking = [row.request for row in step.rows if row.num_samples or row.request.params.prompt_logprobs is not None]
        sampler = self._plain if all(request.is_plain for request in asking) else self._full
        if step.num_decode_steps > 1 or all(row.num_new_tokens == 1 + len(row.guesses) for row in step.rows):
            if sampler is self._plain and all(request.params.temperature == 0 for request in asking):
                sampler = self._greedy
            return self._decode_bucket(self._num_seqs.pad(len(step.rows)), sampler, step.num_decode_steps)
        longest = max(row.num_new_tokens for row in step.rows)
        return self._prefill_bucket(len(step.rows), self._num_tokens.pad(step.num_tokens), longest, sampler)

    def _decode_bucket(self, num_seqs: int, sampler: Sampler, num_steps: int) -> Bucket:
        pieces = 0 if self._cascade is None else self._cascade.num_pieces(num_seqs)
        guesses = self._config.num_speculative_tokens
        count = num_steps + guesses
        sizes = (num_seqs, num_seqs * count, 1 + guesses)
        return Bucket(*sizes, sampler, num_steps, guesses, pieces, num_encoder_blocks=self._num_encoder_blocks)

    def _prefill_bucket(self, num_seqs: int, num_tokens: int, longest: int, sampler: Sampler) -> Bucket:
        most = self._config.max_num_seqs
        blocks = self._num_encoder_blocks
        if self._query_lens is None:
            # A padded row and a longer bound cost next to nothing in a prefill step, a program more costs seconds.
            return Bucket(most, num_tokens, num_tokens, sampler, num_encoder_blocks=blocks)
        if num_seqs == 1:
            return Bucket(1, num_tokens, num_tokens, sampler, num_encoder_blocks=blocks)
        return next(
            bucket
            for bucket in self._padded_buckets(self._query_lens.pad(longest), sampler)
            if bucket.num_tokens >= num_tokens and bucket.num_seqs >= num_seqs
        )

    def _padded_buckets(self, longest: int, sampler: Sampler) -> Iterator[Bucket]:
        """Yields buckets of prompts padded to `longest` tokens: no step attends to more than twice its tokens."""
        most, smallest = self._config.max_num_seqs, cast(Buckets, self._query_lens).sizes[0]
        for num_tokens in self._num_tokens.sizes:
            if num_tokens >= longest:
                # The largest step takes any number of the shortest prompts; the scheduler sees to the longer ones.
                takes_all = longest == smallest and num_tokens == self._num_tokens.largest
                num_seqs = most if takes_all else min(most, 2 * num_tokens // longest)
                yield Bucket(num_seqs, num_tokens, longest, sampler, num_encoder_blocks=self._num_encoder_blocks)
                if num_seqs * longest <= num_tokens:
                    # This number of rows cannot have more.
                    return

    def _encode_bucket(self, num_seqs: int, num_tokens: int, longest: int) -> Bucket:
        return replace(self._prefill_bucket(num_seqs, num_tokens, longest, self._plain), encodes=True)

    def _all_buckets(self) -> Iterator[Bucket]:
        for sampler in self._samplers:
            for bucket in () if sampler is self._greedy is not self._plain else self._prompt_buckets(sampler):
                yield bucket
                if self._num_encoder_blocks and sampler is self._plain:
                    yield replace(bucket, encodes=True)
            for num_steps in sorted({1, self._config.most_scheduler_steps}):
                for num_seqs in self._num_seqs.sizes:
                    bucket = self._decode_bucket(num_seqs, sampler, num_steps)
                    yield bucket
                    if bucket.num_pieces and self._cascade is not None:
                        yield replace(bucket, piece_tokens=self._cascade.piece_tokens)

    def _prompt_buckets(self, sampler: Sampler) -> Iterator[Bucket]:
        for num_tokens in self._num_tokens.sizes:
            yield self._prefill_bucket(1, num_tokens, num_tokens, sampler)
            if self._query_lens is not None and num_tokens >= self._query_lens.largest:
                # One row has no more.
                break
        if self._query_lens is not None and self._config.max_num_seqs > 1:
            for longest in self._query_lens.sizes:
                yield from self._padded_buckets(longest, sampler)


@jax.jit
def _cut(hidden: jax.Array, rows: jax.Array) -> jax.Array:
    return hidden[rows]


def _buckets(config: EngineConfig) -> tuple[Buckets, Buckets]:
    """Returns the sizes of a decode step's sequences and of a prefill step's tokens."""
    most_seqs, most_tokens = config.max_num_seqs, max(config.max_num_batched_tokens, _SMALLEST_PREFILL)
    names = ("sequences of a step", "new tokens of a step")
    if config.batch_invariant:
        return Buckets(names[0], (most_seqs,)), Buckets(names[1], (most_tokens,))
    # A few sequences cost as much as one, because the weights are read once. Many cost in proportion to their number.
    few = tuple(size for size in (1, 4, 16) if size < most_seqs)
    many = Buckets.powers_of_two(names[0], most_seqs, smallest=32).sizes
    between = (size * 3 // 2 for size in many if size >= _FIRST_BETWEEN)
    return (
        Buckets(names[0], few + tuple(sorted({*many, *(size for size in between if size < most_seqs)}))),
        Buckets.powers_of_two(names[1], most_tokens, smallest=_SMALLEST_PREFILL),
    )


def _fill_requests(rows: Sequence[ScheduledRow], layout: PackedLayout, buffer: np.ndarray) -> None:
    token_ids = layout["token_ids"].of(buffer)
    first = 0
    for row in rows:
        request = row.request
        if row.encodes:
            new = list(request.encoder_token_ids)
        else:
            new = request.token_ids(row.start, row.start + row.num_new_tokens) or [-1 - request.pending_row]
            new += row.guesses
        token_ids[first : first + len(new)] = new
        first += len(new)
    layout["sampling"].of(buffer)[: len(rows)] = [row.request.sampling for row in rows]
    layout["sample_index"].of(buffer)[: len(rows)] = [row.request.num_sampled_tokens for row in rows]
