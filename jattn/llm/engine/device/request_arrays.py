"""What requests bring to a step, written into the buffer that is uploaded: tokens, parameters, slots of adapters."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from jattn.llm.engine.adapter_slots import AdapterSlots
from jattn.llm.engine.scheduler import ScheduledStep


def fill_adapters(step: ScheduledStep, slots: AdapterSlots, adapters: np.ndarray) -> None:
    """Writes the slot of each row's adapter, counted from 1; rows without one, and padding, have 0."""
    for index, row in enumerate(step.rows):
        if row.request.adapter is not None:
            adapters[index] = slots.slot_of(row.request.adapter) + 1


def fill_requests(step: ScheduledStep, token_ids: np.ndarray, sampling: np.ndarray, sample_index: np.ndarray) -> None:
    """Writes the tokens and the parameters of a step's requests into its buffer."""
    requests, new = [row.request for row in step.rows], array("i")
    for request, start, num_new_tokens, _, guesses in step.rows:
        if step.encodes:
            new.extend(request.encoder_token_ids)
        elif start < len(request.prompt_token_ids) + len(request.output_token_ids):
            new.extend(request.token_ids(start, start + num_new_tokens))
        else:
            new.append(-1 - request.pending_row)
        if guesses:
            new.extend(guesses)
    token_ids[: len(new)] = new
    parts: list[Any] = [request.sampling for request in requests]
    sampling[: len(requests)] = np.frombuffer(b"".join(parts), np.int32).reshape(-1, sampling.shape[1])
    sample_index[: len(requests)] = [len(each.output_token_ids) + each.num_pending_tokens for each in requests]
