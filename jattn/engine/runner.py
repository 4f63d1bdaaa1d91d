"""Runs scheduled steps on the device: one upload, one jitted program per bucket, sampling included."""

from __future__ import annotations

import functools
import time
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.engine.config import EngineConfig
from jattn.engine.program import PER_SEQUENCE, jitted_prompt_logprobs, jitted_step
from jattn.engine.results import PromptPart, StepResult
from jattn.engine.sampler import Sampler, SamplerState, SamplingKind
from jattn.engine.scheduler import ScheduledRow, ScheduledStep
from jattn.engine.tables import Slots
from jattn.models import PagedModel
from jattn.pool import KVPool
from torch_core.metadata import BlockTableCache, Buckets, PackedLayout, build_common_metadata, metadata_layout

__all__ = ["ModelRunner"]

# XLA's CPU backend sums a matrix product in one order for 2 to 32 rows and in another for one row and for 64 or more:
# prefill stays on one side, so that a prompt's bits do not depend on the prompts beside it.
_SMALLEST_PREFILL = 64
_SMALLEST_QUERY = 16
# Prompt tokens whose logits are computed at once.
_PROMPT_LOGPROBS = 64


class ModelRunner:
    """Holds a model's weights as flat leaves and the pool, and dispatches steps without waiting for them.

    A step's sampled tokens stay on the device, where the next step can read them: an input token of `-1 - row` means
    "what row `row` of the last step sampled". Not thread-safe.

    Args:
        model: the model; its leaves are captured now.
        pool: the cache arrays; the runner donates them to every step.
        config: sizes of a step.
        max_model_len: tokens of one sequence at most.

    Attributes:
        programs: one entry for each compilation, constant after warm-up; runners of equally built models share them.
        compile_seconds: time that `dispatch` has spent on tracing and compiling.
    """

    def __init__(self, model: PagedModel, pool: KVPool, config: EngineConfig, *, max_model_len: int) -> None:
        graph, state = nnx.split(model)
        self._leaves, treedef = jax.tree.flatten(state)
        self._pool = pool
        self._max_blocks = -(-max_model_len // config.block_size)
        window = model.paged_spec.sliding_window
        self._window_left = None if window is None else window - 1
        self._max_num_seqs = config.max_num_seqs
        self._vocab_size = model.paged_spec.vocab_size
        processors = config.logits_processors or {}
        self._samplers = {
            SamplingKind.PLAIN: Sampler(SamplingKind.PLAIN),
            SamplingKind.FULL: Sampler(SamplingKind.FULL, config.max_logprobs, tuple(processors.values())),
        }
        self._slots = Slots(
            config.max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=self._vocab_size,
            processors=tuple(processors),
        )
        self.forget()
        self._num_seqs, self._prefill_num_seqs, self._num_tokens, self._query_len = _buckets(config)
        self.compile_seconds = 0.0
        self._step, self.programs = jitted_step(graph, treedef)
        self._prompt_logprobs = jitted_prompt_logprobs(graph, treedef)

    def dispatch(self, step: ScheduledStep) -> StepResult:
        """Starts a step and returns what it brings, which is on the device still.

        Raises:
            PoolLost: the step failed and took the pool's contents with it.
        """
        layout, max_query_len = self._bucket(step)
        metadata = build_common_metadata(
            step.committed.rows,
            block_size=self._pool.spec.block_size,
            num_blocks=self._pool.num_blocks,
            num_seqs=layout["seq_lens"].shape[0],
            num_tokens=layout["slot_mapping"].shape[0],
            max_blocks=self._max_blocks,
            window_left=self._window_left,
            table_cache=self._tables,
            layout=layout,
        )
        # Given a layout, the builder packs.
        buffer = cast(np.ndarray, metadata.packed)
        is_plain = all(row.request.is_plain for row in step.rows)
        sampler = self._samplers[SamplingKind.PLAIN if is_plain else SamplingKind.FULL]
        _fill_requests(step.rows, layout, buffer)
        state = SamplerState(None, None)
        if sampler.kind is SamplingKind.FULL:
            state = self._sampler_state(step.rows, layout, buffer)
        num_programs, started = len(self.programs), time.monotonic()
        sampled, self._last_tokens, state = self._pool.run(
            functools.partial(
                self._step,
                layout=layout,
                max_query_len=max_query_len,
                num_steps=step.num_decode_steps,
                sampler=sampler,
                max_num_seqs=self._max_num_seqs,
            ),
            self._leaves,
            self._last_tokens,
            state,
            buffer,
        )
        if state.tables is not None:
            self._slots.tables = state.tables
        if len(self.programs) > num_programs:
            self.compile_seconds += time.monotonic() - started
        return StepResult(sampled.tokens, sampled.logprobs, self._of_prompts(step.rows, sampled.hidden))

    def forget(self) -> None:
        """Drops what it knows of earlier steps: their tokens and their tables."""
        with jax.transfer_guard_host_to_device("allow"):
            self._last_tokens = jnp.zeros(self._max_num_seqs, jnp.int32)
        self._tables = BlockTableCache()
        self._slots.forget()

    def _sampler_state(self, rows: tuple[ScheduledRow, ...], layout: PackedLayout, buffer: np.ndarray) -> SamplerState:
        """Names the slot of each row that samples, and uploads what the host alone knows."""
        slots = layout["slot"].of(buffer)
        slots[:] = self._slots.neutral
        grammars: list[tuple[int, np.ndarray]] = []
        for index, row in enumerate(rows):
            request = row.request
            if row.num_samples and request.needs_slot:
                slots[index] = self._slots.of(request)
            if row.num_samples and request.grammar is not None:
                mask = request.grammar.mask(request.output_token_ids, request.params.min_tokens)
                grammars.append((index, mask))
        return SamplerState(self._slots.tables, self._slots.masks(len(slots), grammars))

    def _of_prompts(self, rows: tuple[ScheduledRow, ...], hidden: jax.Array | None) -> list[PromptPart]:
        """Starts what the step's rows ask for about their prompts."""
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
                    found = self._prompt_logprobs(
                        self._leaves,
                        hidden,
                        (first + places - row.start).astype(np.int32),
                        np.asarray(prompt, np.int32)[places + 1],
                        num_logprobs=self._vocab_size if wanted < 0 else self._samplers[SamplingKind.FULL].num_logprobs,
                    )
                    parts.append(PromptPart(request, start + 1, min(end - start, _PROMPT_LOGPROBS), found))
            first += row.num_new_tokens
        return parts

    def _bucket(self, step: ScheduledStep) -> tuple[PackedLayout, int]:
        longest = max(row.num_new_tokens for row in step.rows)
        if longest == 1 or step.num_decode_steps > 1:
            num_seqs = self._num_seqs.pad(len(step.rows))
            return _layout(num_seqs, num_seqs, num_seqs * step.num_decode_steps, self._max_blocks), 1
        num_seqs = self._prefill_num_seqs.pad(len(step.rows))
        num_tokens = self._num_tokens.pad(step.num_tokens)
        return _layout(num_seqs, num_tokens, num_tokens, self._max_blocks), self._query_len.pad(longest)


def _buckets(config: EngineConfig) -> tuple[Buckets, Buckets, Buckets, Buckets]:
    """Returns the sizes of a decode step's sequences and of a prefill step's sequences, tokens and longest row."""
    most_seqs, most_tokens = config.max_num_seqs, config.max_num_batched_tokens
    most_padded = max(most_tokens, _SMALLEST_PREFILL)
    names = ("sequences of a step", "sequences of a prefill step", "new tokens of a step", "new tokens of a row")
    if config.batch_invariant:
        sizes = (most_seqs, most_seqs, most_padded, most_tokens)
        decode, prefill, tokens, query = (Buckets(name, (size,)) for name, size in zip(names, sizes, strict=True))
        return decode, prefill, tokens, query
    return (
        Buckets.powers_of_two(names[0], most_seqs),
        # A padded row costs next to nothing in a prefill step, a program more costs seconds.
        Buckets(names[1], tuple(sorted({1, most_seqs}))),
        Buckets.powers_of_two(names[2], most_padded, smallest=_SMALLEST_PREFILL),
        Buckets.powers_of_two(names[3], most_tokens, smallest=_SMALLEST_QUERY),
    )


@functools.lru_cache(maxsize=256)
def _layout(num_seqs: int, num_inputs: int, num_tokens: int, max_blocks: int) -> PackedLayout:
    extra = [("token_ids", (num_inputs,)), *((name, (num_seqs, *rest)) for name, rest in PER_SEQUENCE)]
    return metadata_layout(num_seqs=num_seqs, num_tokens=num_tokens, max_blocks=max_blocks, extra=extra)


def _fill_requests(rows: tuple[ScheduledRow, ...], layout: PackedLayout, buffer: np.ndarray) -> None:
    token_ids = layout["token_ids"].of(buffer)
    first = 0
    for row in rows:
        request = row.request
        new = request.token_ids(row.start, row.start + row.num_new_tokens) or [-1 - request.pending_row]
        token_ids[first : first + len(new)] = new
        first += len(new)
    layout["sampling"].of(buffer)[: len(rows)] = [row.request.sampling for row in rows]
    layout["sample_index"].of(buffer)[: len(rows)] = [row.request.num_sampled_tokens for row in rows]
