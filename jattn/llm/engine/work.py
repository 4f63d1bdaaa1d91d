"""Everything between requests and their answers that can be made anew: block allocator, queues, steps in flight."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax

from jattn.llm.engine.device.device import Device
from jattn.llm.engine.device.results import StepResult
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.request.request import Request
from jattn.llm.engine.scheduler import ScheduledStep, Scheduler
from jattn.llm.log import event
from torch_core.base.errors import CacheCorruption
from torch_core.cache import CacheConfig, CacheManager, CommittedStep

__all__ = ["Work"]


@dataclass(frozen=True, slots=True)
class _BlockMover:
    """Executes and retires steps without rows. No method of `Work`: a cycle would keep the pool's memory."""

    device: Device
    cache: CacheManager

    def __call__(self, step: CommittedStep) -> None:
        self.device.prepare(step)
        self.cache.retire(step.step_id)


class Work:
    """Runs requests over one generation of a pool.

    Whatever interrupts a method leaves the work in no defined state: throw it away and make another from the requests,
    whose tokens stand. Nothing but the requests and their outboxes is changed that outlives it.

    Args:
        config: sizes of a step.
        cache_config: sizes of the allocator.
        device: what to run on.

    Attributes:
        cache: the block allocator.
        scheduler: the queues.
        generation: of the pool.
    """

    def __init__(self, config: EngineConfig, cache_config: CacheConfig, device: Device) -> None:
        self._config = config
        self._device = device
        self.cache = CacheManager(cache_config)
        self._move_blocks = _BlockMover(device, self.cache)
        self.scheduler = Scheduler(
            config,
            self.cache,
            self._move_blocks,
            in_turns=device.in_turns,
            pads_rows=device.pads_rows,
            num_scheduler_steps=device.num_scheduler_steps,
        )
        self._in_flight: deque[tuple[ScheduledStep, StepResult]] = deque()
        self._has_residue = False
        self.generation = device.pool.generation
        device.forget()
        device.watchdog.forget()

    def finish(self, request: Request, reason: str) -> None:
        """Ends a request; tokens of it that are still on the device are dropped."""
        request.outbox.note(request)
        request.finish_reason = reason
        request.metrics = replace(request.metrics, finish_time=time.monotonic())
        count = len(request.output_token_ids)
        event(logging.DEBUG, "request_finished", request_id=request.request_id, reason=reason, num_output_tokens=count)
        self.scheduler.finish(request)
        self._has_residue = self._config.scrub_on_free

    def advance(self) -> list[Request] | None:
        """Dispatches the next step if there is one and reads the oldest if it must.

        Returns:
            The requests that ended; None if no step was read.

        Raises:
            PoolLost: a step failed and took the pool's contents with it.
        """
        with _own_transfers():
            dispatched = len(self._in_flight) < self._config.steps_in_flight and self._dispatch()
            if self._in_flight and (not dispatched or len(self._in_flight) >= self._config.steps_in_flight):
                return self._read_oldest()
        if not dispatched and self.scheduler.num_unfinished:
            raise CacheCorruption(
                f"{self.scheduler.num_unfinished} requests are unfinished, but none can run and no step is in flight: "
                f"{self.cache.stats()}."
            )
        return None

    def settle(self) -> None:
        """Reads what is in flight if nobody waits for it any more: a step holds its blocks until it is read.

        Raises:
            PoolLost: as `advance`.
        """
        if not self.scheduler.num_unfinished:
            with _own_transfers():
                while self._in_flight:
                    self._read_oldest()

    def scrub_if_idle(self) -> None:
        """Scrubs what the last request left; while steps come, each scrubs what was freed before it.

        Raises:
            PoolLost: as `advance`.
        """
        if self._has_residue and not self.scheduler.num_unfinished:
            self.settle()
            with _own_transfers():
                self._move_blocks(self.cache.scrub())
            self._has_residue = False

    def _dispatch(self) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            return False
        self._device.prepare(step.committed)
        result = self._device.runner.dispatch(step)
        self._device.watchdog.dispatched(step)
        for index, row in enumerate(step.rows):
            if row.num_samples:
                row.request.num_pending_tokens += row.num_samples
                row.request.pending_row = index
        self._in_flight.append((step, result))
        return True

    def _read_oldest(self) -> list[Request]:
        step, result = self._in_flight[0]
        with self._device.pool.guard():
            result = result.read([row.request for row in step.rows])
        self._in_flight.popleft()
        self._device.watchdog.came(step)
        result.keep_prompt_logprobs()
        now = time.monotonic()
        ended = []
        answers = [
            (index, row, [token for token in sampled[: row.num_samples] if token >= 0])
            for index, (row, sampled) in enumerate(zip(step.rows, result.tokens.T.tolist(), strict=False))
            if row.num_samples and row.request.finish_reason is None
        ]
        # The slots of wrong guesses go back before the right tokens are known to the cache.
        cuts = {row.request.request_id: len(new) for _, row, new in answers if len(new) < row.num_samples}
        if cuts:
            self.cache.retire(step.committed.step_id, cuts)
        for index, row, new in answers:
            request = row.request
            if row.guesses:
                self._device.speculation.add(len(row.guesses), len(new) - 1)
            request.num_pending_tokens -= row.num_samples
            request.num_computed_tokens -= row.num_samples - len(new)
            new = _until_stop(new, request.eos_token_ids)
            request.outbox.note(request)
            result.keep_logprobs(request, index, len(new))
            _force_end(request, new)
            request.output_token_ids += new
            self.cache.append_tokens(request.request_id, new)
            if request.metrics.first_token_time is None:
                request.metrics = replace(request.metrics, first_token_time=now)
            if reason := request.end_reason:
                self.finish(request, reason)
                ended.append(request)
        if not cuts:
            self.cache.retire(step.committed.step_id)
        return ended


@contextlib.contextmanager
def _own_transfers() -> Iterator[None]:
    """Lets uploads of metadata and downloads of tokens pass the user's transfer guards, which look for his own."""
    with jax.transfer_guard_host_to_device("allow"), jax.transfer_guard_device_to_host("allow"):
        yield


def _force_end(request: Request, new: list[int]) -> None:
    """Puts the token that ends a text in the place of the last one that it may have, as certain as transformers."""
    if request.forced_eos_token_id is None or len(request.output_token_ids) + len(new) < request.max_tokens:
        return
    new[-1] = request.forced_eos_token_id
    if request.logprobs:
        request.logprobs[-1] = request.logprobs[-1]._replace(logprob=0.0, rank=1)


def _until_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    if stops.isdisjoint(tokens):
        return tokens
    return tokens[: next(index for index, token in enumerate(tokens) if token in stops) + 1]
