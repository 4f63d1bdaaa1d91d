"""What requests bring to a step, written into the buffer that is uploaded: tokens, parameters, slots of adapters."""

from __future__ import annotations

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
    first = 0
    for index, row in enumerate(step.rows):
        request = row.request
        if step.encodes:
            new = list(request.encoder_token_ids)
        else:
            new = request.token_ids(row.start, row.start + row.num_new_tokens) or [-1 - request.pending_row]
            new += row.guesses
        token_ids[first : first + len(new)] = new
        first += len(new)
        sampling[index] = request.sampling
        sample_index[index] = len(request.output_token_ids) + request.num_pending_tokens
