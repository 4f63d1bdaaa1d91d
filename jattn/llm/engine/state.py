"""The part of an engine that is rebuilt from its requests: block allocator, queues, steps in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jattn.llm.engine.device.device import Device
from jattn.llm.engine.device.runner import StepResult
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.scheduler import ScheduledStep, Scheduler
from torch_core.cache import CacheConfig, CacheManager, CommittedStep


class EngineState:
    """Allocator, scheduler and steps in flight over one generation of a pool, all empty at first.

    An exception in one of its methods leaves it undefined: it is dropped then, and another one is built.

    Args:
        config: sizes of a step.
        cache_config: sizes of the allocator.
        device: pool and programs; it forgets earlier steps.

    Attributes:
        device: as given.
        cache: the block allocator.
        scheduler: the queues.
        generation: generation of the pool.
        in_flight: the steps that are on the device, oldest first.
        has_residue: a block holds contents that `EngineConfig.scrub_on_free` scrubs.
    """

    def __init__(self, config: EngineConfig, cache_config: CacheConfig, device: Device) -> None:
        self.device = device
        self.cache = CacheManager(cache_config)
        self.move_blocks = _BlockMover(device, self.cache)
        self.scheduler = Scheduler(
            config,
            self.cache,
            self.move_blocks,
            in_turns=device.in_turns,
            pads_rows=device.pads_rows,
            prompt_sizes=() if device.in_turns or device.pads_rows else device.runner.buckets.prompt_sizes,
            num_scheduler_steps=device.num_scheduler_steps,
            is_served=device.runner.is_served,
            adapter_slots=device.runner.adapter_slots,
        )
        self.generation = device.pool.generation
        self.in_flight: deque[tuple[ScheduledStep, StepResult]] = deque()
        self.has_residue = False
        device.forget()
        device.watchdog.forget()


@dataclass(frozen=True, slots=True)
class _BlockMover:
    """Executes and retires a step that moves blocks and has no rows. A method would be a cycle, which keeps memory."""

    device: Device
    cache: CacheManager

    def __call__(self, step: CommittedStep) -> None:
        self.device.prepare(step)
        self.cache.retire(step.step_id)
