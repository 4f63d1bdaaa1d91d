"""The one owner of an engine's requests and of the work on them: each change is whole or is made anew."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import jax

from jattn.llm.engine.device.device import Device
from jattn.llm.engine.device.weights import Arrivals, Weights
from jattn.llm.engine.no_mesh import no_mesh
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.request.outputs import Outbox
from jattn.llm.engine.request.request import Request
from jattn.llm.engine.work import Work
from jattn.llm.log import event
from jattn.llm.processes import Channel, check_together
from jattn.pool import check_room
from torch_core.base.errors import EngineAsleep, InvalidInput, PoolLost
from torch_core.cache import CacheConfig

__all__ = ["Owner"]


class Owner:
    """Holds what stands (requests: their tokens and how they ended) and what is made from it (the work).

    Whoever changes the work takes it out with `begin` and puts it back with `end`. Whatever comes in between, of
    whatever class, the work is then missing, and the next `begin` makes another from the requests. Not thread-safe.

    Args:
        config: sizes of a step.
        cache_config: sizes of the allocator.
        device: what to run on.

    Attributes:
        requests: the unfinished ones by id, in the order of their arrival.
        num_added: requests that were ever added.
        abandoned: outboxes whose requests the next `begin` cancels; anybody may append.
    """

    @no_mesh()
    def __init__(self, config: EngineConfig, cache_config: CacheConfig, device: Device) -> None:
        self._config = config
        self._cache_config = cache_config
        self._device: Device | None = device
        self._work: Work | None = Work(config, cache_config, device)
        self._generation = self._work.generation
        self._failed_steps = 0
        self._asleep = False
        self._num_updates = 0
        self.requests: dict[str, Request] = {}
        self.num_added = 0
        self.abandoned: deque[Outbox] = deque()

    @property
    def asleep(self) -> bool:
        """Whether `sleep` was called and `wake` was not."""
        return self._asleep

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._device is None

    @property
    def device(self) -> Device:
        """What it runs on.

        Raises:
            InvalidInput: the engine is closed.
        """
        if self._device is None:
            raise InvalidInput("the engine is closed; build another one.")
        return self._device

    def begin(self) -> Work:
        """Takes the work out, whole and up to date. Until it is put back the next `begin` makes it anew.

        Raises:
            InvalidInput: the engine is closed.
        """
        device = self.device
        work, self._work = self._work, None
        if work is None or work.generation != device.pool.generation:
            work = self._anew(device)
        while self.abandoned:
            outbox = self.abandoned[0]
            for request in [request for request in self.requests.values() if request.outbox is outbox]:
                self.finish(work, request, "cancelled")
            self.abandoned.popleft()
        return work

    def end(self, work: Work) -> None:
        """Puts the work back."""
        try:
            work.scrub_if_idle()
        except PoolLost:
            # What was to be scrubbed is gone with the pool.
            return
        self._work = work

    def add(self, work: Work, samples: tuple[Request, ...]) -> Request:
        """Takes the samples of a prompt, which are queued, and puts the work back; returns the first.

        If interrupted, nobody knows of them.
        """
        try:
            self.num_added += len(samples)
            self.requests.update((request.request_id, request) for request in samples)
            self._work = work
            first = samples[0]
            event(
                logging.DEBUG,
                "request_added",
                request_id=first.request_id,
                num_prompt_tokens=len(first.prompt_token_ids),
                max_tokens=first.max_tokens,
                n=len(samples),
            )
            return first
        except BaseException:
            self.withdraw(samples[0])
            raise

    def withdraw(self, first: Request) -> None:
        """Forgets the samples of a prompt of which their caller never learned."""
        self._work = None
        for request in first.samples:
            self.requests.pop(request.request_id, None)
            request.outbox.take(request.outbox.news(request))

    def finish(self, work: Work, request: Request, reason: str) -> None:
        """Ends a request."""
        work.finish(request, reason)
        self.requests.pop(request.request_id, None)

    def advance(self) -> None:
        """Dispatches a step if there is one and reads one if it must.

        Raises:
            PoolLost: two steps failed in a row.
            EngineAsleep: the engine is asleep.
            InvalidInput: it is closed.
        """
        if self._asleep:
            raise EngineAsleep("the engine is asleep: its pool has no memory. wake() takes it again.")
        work, device = self.begin(), self.device
        try:
            ended = work.advance()
        except PoolLost as error:
            self._failed_steps += 1
            device.runner.programs.doubt_last()
            event(logging.WARNING, "pool_lost", failed_steps=self._failed_steps, reason=str(error))
            # Other processes wait in the step that failed here, and will not begin another.
            if self._failed_steps > 1 or device.channel is not None:
                self._failed_steps = 0
                raise
            return
        if ended is not None:
            self._failed_steps = 0
            for request in ended:
                self.requests.pop(request.request_id, None)
        self.end(work)

    @no_mesh()
    def fitting(self, check: Callable[[Weights], Arrivals], unfinished: str = "restart") -> list[jax.Array]:
        """Returns what `replace_weights` takes, checked and brought to the devices: in every process or in none.

        Args:
            check: what comes for the leaves that there are.
            unfinished: "finish" if unfinished requests shall be run to their end before.

        Raises:
            InvalidInput: it does not fit, here or in another process; it is asleep and shall finish requests; several
                processes, and the engine is awake.
        """
        device = self.device
        weights = device.runner.weights

        def checked() -> Arrivals:
            if unfinished == "finish" and self._asleep and self.requests:
                raise InvalidInput(
                    "unfinished is 'finish' and the engine is asleep; wake() and let its requests end before, or say "
                    "'restart'."
                )
            return check(weights)

        if device.channel is None:
            return weights.brought(checked())
        if not self._asleep:
            raise InvalidInput(
                "the engine has several processes and is awake: its steps would mix the old weights and the new ones. "
                "Call sleep() in process 0, which ends follow() in the others, then this in every process."
            )
        arrivals = check_together(checked)
        # Together, too: a device may lack the memory.
        return check_together(lambda: jax.block_until_ready(weights.brought(arrivals)))

    def replace_weights(self, leaves: list[jax.Array]) -> None:
        """Goes on with other weights: what was computed with the old ones is dropped, prefixes and all."""
        weights = self.device.runner.weights
        self._work = None
        self._num_updates += 1
        weights.leaves = leaves
        event(logging.INFO, "weights_replaced", num_unfinished=len(self.requests))

    def sleep(self) -> None:
        """Gives the pool's memory back; the requests stay, to be computed again after `wake`.

        Nothing happens to an engine that sleeps: the others would leave their next `follow` for it.

        Raises:
            InvalidInput: the engine is closed, or a torch view of the pool is alive; it stays awake then.
        """
        device = self.device
        if not self._asleep:
            self._work = None
            device.lend()
            self._asleep = True

    def wake(self) -> None:
        """Takes the pool's memory again.

        Raises:
            InvalidInput: the engine is closed, or the device has too little memory free; it sleeps on then.
        """
        device = self.device
        if self._asleep:
            if device.pool.is_lost():
                check_room(device.pool.num_bytes)
                device.renew()
            self._asleep = False

    @no_mesh()
    def follow(self, channel: Channel) -> None:
        """Does what the first process does to its devices, until its engine sleeps or is closed."""
        self._asleep = False
        if self.device.follow(channel):
            self.close()
        else:
            self._asleep = True

    def close(self) -> None:
        """Cancels every request and gives the pool's memory back."""
        device, self._device, self._work = self._device, None, None
        for request in list(self.requests.values()):
            request.outbox.note(request)
            request.finish_reason = "cancelled"
            del self.requests[request.request_id]
        if device is not None:
            device.close()

    def _anew(self, device: Device) -> Work:
        for request in list(self.requests.values()):
            reason = request.finish_reason or request.end_reason
            if reason is not None:
                request.outbox.note(request)
                request.finish_reason = reason
                del self.requests[request.request_id]
        # Nobody knows any more which blocks of the old pool hold what was to be scrubbed.
        holds_residue = self._config.scrub_on_free and device.pool.generation == self._generation
        if not self._asleep and (holds_residue or device.pool.is_lost()):
            device.renew()
        work = Work(self._config, self._cache_config_now(), device)
        self._generation = work.generation
        for request in self.requests.values():
            request.restart()
            work.scheduler.add(request)
        return work

    def _cache_config_now(self) -> CacheConfig:
        if not self._num_updates:
            return self._cache_config
        # A key must not say that a block of other weights is the same.
        fingerprint = self._cache_config.model_fingerprint + b" update %d" % self._num_updates
        return replace(self._cache_config, model_fingerprint=fingerprint)
