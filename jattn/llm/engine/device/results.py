"""The results of a step: tokens and log-probabilities, on the device until they are read."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jattn.llm.engine.request.logprobs import Logprobs
from jattn.llm.engine.request.request import Request
from jattn.llm.engine.scheduler import ScheduledStep


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The log-probabilities of some tokens of a prompt.

    Attributes:
        request: the request that has the prompt.
        start: position of the first token.
        count: number of tokens; later entries of `found` are undefined.
        found: values of the tokens.
    """

    request: Request
    start: int
    count: int
    found: Logprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step, on the device until `read`.

    Attributes:
        tokens: int32[num_decode_steps, max_num_seqs], a column for each row.
        logprobs: log-probabilities of the tokens, int32 and float32[num_decode_steps, num_seqs, ...]; None of a plain
            step.
        prompts: parts of prompts.
    """

    tokens: jax.Array | np.ndarray
    logprobs: Logprobs | None
    prompts: list[PromptPart]

    def read(self, step: ScheduledStep) -> StepResult:
        """Waits for the step; returns numpy arrays, and log-probabilities only if a request wants them.

        Those of prompts are given to their requests.
        """
        for part in self.prompts:
            found = Logprobs(*map(np.asarray, part.found))
            for index in range(part.count):
                part.request.prompt_logprobs[part.start + index] = Logprobs(*(array[index] for array in found))
        logprobs = self.logprobs
        if logprobs is not None and any(row.request.params.logprobs is not None for row in step.rows):
            return StepResult(np.asarray(self.tokens), Logprobs(*map(np.asarray, logprobs)), [])
        return StepResult(np.asarray(self.tokens), None, [])

    def keep_logprobs(self, request: Request, row: int, count: int) -> None:
        """Adds those of a row's first tokens to its request, before the tokens themselves."""
        if self.logprobs is not None and request.params.logprobs is not None:
            # An exception may have come between the last ones and their tokens.
            del request.logprobs[len(request.output_token_ids) :]
            request.logprobs += [Logprobs(*(array[step, row] for array in self.logprobs)) for step in range(count)]
