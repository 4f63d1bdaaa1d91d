"""Runs scheduled steps on the device: one upload, one jitted program per bucket, sampling included."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.engine.config import EngineConfig
from jattn.engine.program import PER_SEQUENCE, jitted_step
from jattn.engine.sampler import SamplingKind, sampling_kind
from jattn.engine.scheduler import ScheduledRow, ScheduledStep
from jattn.models import PagedModel
from jattn.pool import KVPool
from torch_core.metadata import BlockTableCache, Buckets, PackedLayout, build_common_metadata, metadata_layout

__all__ = ["ModelRunner"]

# XLA's CPU backend sums a matrix product in one order for 2 to 32 rows and in another for one row and for 64 or more:
# prefill stays on one side, so that a prompt's bits do not depend on the prompts beside it.
_SMALLEST_PREFILL = 64
_SMALLEST_QUERY = 16


class ModelRunner:
    """Holds a model's weights as flat leaves and the pool, and dispatches steps without waiting for them.

    A step's sampled tokens stay on the device, where the next step can read them: an input token of `-1 - row` means
    "what row `row` of the last step sampled". Not thread-safe.

    Args:
        model: the model; its leaves are captured now.
        pool: the cache arrays; the runner donates them to every step.
        config: sizes of a step.
        max_blocks: columns of a block table.

    Attributes:
        programs: one entry for each compilation, constant after warm-up; runners of equally built models share them.
        compile_seconds: time that `dispatch` has spent on tracing and compiling.
    """

    def __init__(self, model: PagedModel, pool: KVPool, config: EngineConfig, *, max_blocks: int) -> None:
        graph, state = nnx.split(model)
        self._leaves, treedef = jax.tree.flatten(state)
        self._pool = pool
        self._max_blocks = max_blocks
        window = model.paged_spec.sliding_window
        self._window_left = None if window is None else window - 1
        self._max_num_seqs = config.max_num_seqs
        self.forget()
        self._num_seqs, self._prefill_num_seqs, self._num_tokens, self._query_len = _buckets(config)
        self.compile_seconds = 0.0
        self._step, self.programs = jitted_step(graph, treedef)

    def dispatch(self, step: ScheduledStep) -> jax.Array:
        """Starts a step and returns its sampled tokens, int32[num_decode_steps, max_num_seqs], a column for each row.

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
        kind = _fill_requests(step.rows, layout, buffer)
        num_programs, started = len(self.programs), time.monotonic()
        tokens, self._last_tokens = self._pool.run(
            functools.partial(
                self._step,
                layout=layout,
                max_query_len=max_query_len,
                num_steps=step.num_decode_steps,
                kind=kind,
                max_num_seqs=self._max_num_seqs,
            ),
            self._leaves,
            self._last_tokens,
            buffer,
        )
        if len(self.programs) > num_programs:
            self.compile_seconds += time.monotonic() - started
        return tokens

    def forget(self) -> None:
        """Drops what it knows of earlier steps: their tokens and their tables."""
        with jax.transfer_guard_host_to_device("allow"):
            self._last_tokens = jnp.zeros(self._max_num_seqs, jnp.int32)
        self._tables = BlockTableCache()

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
    extra = [("token_ids", (num_inputs,)), *((name, (num_seqs,)) for name in PER_SEQUENCE)]
    return metadata_layout(num_seqs=num_seqs, num_tokens=num_tokens, max_blocks=max_blocks, extra=extra)


def _fill_requests(rows: Sequence[ScheduledRow], layout: PackedLayout, buffer: np.ndarray) -> SamplingKind:
    token_ids = layout["token_ids"].of(buffer)
    first = 0
    for row in rows:
        request = row.request
        new = request.token_ids(row.start, row.start + row.num_new_tokens) or [-1 - request.pending_row]
        token_ids[first : first + len(new)] = new
        first += len(new)
    requests = [row.request for row in rows]
    count = len(requests)
    chosen = [(request.params.temperature, request.params.top_k, request.params.top_p) for request in requests]
    temperatures, top_ks, top_ps = zip(*chosen, strict=True)
    layout["temperature"].of(buffer).view(np.float32)[:count] = temperatures
    layout["top_p"].of(buffer).view(np.float32)[:count] = top_ps
    layout["top_k"].of(buffer)[:count] = top_ks
    layout["seed"].of(buffer).view(np.uint32)[:count] = [request.seed for request in requests]
    layout["sample_index"].of(buffer)[:count] = [request.num_sampled_tokens for request in requests]
    return sampling_kind(temperatures, top_ks, top_ps)
