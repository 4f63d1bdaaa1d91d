"""An engine's core in the thread of a test, with the methods of `Engine` that a caller's loop needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jattn.llm.engine import EngineConfig, SamplingParams
from jattn.llm.engine.core import EngineCore
from jattn.llm.engine.device.device import open_device
from jattn.llm.engine.request.outputs import Outbox, TokenDelta
from jattn.llm.engine.request.request import Request
from jattn.llm.engine.request.validation import Validator


class CoreEngine:
    """What `Engine` is without its thread: an exception in a step is raised in the middle of it."""

    def __init__(self, model: Any, config: EngineConfig) -> None:
        self._validator = Validator(model.paged_spec, config, None)
        device, cache_config, _ = open_device(
            model, config, max_model_len=self._validator.max_model_len, model_fingerprint=b""
        )
        self._core = EngineCore(config, cache_config, device)
        self._outbox = Outbox()

    @property
    def num_unfinished(self) -> int:
        return len(self._core.requests)

    def add(self, prompt: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Request:
        samples = self._validator.requests(prompt, params, request_id=request_id, outbox=self._outbox)
        try:
            self._core.add([samples[0]])
        except BaseException:
            self._core.abandoned.append(samples[0])
            self._core.drop_abandoned()
            raise
        return samples[0]

    def step(self) -> list[TokenDelta]:
        self._core.step()
        return self._outbox.take()

    def cancel(self, request_id: str) -> TokenDelta:
        end = self._core.cancel(request_id)
        self._outbox.take(request_id)
        return end

    def cache_stats(self) -> Any:
        return self._core.cache_stats()
