"""Runs scheduled steps on the device: one upload, one jitted program per bucket, sampling included."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.engine.config import EngineConfig, MemoryPlan
from jattn.engine.sampler import SamplingKind, sample, sampling_kind
from jattn.engine.scheduler import ScheduledRow, ScheduledStep
from jattn.metadata import AttentionMetadata
from jattn.models import Decoder
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
        model: the decoder; its leaves are captured now.
        pool: the cache arrays; the runner donates them to every step.
        config: sizes of a step.
        plan: the pool's plan.
    """

    def __init__(self, model: Decoder, pool: KVPool, config: EngineConfig, plan: MemoryPlan) -> None:
        graph, state = nnx.split(model)
        self._leaves, treedef = jax.tree.flatten(state)
        self._pool = pool
        self._plan = plan
        window = model.config.sliding_window
        self._window_left = None if window is None else window - 1
        self._tables = BlockTableCache()
        self._max_num_seqs = config.max_num_seqs
        self._num_seqs = Buckets.powers_of_two("sequences of a step", config.max_num_seqs)
        self._num_tokens = Buckets.powers_of_two(
            "new tokens of a step", max(config.max_num_batched_tokens, _SMALLEST_PREFILL), smallest=_SMALLEST_PREFILL
        )
        self._last_tokens = jnp.zeros(self._max_num_seqs, jnp.int32)
        self._query_len = Buckets.powers_of_two(
            "new tokens of a row", config.max_num_batched_tokens, smallest=_SMALLEST_QUERY
        )
        self._prefill_num_seqs = Buckets("sequences of a prefill step", tuple(sorted({1, config.max_num_seqs})))
        self._step, self._programs = _jitted_step(graph, treedef)

    @property
    def programs(self) -> tuple[str, ...]:
        """The programs that were traced so far, one entry for each compilation; constant after warm-up.

        Runners of equally built models share their programs.
        """
        return tuple(self._programs)

    def dispatch(self, step: ScheduledStep) -> jax.Array:
        """Starts a step and returns its sampled tokens, int32[max_num_seqs], one for each row in order.

        Raises:
            PoolLost: the step failed and took the pool's contents with it.
        """
        layout, max_query_len = self._bucket(step)
        buffer = np.zeros(layout.num_elements, np.int32)
        build_common_metadata(
            step.committed.rows,
            block_size=self._plan.block_size,
            num_blocks=self._plan.num_blocks,
            num_seqs=layout["seq_lens"].shape[0],
            num_tokens=layout["token_ids"].shape[0],
            max_blocks=self._plan.max_blocks,
            window_left=self._window_left,
            table_cache=self._tables,
            layout=layout,
            buffer=buffer,
        )
        kind = _fill_requests(step.rows, layout, buffer)
        self._last_tokens = self._pool.run(
            functools.partial(
                self._step, layout=layout, max_query_len=max_query_len, kind=kind, max_num_seqs=self._max_num_seqs
            ),
            self._leaves,
            self._last_tokens,
            buffer,
        )
        return self._last_tokens

    def forget_last_tokens(self) -> None:
        """Drops the tokens of a failed step."""
        self._last_tokens = jnp.zeros(self._max_num_seqs, jnp.int32)

    def _bucket(self, step: ScheduledStep) -> tuple[PackedLayout, int]:
        longest = max(row.num_new_tokens for row in step.rows)
        if longest == 1:
            num_seqs = self._num_seqs.pad(len(step.rows))
            return _layout(num_seqs, num_seqs, self._plan.max_blocks), 1
        # A padded row costs next to nothing in a prefill step, a program more costs seconds.
        num_seqs = self._prefill_num_seqs.pad(len(step.rows))
        num_tokens = self._num_tokens.pad(step.num_tokens)
        return _layout(num_seqs, num_tokens, self._plan.max_blocks), self._query_len.pad(longest)


