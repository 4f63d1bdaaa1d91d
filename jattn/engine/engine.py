"""The engine: takes requests, runs steps, gives back tokens; survives a lost pool by computing again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jattn.engine.config import EngineConfig, plan_engine_pool
from jattn.engine.request import Request, RequestMetrics, SamplingParams
from jattn.engine.runner import ModelRunner
from jattn.engine.scheduler import ScheduledStep, Scheduler
from jattn.models import Decoder
from jattn.pool import HostBlocks, KVPool, PoolPlan
from torch_core.cache import CacheConfig, CacheManager, CacheStats, CommittedStep
from torch_core.errors import CacheCorruption, InvalidInput, PoolLost, RequestTooLong
from torch_core.specs import KVCacheSpec

__all__ = ["Engine", "TokenDelta"]

_MAX_REQUEST_ID = 256
_MAX_SALT_BYTES = 64


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step brought for one request.

    Attributes:
        request_id: whose.
        token_ids: its new tokens, in order; empty when it was cancelled.
        finish_reason: "length", "stop" or "cancelled"; None while it runs.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: ScheduledStep
    tokens: jax.Array


class Engine:
    """Continuous batching over one model and one pool. Token ids in, token ids out; not thread-safe.

    Args:
        model: the decoder. Its weights are captured now.
        config: sizes; see `EngineConfig`.
        kv_cache_dtype: element type of the cache; the model's own if None.
        model_fingerprint: identifies the weights in prefix keys; needed only where keys outlive the engine.

    Raises:
        InvalidInput: sizes that do not fit the model or the memory budget.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig | None = None,
        *,
        kv_cache_dtype: str | None = None,
        model_fingerprint: bytes = b"",
    ) -> None:
        self._config = config = EngineConfig() if config is None else config
        shape = model.config
        spec = KVCacheSpec(
            num_kv_heads=shape.num_key_value_heads,
            head_size=shape.head_dim,
            block_size=config.block_size,
            dtype=kv_cache_dtype or jnp.dtype(shape.dtype).name,
        )
        self._vocab_size = shape.vocab_size
        self._eos_token_ids = frozenset(shape.eos_token_ids)
        self._max_model_len = _max_model_len(config.max_model_len, shape.max_position_embeddings)
        self._plan = plan_engine_pool(
            config, spec, num_layers=shape.num_hidden_layers, max_model_len=self._max_model_len
        )
        max_blocks = -(-self._max_model_len // config.block_size)
        self._cache = CacheManager(
            CacheConfig(
                num_blocks=self._plan.num_blocks,
                block_size=config.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
                sliding_window=shape.sliding_window,
                max_step_tokens=config.max_num_batched_tokens,
                model_fingerprint=model_fingerprint,
                cache_dtype=spec.dtype,
                max_blocks_per_seq=max_blocks,
                scrub_on_free=config.scrub_on_free,
                num_host_blocks=config.num_host_blocks,
            )
        )
        self._pool = KVPool(spec, num_layers=shape.num_hidden_layers, num_blocks=self._plan.num_blocks)
        self._runner = ModelRunner(model, self._pool, config, max_blocks=max_blocks)
        self._host = HostBlocks(self._pool, config.num_host_blocks) if config.num_host_blocks else None
        self._scheduler = Scheduler(config, self._cache, self._move_blocks)
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._num_added = 0
        self._failed_steps = 0

    @property
    def pool_plan(self) -> PoolPlan:
        """The pool's size; its text gives blocks, tokens and GiB."""
        return self._plan

    @property
    def programs(self) -> tuple[str, ...]:
        """One line for each program compiled so far; constant after warm-up."""
        return self._runner.programs

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling them, within the steps that needed them."""
        return self._runner.compile_seconds

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return self._scheduler.num_unfinished

    def cache_stats(self) -> CacheStats:
        """Returns a frozen snapshot of the block allocator."""
        return self._cache.stats()

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        salt: bytes | None = None,
    ) -> Request:
        """Queues a request; nothing runs until `step`.

        Args:
            prompt_token_ids: at least one token id below the model's vocab_size.
            params: how to sample; the defaults of `SamplingParams` if None.
            request_id: unique among unfinished requests; numbered if None.
            prompt: the prompt's text, for the result.
            salt: 1 to 64 bytes; only requests of equal salt share cached prefixes. None for the engine's own.

        Raises:
            InvalidInput: an empty prompt, a token id outside the vocabulary, a bad or taken id, or a bad salt.
            RequestTooLong: it can never fit the model or the pool; the message gives the numbers.
        """
        params = SamplingParams() if params is None else params
        request_id = f"request-{self._num_added}" if request_id is None else request_id
        self._check_id(request_id)
        tokens = self._checked_tokens(request_id, prompt_token_ids)
        if salt is not None and not (isinstance(salt, bytes) and 1 <= len(salt) <= _MAX_SALT_BYTES):
            raise InvalidInput(f"salt must be bytes, 1 to {_MAX_SALT_BYTES} of them, or None.")
        total = len(tokens) + params.max_tokens
        if total > self._max_model_len:
            raise RequestTooLong(
                f"{request_id!r} needs {total} tokens ({len(tokens)} prompt + {params.max_tokens} new); this engine's "
                f"max_model_len is {self._max_model_len}. Shorten the prompt or lower max_tokens."
            )
        eos = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        seed = params.seed if params.seed is not None else (self._config.seed + self._num_added) & 0xFFFFFFFF
        request = Request(
            request_id, tokens, params, seed, eos, RequestMetrics(time.monotonic()), prompt=prompt, salt=salt
        )
        self._scheduler.add(request)
        self._requests[request_id] = request
        self._num_added += 1
        return request

    def cancel(self, request_id: str) -> TokenDelta:
        """Ends an unfinished request now; tokens of it that are still on the device are dropped.

        Raises:
            InvalidInput: no unfinished request has this id.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise InvalidInput(f"no unfinished request has the id {request_id!r}.")
        delta = self._finish(request, (), "cancelled")
        self._scrub_if_idle()
        return delta

    def step(self) -> list[TokenDelta]:
        """Dispatches the next step if there is one and reads the oldest if it must; returns what came.

        A step that fails after it consumed the pool costs time, not answers: every running request is computed again
        from its tokens. Only a second failure in a row is raised.

        Raises:
            PoolLost: two steps failed in a row. The engine is still usable.
        """
        try:
            deltas = self._advance()
        except PoolLost:
            self._recover()
            self._failed_steps += 1
            if self._failed_steps > 1:
                self._failed_steps = 0
                raise
            return []
        return deltas

    def _advance(self) -> list[TokenDelta]:
        dispatched = False
        if len(self._in_flight) < self._config.steps_in_flight:
            dispatched = self._dispatch()
        if self._in_flight and (not dispatched or len(self._in_flight) >= self._config.steps_in_flight):
            return self._read_oldest()
        if not dispatched and self.num_unfinished:
            raise CacheCorruption(
                f"{self.num_unfinished} requests are unfinished, but none can run and no step is in flight: "
                f"{self._cache.stats()}."
            )
        return []

    def _dispatch(self) -> bool:
        step = self._scheduler.schedule()
        if step is None:
            return False
        self._pool.prepare(step.committed, self._host)
        tokens = self._runner.dispatch(step)
        for index, row in enumerate(step.rows):
            if row.num_samples:
                row.request.num_pending_tokens += row.num_samples
                row.request.pending_row = index
        self._in_flight.append(_InFlight(step, tokens))
        return True

    def _read_oldest(self) -> list[TokenDelta]:
        entry = self._in_flight[0]
        with self._pool.guard():
            tokens = np.asarray(entry.tokens)  # [num_decode_steps, max_num_seqs]
        self._in_flight.popleft()
        self._failed_steps = 0
        now = time.monotonic()
        deltas = []
        for row, sampled in zip(entry.step.rows, tokens.T.tolist(), strict=False):
            request = row.request
            if not row.num_samples or request.finish_reason is not None:
                continue
            request.num_pending_tokens -= row.num_samples
            new = _until_stop(sampled[: row.num_samples], request.eos_token_ids)
            request.output_token_ids += new
            self._cache.append_tokens(request.request_id, new)
            if request.metrics.first_token_time is None:
                request.metrics = replace(request.metrics, first_token_time=now)
            if new[-1] in request.eos_token_ids:
                deltas.append(self._finish(request, new, "stop"))
            elif len(request.output_token_ids) >= request.params.max_tokens:
                deltas.append(self._finish(request, new, "length"))
            else:
                deltas.append(TokenDelta(request.request_id, new, None))
        self._cache.retire(entry.step.committed.step_id)
        self._scrub_if_idle()
        return deltas

    def stop(self, request: Request, num_output_tokens: int) -> None:
        """Ends a request whose text reached a stop string, and drops the tokens that came with it and lie behind.

        Args:
            request: one of this engine's; it may have ended by its last tokens.
            num_output_tokens: generated tokens to keep.
        """
        if request.finish_reason is None:
            self._finish(request, (), "stop")
            self._scrub_if_idle()
        if num_output_tokens < len(request.output_token_ids):
            del request.output_token_ids[num_output_tokens:]
            request.finish_reason = "stop"

    def _finish(self, request: Request, tokens: tuple[int, ...], reason: str) -> TokenDelta:
        request.finish_reason = reason
        request.metrics = replace(request.metrics, finish_time=time.monotonic())
        self._scheduler.finish(request)
        del self._requests[request.request_id]
        return TokenDelta(request.request_id, tokens, reason)

    def _scrub_if_idle(self) -> None:
        # While steps come, each scrubs what was freed before it.
        if self._config.scrub_on_free and not self._in_flight and not self.num_unfinished:
            self._move_blocks(self._cache.scrub())

    def _move_blocks(self, step: CommittedStep) -> None:
        """Executes a step without rows."""
        self._pool.prepare(step, self._host)
        self._cache.retire(step.step_id)

    def _recover(self) -> None:
        self._in_flight.clear()
        self._scheduler.requeue_all()
        self._runner.forget_last_tokens()

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str) or not 1 <= len(request_id) <= _MAX_REQUEST_ID:
            raise InvalidInput(f"request_id must be a string of 1 to {_MAX_REQUEST_ID} characters.")
        if request_id in self._requests:
            raise InvalidInput(f"request_id {request_id!r} belongs to an unfinished request; ids must be unique.")

    def _checked_tokens(self, request_id: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        tokens = np.asarray(token_ids)
        if tokens.size == 0:
            raise InvalidInput(f"the prompt of {request_id!r} is empty; it needs at least one token.")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InvalidInput(
                f"the prompt of {request_id!r} has dtype {tokens.dtype} and shape {tokens.shape}; it must be a flat "
                "sequence of ints."
            )
        bad = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))
        if bad.size:
            raise InvalidInput(
                f"prompt token {int(bad[0])} of {request_id!r} is outside the vocabulary; ids are 0 to "
                f"{self._vocab_size - 1}."
            )
        return tuple(tokens.tolist())


def _max_model_len(wanted: int | None, model_len: int) -> int:
    if wanted is not None and wanted > model_len:
        raise InvalidInput(f"max_model_len is {wanted}; the model was made for {model_len} tokens at most.")
    return model_len if wanted is None else wanted


def _until_stop(tokens: list[int], stops: frozenset[int]) -> tuple[int, ...]:
    if not stops.isdisjoint(tokens):
        tokens = tokens[: next(index for index, token in enumerate(tokens) if token in stops) + 1]
    return tuple(tokens)
