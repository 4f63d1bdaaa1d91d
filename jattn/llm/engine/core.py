"""The engine's loop: schedule, execute, update. It has no lock: one thread owns it."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import jax

from jattn.llm.engine.device.device import Device
from jattn.llm.engine.device.weights import Arrivals, Weights
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.options.speculation import SpeculationStats
from jattn.llm.engine.request.outputs import Outbox, TokenDelta
from jattn.llm.engine.request.request import Request
from jattn.llm.engine.request.validation import taken
from jattn.llm.engine.state import EngineState
from jattn.llm.reports import LOGGER, event
from jattn.pool import check_room
from torch_core.base.checks import shown
from torch_core.base.errors import CacheCorruption, EngineAsleep, EngineClosed, InvalidInput, PoolLost
from torch_core.base.owners import Owner
from torch_core.cache import CacheConfig, CacheManager, CacheStats


class EngineCore(Owner):
    """Continuous batching over one model and one pool: requests come in, deltas go to their outboxes.

    One thread owns it; `EngineThread` is that thread. Only the tokens and the finish reason of a request are kept.
    After an exception, and after the loss of the pool, scheduler, block tables and steps in flight are rebuilt from
    them by the next call: that costs time and no answers, and statistics begin again at zero.

    Args:
        config: sizes of a step.
        cache_config: sizes of the allocator.
        device: pool and programs.

    Attributes:
        requests: the unfinished ones by id, in the order of their arrival.
        load: tokens of all of them, generated ones as many as there can be.
        num_added: samples that were ever added.
        weights_version: number of the weights; see `Engine.weights_version`.
        asleep: `sleep` was called, and `wake` was not.
        abandoned: outboxes, and first samples of prompts, whose requests `drop_abandoned` cancels; any thread may
            append.
        ready: outboxes that got a delta; its reader empties it.
    """

    def __init__(self, config: EngineConfig, cache_config: CacheConfig, device: Device) -> None:
        self._config, self._cache_config = config, cache_config
        self._device: Device | None = device
        self._failed_steps = 0
        self.weights_version = 0
        self._unfinished: Counter[Outbox] = Counter()
        self.requests: dict[str, Request] = {}
        self.load = 0
        self.num_added = 0
        self.asleep = False
        self.abandoned: deque[Outbox | Request] = deque()
        self.ready: set[Outbox] = set()
        self._state: EngineState | None = self._new_state(device)
        self._generation = self._state.generation

    def step(self) -> None:
        """Dispatches the next step, and reads the oldest one when `steps_in_flight` are on the device.

        Raises:
            PoolLost: two steps failed in a row.
            EngineAsleep, EngineClosed: the engine is asleep, or closed.
        """
        if self.asleep:
            self.check_awake()
        state = self._rebuilt()
        device = state.device
        in_flight, most = state.in_flight, self._config.steps_in_flight
        try:
            # Schedule: requests, their tokens, and blocks for them.
            step = state.scheduler.schedule() if len(in_flight) < most else None
            # Execute: one upload and one program, whose results stay on the device.
            if step is not None:
                blocks = step.committed
                if blocks.moves_memory:
                    device.prepare(blocks)
                in_flight.append((step, device.runner.dispatch(step)))
                device.watchdog.dispatched(step)
                step.mark_pending()
            # Update: the oldest results, when no further step fits in front of them.
            if in_flight and (step is None or len(in_flight) >= most):
                self._update(state, device)
                self._failed_steps = 0
                if state.has_residue:
                    self.settle()
            elif step is None and self.requests:
                raise CacheCorruption(f"No request of {len(self.requests)} can run: {state.cache.stats()}.")
        except PoolLost as error:
            self._state = None
            if self._is_second_failure(device, error):
                raise
        except BaseException:
            self._state = None
            device.runner.weights.refuse_deleted()
            raise

    def _update(self, state: EngineState, device: Device) -> None:
        """Reads the oldest step, gives its tokens to their requests and ends those that are complete."""
        step, result = state.in_flight[0]
        try:
            result = result.read(step)
        except BaseException:
            with device.pool.guard():
                raise
        state.in_flight.popleft()
        device.watchdog.came(step)
        routing = device.runner.routing
        if routing is not None:
            routing.came()
        # Columns are padded, so that there may be more than rows.
        answers = [
            (index, row, new)
            for index, row, new in zip(count(), step.rows, result.tokens.T.tolist(), strict=False)
            if row.num_samples and row.request.finish_reason is None
        ]
        cuts: dict[str, int] = {}
        if len(result.tokens) > 1:
            answers = [
                (index, row, [token for token in new[: row.num_samples] if token >= 0]) for index, row, new in answers
            ]
            cuts = {row.request.request_id: len(new) for _, row, new in answers if len(new) < row.num_samples}
        # The slots of wrong guesses are given back before the cache knows the right tokens.
        if cuts:
            state.cache.retire(step.committed.step_id, cuts)
        came: list[tuple[str, list[int]]] = []
        for index, (request, _, _, num_samples, guesses), new in answers:
            if guesses:
                device.speculation.add(len(guesses), len(new) - 1)
            request.num_pending_tokens -= num_samples
            request.num_computed_tokens -= num_samples - len(new)
            if not request.eos_token_ids.isdisjoint(new):
                new = request.until_stop(new)
            if result.logprobs is not None:
                result.keep_logprobs(request, index, len(new))
            request.extend(new, self.weights_version)
            came.append((request.request_id, new))
        state.cache.append_each(came)
        for _, row, _ in answers:
            request = row.request
            if reason := request.end_reason:
                if routing is not None:
                    # This step, too, although it has not retired.
                    routing.give(state.cache, request, request.num_known_tokens)
                self._finish(state, request, reason)
            else:
                request.deliver()
                self.ready.add(request.outbox)
        if not cuts:
            state.cache.retire(step.committed.step_id)

    def add(self, requests: Sequence[Request], numbers: Sequence[int] | None = None) -> None:
        """Queues the samples of prompts. After an error those before it are queued.

        Args:
            requests: the first sample of each prompt; see `Validator.requests`.
            numbers: the number of each is at least this, and at least `num_added`.

        Raises:
            InvalidInput: another unfinished request has the id.
            EngineClosed: the engine is closed.
            RequestTooLong: it can never fit the pool.
        """
        for index, first in enumerate(requests):
            self._add(first, self.num_added if numbers is None else max(self.num_added, numbers[index]))

    def cancel(self, request_id: str) -> TokenDelta:
        """Ends an unfinished request and returns its end, which its outbox gets, too.

        Raises:
            InvalidInput: no unfinished request has this id.
        """
        request = self.requests.get(request_id) if isinstance(request_id, str) else None
        if request is None:
            raise InvalidInput(f"no unfinished request has the id {shown(request_id)}.")
        self._end(request, "cancelled")
        return TokenDelta(request_id, (), request.finish_reason)

    def stop(self, request: Request, num_output_tokens: int) -> None:
        """Ends a request whose text reached a stop string, and drops the tokens after the first `num_output_tokens`.

        Args:
            request: it may have ended by its last tokens.
            num_output_tokens: generated tokens to keep.
        """
        if request.finish_reason is None:
            self._end(request, "stop")
        del request.output_token_ids[num_output_tokens:]
        request.num_delivered = min(request.num_delivered, num_output_tokens)
        request.finish_reason = "stop"

    def drop_abandoned(self) -> None:
        """Cancels abandoned requests; no outbox reports it."""
        while self.abandoned:
            found = self.abandoned[0]
            if isinstance(found, Request):
                self._discard(found.samples)
            elif self.runs_for(found):
                self._discard(tuple(request for request in self.requests.values() if request.outbox is found))
                # A thread may still wait for it.
                self.ready.add(found)
            self.abandoned.popleft()

    def _add(self, first: Request, number: int) -> None:
        state = self._rebuilt()
        if first.request_id in self.requests:
            raise taken(first.request_id)
        for index, request in enumerate(first.samples):
            request.take_number(number + index)
        try:
            for request in first.samples:
                state.scheduler.add(request)
                self.requests[request.request_id] = request
                self.load += request.most_tokens
                self._unfinished[first.outbox] += 1
            self.num_added = number + len(first.samples)
        except InvalidInput:
            # Refused with the first of them, before anything changed.
            raise
        except BaseException:
            self._state = None
            raise
        if LOGGER.isEnabledFor(logging.DEBUG):
            fields = {"num_prompt_tokens": len(first.prompt_token_ids), "max_tokens": first.max_tokens}
            event(logging.DEBUG, "request_added", request_id=first.request_id, **fields, n=len(first.samples))

    def _discard(self, requests: tuple[Request, ...]) -> None:
        for request in requests:
            if self.requests.get(request.request_id) is request:
                request.end_is_delivered = True
                self._end(request, "cancelled")
                request.outbox.take(request.request_id)

    def runs_for(self, outbox: Outbox) -> bool:
        """Returns whether a request of an outbox is unfinished."""
        return outbox in self._unfinished

    def check_awake(self) -> None:
        """Raises EngineAsleep while the engine is asleep, and EngineClosed when it is closed."""
        _ = self.device
        if self.asleep:
            raise EngineAsleep("the engine is asleep: its pool has no memory. wake() takes it again.")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._device is None

    @property
    def device(self) -> Device:
        """Pool and programs.

        Raises:
            EngineClosed: the engine is closed.
        """
        if self._device is None:
            raise EngineClosed("the engine is closed; build another one.")
        return self._device

    @property
    def cache(self) -> CacheManager:
        """The block allocator of now."""
        return self._rebuilt().cache

    def warmup(self, report: Callable[[int, int, str], None], wanted: Callable[[str], bool] | None) -> None:
        """Compiles programs, and runs them if no request waits for it; see `Engine.warmup`."""
        device = self.device
        # Of a new engine nothing is in the pool yet, unless prompts are assumed to be computed.
        device.warmup(report, wanted, lends_pool=not (self.num_added or self.asleep or self.cache.stats().cached))
        while self.rehearse_next():
            pass

    def rehearse_next(self) -> bool:
        """Runs a program that was not rehearsed, if the engine has no request; returns whether there was one."""
        self.settle()
        return not (self.requests or self.asleep or self.closed) and self.device.runner.rehearse_next()

    def settle(self) -> None:
        """Reads the steps in flight that no request waits for, and scrubs the blocks of the last request."""
        state = self._state
        if state is None or self.requests:
            return
        device = self.device
        try:
            while state.in_flight:
                self._update(state, device)
            if state.has_residue:
                state.move_blocks(state.cache.scrub())
                state.has_residue = False
        except PoolLost:
            # The residue went with the pool.
            self._state = None
        except BaseException:
            self._state = None
            raise

    def cache_stats(self) -> CacheStats:
        """Returns a frozen snapshot of the block allocator."""
        self.settle()
        return self.cache.stats()

    def speculation_stats(self) -> SpeculationStats:
        """Returns the counts of guesses since the engine was built."""
        return self.device.speculation.stats()

    def fitting(self, check: Callable[[Weights], Arrivals], unfinished: str = "restart") -> list[jax.Array]:
        """Returns the leaves that `replace_weights` takes, checked and on the devices: in every process or in none.

        Args:
            check: function that returns the new leaves.
            unfinished: "finish" runs unfinished requests to their end first.

        Raises:
            InvalidInput: the leaves do not fit, here or in another process; the engine is asleep and has requests to
                finish; there are several processes and the engine is awake.
        """
        device = self.device

        def checked() -> Arrivals:
            if unfinished == "finish" and self.asleep and self.requests:
                wanted = "wake() and let its requests end before, or say 'restart'"
                raise InvalidInput("unfinished", "is 'finish' and the engine is asleep", wanted)
            return check(device.runner.weights)

        return device.brought(checked, is_idle=self.asleep)

    def replace_weights(self, leaves: list[jax.Array], version: int | None = None) -> None:
        """Replaces the weights; the contents of the cache and its prefixes are dropped.

        Args:
            leaves: result of `fitting`.
            version: new value of `weights_version`; None for one more.
        """
        weights = self.device.runner.weights
        self._state = None
        self.weights_version = self.weights_version + 1 if version is None else version
        weights.leaves = leaves
        event(logging.INFO, "weights_replaced", num_unfinished=len(self.requests))

    def sleep(self) -> None:
        """Frees the pool's memory; the requests stay, and are computed again after `wake`.

        Nothing happens to an engine that is asleep.

        Raises:
            InvalidInput: the engine is closed, or a torch view of the pool is alive; it stays awake then.
        """
        device = self.device
        if not self.asleep:
            self._state = None
            device.lend()
            self.asleep = True

    def wake(self) -> None:
        """Allocates the pool again.

        Raises:
            InvalidInput: the engine is closed, or the device has too little free memory; the engine then stays asleep.
        """
        device = self.device
        if self.asleep:
            if device.pool.is_lost():
                check_room(device.pool.num_bytes)
                device.renew()
            self.asleep = False

    def follow(self) -> bool:
        """Repeats process 0's operations until its engine sleeps or closes; False in process 0 or a single process."""
        device = self.device
        if device.channel is None or not jax.process_index():
            return False
        self.asleep = False
        if device.follow(device.channel):
            self.close()
        else:
            self.asleep = True
        return True

    def close(self) -> None:
        """Cancels every request and frees the pool's memory."""
        device, self._device, self._state = self._device, None, None
        for request in list(self.requests.values()):
            request.finish_reason = "cancelled"
            self._release(request)
        if device is not None:
            device.close()

    def _finish(self, state: EngineState, request: Request, reason: str) -> None:
        """Ends a request; tokens of it that are still on the device are dropped."""
        try:
            request.end(reason)
            request.metrics = replace(request.metrics, finish_time=time.monotonic())
            if LOGGER.isEnabledFor(logging.DEBUG):
                count = len(request.output_token_ids)
                fields = {"request_id": request.request_id, "reason": reason, "num_output_tokens": count}
                event(logging.DEBUG, "request_finished", **fields)
            state.scheduler.finish(request)
            state.has_residue = self._config.scrub_on_free
            self._release(request)
        except BaseException:
            # The next call rebuilds the state, and releases the request.
            self._state = None
            raise

    def _end(self, request: Request, reason: str) -> None:
        """Ends a request between two steps."""
        state = self._rebuilt()
        if request.finish_reason is not None:
            # A step that failed had read its last token.
            return
        routing = state.device.runner.routing
        if routing is not None:
            routing.give(state.cache, request)
        self._finish(state, request, reason)
        if state.has_residue:
            self.settle()

    def _release(self, request: Request) -> None:
        """Delivers the end of a request and forgets it."""
        if not request.end_is_delivered:
            self._deliver(request)
        outbox = request.outbox
        self._unfinished[outbox] -= 1
        if not self._unfinished[outbox]:
            del self._unfinished[outbox]
        del self.requests[request.request_id]
        self.load -= request.most_tokens

    def _deliver(self, request: Request) -> None:
        request.deliver()
        self.ready.add(request.outbox)

    def _is_second_failure(self, device: Device, error: PoolLost) -> bool:
        """Counts a failed step; returns whether it is the second in a row."""
        self._failed_steps += 1
        device.runner.programs.doubt_last()
        event(logging.WARNING, "pool_lost", failed_steps=self._failed_steps, reason=str(error))
        # Other processes wait in the step that failed here, and will not begin another.
        if self._failed_steps == 1 and device.channel is None:
            return False
        self._failed_steps = 0
        return True

    def _rebuilt(self) -> EngineState:
        """Returns the state, rebuilt from the requests if an exception or the loss of the pool ended it."""
        state, device = self._state, self.device
        if state is None or state.generation != device.pool.generation:
            state = self._rebuild(device)
        return state

    def _rebuild(self, device: Device) -> EngineState:
        self._unfinished = Counter(request.outbox for request in self.requests.values())
        self.load = sum(request.most_tokens for request in self.requests.values())
        for request in list(self.requests.values()):
            if request.finish_reason is None and (reason := request.end_reason) is not None:
                request.end(reason)
            if request.finish_reason is not None:
                self._release(request)
            elif len(request.output_token_ids) > request.num_delivered:
                self._deliver(request)
        # Which blocks of the old pool are to be scrubbed is not known any more.
        holds_residue = self._config.scrub_on_free and device.pool.generation == self._generation
        if not self.asleep and (holds_residue or device.pool.is_lost()):
            device.renew()
        state = self._new_state(device)
        for request in self.requests.values():
            request.restart()
            state.scheduler.add(request)
        self._generation = state.generation
        self._state = state
        return state

    def _new_state(self, device: Device) -> EngineState:
        return EngineState(self._config, self._cache_config, device)
