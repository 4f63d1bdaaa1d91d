"""`add`: the method of one engine and of several copies by which a request comes in."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from jattn.llm.engine.options.params import SamplingParams
from jattn.llm.engine.request.lora import LoRARequest
from jattn.llm.engine.request.outputs import Outbox
from jattn.llm.engine.request.request import Request


class AddsRequests(abc.ABC):
    """An engine that checks a request on its caller's thread, and queues new ones by one command to its own."""

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        salt: bytes | None = None,
        priority: int = 0,
        inputs: Mapping[str, int | float] | None = None,
        lora: str | LoRARequest | None = None,
        outbox: Outbox | None = None,
    ) -> Request:
        """Queues a request; nothing runs until `step` or `wait`.

        Args:
            prompt_token_ids: at least one token id below the model's vocab_size; the input of its encoder, if any.
            params: sampling parameters; None for `SamplingParams()`.
            request_id: unique among unfinished requests, without a "#" at its start; None for "#" and a number.
            prompt: text of the prompt, for the result.
            salt: 1 to 64 bytes; only requests with equal salts share cached prefixes. None for the engine's own salt.
            priority: requests with a lower value run first and are preempted last. For each level at most 64 later
                requests can overtake a request, so none waits for ever.
            inputs: numbers for the model, as its `PagedSpec.inputs` declares: {"adapter": 3}. Only requests with equal
                inputs share cached prefixes.
            lora: the low-rank adapter: the name of one that `add_lora` loaded, or a request that loads it. Only
                requests with the same version of it share cached prefixes.
            outbox: queue of its outputs, for a caller that reads them with `wait`; None for callers of `step`.

        Raises:
            InvalidInput: an empty prompt, a token id outside the vocabulary, a bad or taken id, salt or outbox,
                inputs that are missing or undeclared, an unknown adapter.
            RequestTooLong: the request can never fit the model or the pool; the message has the numbers.
            Unsupported: structured output without its library.

        Returns:
            The request; with n above 1 its first sample, whose `samples` are all of them, each with its own id.
        """
        options: dict[str, Any] = {"prompt": prompt, "salt": salt, "priority": priority, "inputs": inputs, "lora": lora}
        request = self.new_request(prompt_token_ids, params, request_id=request_id, outbox=outbox, **options)
        self.queue([request])
        return request

    @abc.abstractmethod
    def new_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Request:
        """Returns a request for `queue`; arguments and errors are those of `add`."""

    @abc.abstractmethod
    def queue(self, requests: Sequence[Request]) -> None:
        """Queues new requests: all of them or, after an error, none."""