@functools.lru_cache(maxsize=8)
def _jitted_step(graph: Any, treedef: Any) -> tuple[Any, list[str]]:
    """Returns the jitted step of one kind of model and the list of its traces."""
    programs: list[str] = []
    # donate_argnums=0 is the pool: KVPool.run refuses a step that does not consume it.
    step = jax.jit(
        functools.partial(_step, programs, graph, treedef),
        donate_argnums=0,
        static_argnames=("layout", "max_query_len", "kind", "max_num_seqs"),
    )
    return step, programs


@functools.lru_cache(maxsize=256)
def _layout(num_seqs: int, num_tokens: int, max_blocks: int) -> PackedLayout:
    per_row = ("temperature", "top_k", "top_p", "seed", "sample_index")
    extra = [("token_ids", (num_tokens,)), *((name, (num_seqs,)) for name in per_row)]
    return metadata_layout(num_seqs=num_seqs, num_tokens=num_tokens, max_blocks=max_blocks, extra=extra)


def _fill_requests(rows: Sequence[ScheduledRow], layout: PackedLayout, buffer: np.ndarray) -> SamplingKind:
    token_ids = layout["token_ids"].of(buffer)
    first = 0
    for row in rows:
        request, stop = row.request, row.start + row.num_new_tokens
        if row.start >= request.num_known_tokens:
            token_ids[first] = -1 - request.pending_row
        else:
            token_ids[first : first + row.num_new_tokens] = request.token_ids(row.start, stop)
        first += row.num_new_tokens
    requests = [row.request for row in rows]
    count = len(requests)
    params = [request.params for request in requests]
    layout["temperature"].of(buffer).view(np.float32)[:count] = [each.temperature for each in params]
    layout["top_p"].of(buffer).view(np.float32)[:count] = [each.top_p for each in params]
    layout["top_k"].of(buffer)[:count] = [each.top_k for each in params]
    layout["seed"].of(buffer).view(np.uint32)[:count] = [request.seed for request in requests]
    layout["sample_index"].of(buffer)[:count] = [request.num_sampled_tokens for request in requests]
    return sampling_kind(
        [each.temperature for each in params], [each.top_k for each in params], [each.top_p for each in params]
    )


def _step(
    programs: list[str],
    graph: Any,
    treedef: Any,
    kv_caches: tuple[jax.Array, ...],
    leaves: list[jax.Array],
    last_tokens: jax.Array,
    buffer: jax.Array,
    *,
    layout: PackedLayout,
    max_query_len: int,
    kind: SamplingKind,
    max_num_seqs: int,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    fields = layout.unpack(buffer)
    num_seqs, num_tokens = fields["seq_lens"].shape[0], fields["token_ids"].shape[0]
    # Runs when JAX traces, so the list counts compilations.
    programs.append(f"{num_seqs} sequences, {num_tokens} tokens, queries up to {max_query_len}, {kind.value}")
    model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
    metadata = AttentionMetadata(
        block_tables=fields["block_tables"],
        seq_lens=fields["seq_lens"],
        query_start_loc=fields["query_start_loc"],
        slot_mapping=fields["slot_mapping"],
        max_query_len=max_query_len,
    )
    token_ids = fields["token_ids"]
    token_ids = jnp.where(token_ids < 0, last_tokens[jnp.maximum(-1 - token_ids, 0)], token_ids)
    hidden, kv_caches = model(token_ids, fields["positions"], kv_caches, metadata)
    last_rows = jnp.maximum(fields["query_start_loc"][1:] - 1, 0)
    tokens = sample(
        model.logits(hidden[last_rows]),
        _as_float(fields["temperature"]),
        fields["top_k"],
        _as_float(fields["top_p"]),
        jax.lax.bitcast_convert_type(fields["seed"], jnp.uint32),
        fields["sample_index"],
        kind=kind,
    )
    return jnp.zeros(max_num_seqs, jnp.int32).at[:num_seqs].set(tokens), kv_caches


def _as_float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
