"""What a dispatched step brings, and how its log-probabilities reach their requests."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jattn.llm.engine.request.logprobs import Logprobs
from jattn.llm.engine.request.request import Request

__all__ = ["PromptPart", "StepResult"]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The log-probabilities of some tokens of a prompt.

    Attributes:
        request: whose prompt.
        start: position of the first token.
        count: tokens; what `found` has behind them means nothing.
        found: of the tokens.
    """

    request: Request
    start: int
    count: int
    found: Logprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """On the device until it is read.

    Attributes:
        tokens: int32[num_decode_steps, max_num_seqs], a column for each row.
        logprobs: of the tokens, int32 and float32[num_decode_steps, num_seqs, ...]; None of a plain step.
        prompts: parts of prompts.
    """

    tokens: jax.Array | np.ndarray
    logprobs: Logprobs | None
    prompts: list[PromptPart]

    def read(self, requests: list[Request]) -> StepResult:
        """Waits for the step and returns it as numpy arrays; log-probabilities only if a request of it wants them."""
        wanted = any(request.params.logprobs is not None for request in requests)
        return StepResult(
            np.asarray(self.tokens),
            Logprobs(*map(np.asarray, self.logprobs)) if wanted and self.logprobs is not None else None,
            [
                PromptPart(part.request, part.start, part.count, Logprobs(*map(np.asarray, part.found)))
                for part in self.prompts
            ],
        )

    def keep_logprobs(self, request: Request, row: int, count: int) -> None:
        """Adds those of a row's first tokens to its request, before the tokens themselves."""
        if self.logprobs is None or request.params.logprobs is None:
            return
        kept = request.logprobs
        # An interrupt may have come between them and their tokens.
        del kept[len(request.output_token_ids) :]
        kept += [Logprobs(*(array[step, row] for array in self.logprobs)) for step in range(count)]

    def keep_prompt_logprobs(self) -> None:
        """Gives the parts of prompts to their requests."""
        for part in self.prompts:
            for index in range(part.count):
                part.request.prompt_logprobs[part.start + index] = Logprobs(*(array[index] for array in part.found))
