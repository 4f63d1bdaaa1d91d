"""Runs scheduled steps on the device: one upload, one compiled program per bucket, sampling included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.engine.cascade import Cascade
from jattn.engine.config import EngineConfig
from jattn.engine.program import Bucket
from jattn.engine.programs import Programs
from jattn.engine.sampler import SamplingKind, sampling_kind
from jattn.engine.scheduler import ScheduledRow, ScheduledStep
from jattn.engine.weights import Weights
from jattn.models import PagedModel
from jattn.pool import KVPool
from torch_core.metadata import BlockTableCache, Buckets, PackedLayout, build_common_metadata
from torch_core.specs import DTYPE_BYTES

__all__ = ["ModelRunner"]

# XLA's CPU backend sums a matrix product in one order for 2 to 32 rows and in another for one row and for 64 or more:
# prefill stays on one side, so that a prompt's bits do not depend on the prompts beside it.
_SMALLEST_PREFILL = 64
_SMALLEST_QUERY = 16


class ModelRunner:
    """Holds a model's programs and the pool, and dispatches steps without waiting for them.

    A step's sampled tokens stay on the device, where the next step can read them: an input token of `-1 - row` means
    "what row `row` of the last step sampled". Not thread-safe.

    Args:
        model: its leaves are captured now.
        pool: the cache arrays; the runner donates them to every step.
        config: sizes of a step.
        max_blocks: columns of a block table.
        ragged: attention costs by the tokens of a step, and not by its longest row times its rows.

    Attributes:
        programs: what was compiled.
        weights: what they are run with.
    """

    def __init__(self, model: PagedModel, pool: KVPool, config: EngineConfig, *, max_blocks: int, ragged: bool) -> None:
        self._pool = pool
        self._max_blocks = max_blocks
        window = model.paged_spec.sliding_window
        self._window_left = None if window is None else window - 1
        self._config = config
        self._element_bytes = DTYPE_BYTES[pool.spec.dtype]
        self.forget()
        self._num_seqs, self._num_tokens = _buckets(config)
        self._query_lens = None
        if not ragged and not config.batch_invariant:
            largest = self._num_tokens.largest
            self._query_lens = Buckets.powers_of_two("new tokens of a row", largest, smallest=_SMALLEST_QUERY)
        self._cascade = Cascade.of(cast(nnx.Module, model), config)
        self.weights = Weights(cast(nnx.Module, model))
        self.programs = Programs(self.weights, pool, max_num_seqs=config.max_num_seqs, max_blocks=max_blocks)

    def dispatch(self, step: ScheduledStep) -> jax.Array:
        """Starts a step and returns its sampled tokens, int32[samples, max_num_seqs], a column for each row.

        Raises:
            PoolLost: the step failed and took the pool's contents with it.
        """
        bucket = self._bucket(step)
        layout = bucket.layout(self._max_blocks)
        metadata = build_common_metadata(
            step.committed.rows,
            block_size=self._pool.spec.block_size,
            num_blocks=self._pool.num_blocks,
            num_seqs=bucket.num_seqs,
            num_tokens=bucket.num_tokens,
            max_blocks=self._max_blocks,
            window_left=self._window_left,
            table_cache=self._tables,
            layout=layout,
        )
        # Given a layout, the builder packs.
        buffer = cast(np.ndarray, metadata.packed)
        _fill_requests(step.rows, layout, buffer)
        if bucket.num_pieces and self._cascade is not None:
            bucket = self._cascade.shared(bucket, metadata, layout, self._element_bytes)
        # Compiled behind the pool's checks of JAX's settings.
        tokens, self._last_tokens = self._pool.run(
            lambda *operands: self.programs(bucket)(*operands), self.weights.leaves, self._last_tokens, buffer
        )
        return tokens

    def warmup(self, report: Callable[[int, int, str], None]) -> None:
        """Compiles every program that a step can need; see `Programs.compile`."""
        with jax.transfer_guard("allow"):
            self.programs.compile(self._all_buckets(), report)
            self._pool.warmup(
                copies=self._config.max_num_seqs,
                scrubs=self._pool.num_blocks if self._config.scrub_on_free else 0,
                swaps=min(self._max_blocks, self._config.num_host_blocks),
            )

    def forget(self) -> None:
        """Drops what it knows of earlier steps: their tokens and their tables."""
        with jax.transfer_guard_host_to_device("allow"):
            self._last_tokens = jnp.zeros(self._config.max_num_seqs, jnp.int32)
        self._tables = BlockTableCache()

    def _bucket(self, step: ScheduledStep) -> Bucket:
        # A chunk that does not reach its prompt's end samples nothing: whatever it asks for, the least will do.
        kind = _kind([row for row in step.rows if row.num_samples])
        if step.num_decode_steps > 1 or all(row.num_new_tokens == 1 + len(row.guesses) for row in step.rows):
            return self._decode_bucket(self._num_seqs.pad(len(step.rows)), kind, step.num_decode_steps)
        longest = max(row.num_new_tokens for row in step.rows)
        return self._prefill_bucket(len(step.rows), self._num_tokens.pad(step.num_tokens), longest, kind)

    def _decode_bucket(self, num_seqs: int, kind: SamplingKind, num_steps: int) -> Bucket:
        pieces = 0 if self._cascade is None else self._cascade.num_pieces(num_seqs)
        guesses = self._config.num_speculative_tokens
        count = num_steps + guesses
        return Bucket(num_seqs, num_seqs * count, 1 + guesses, kind, num_steps, guesses, pieces)

    def _prefill_bucket(self, num_seqs: int, num_tokens: int, longest: int, kind: SamplingKind) -> Bucket:
        most = self._config.max_num_seqs
        if self._query_lens is None:
            # A padded row and a longer bound cost next to nothing in a prefill step, a program more costs seconds.
            return Bucket(most, num_tokens, num_tokens, kind)
        if num_seqs == 1:
            return Bucket(1, num_tokens, num_tokens, kind)
        return Bucket(most, num_tokens, min(num_tokens, self._query_lens.pad(longest)), kind)

    def _all_buckets(self) -> Iterator[Bucket]:
        for kind in SamplingKind:
            for num_tokens in self._num_tokens.sizes:
                longest = (num_tokens,) if self._query_lens is None else self._query_lens.sizes
                yield from {
                    self._prefill_bucket(num_seqs, num_tokens, size, kind): None
                    for num_seqs in (1, self._config.max_num_seqs)
                    for size in longest
                }
            for num_steps in sorted({1, self._config.num_scheduler_steps}):
                for num_seqs in self._num_seqs.sizes:
                    bucket = self._decode_bucket(num_seqs, kind, num_steps)
                    yield bucket
                    if bucket.num_pieces and self._cascade is not None:
                        yield replace(bucket, piece_tokens=self._cascade.piece_tokens)


def _buckets(config: EngineConfig) -> tuple[Buckets, Buckets]:
    """Returns the sizes of a decode step's sequences and of a prefill step's tokens."""
    most_seqs, most_tokens = config.max_num_seqs, max(config.max_num_batched_tokens, _SMALLEST_PREFILL)
    names = ("sequences of a step", "new tokens of a step")
    if config.batch_invariant:
        return Buckets(names[0], (most_seqs,)), Buckets(names[1], (most_tokens,))
    # A few sequences cost what one does: the weights are read once. Many cost by their number.
    few = tuple(size for size in (1, 4, 16) if size < most_seqs)
    many = Buckets.powers_of_two(names[0], most_seqs, smallest=32).sizes
    return (
        Buckets(names[0], few + many),
        Buckets.powers_of_two(names[1], most_tokens, smallest=_SMALLEST_PREFILL),
    )


def _fill_requests(rows: Sequence[ScheduledRow], layout: PackedLayout, buffer: np.ndarray) -> None:
    token_ids = layout["token_ids"].of(buffer)
    first = 0
    for row in rows:
        request = row.request
        new = request.token_ids(row.start, row.start + row.num_new_tokens) or [-1 - request.pending_row]
        new += row.guesses
        token_ids[first : first + len(new)] = new
        first += len(new)
    requests = [row.request for row in rows]
    count = len(requests)
    layout["temperature"].of(buffer).view(np.float32)[:count] = [request.params.temperature for request in requests]
    layout["top_p"].of(buffer).view(np.float32)[:count] = [request.params.top_p for request in requests]
    layout["top_k"].of(buffer)[:count] = [request.params.top_k for request in requests]
    layout["seed"].of(buffer).view(np.uint32)[:count] = [request.seed for request in requests]
    layout["sample_index"].of(buffer)[:count] = [request.num_sampled_tokens for request in requests]


def _kind(rows: Sequence[ScheduledRow]) -> SamplingKind:
    chosen = [(row.request.params.temperature, row.request.params.top_k, row.request.params.top_p) for row in rows]
    return sampling_kind(*zip(*chosen, strict=True)) if chosen else SamplingKind.GREEDY
