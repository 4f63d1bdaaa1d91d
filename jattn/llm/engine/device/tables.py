"""Some requests' arrays on the device: their tokens, and constant tables."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.llm.engine.device.placement import Placement
from jattn.llm.engine.options.params import LIMITS
from jattn.llm.engine.request.grammar import mask_of
from jattn.llm.engine.request.request import Request, RequestState
from jattn.llm.processes import Announce
from torch_core.base.checks import INT32_MAX


class _Fields(NamedTuple):
    token_ids: Any
    allowed: Any
    min_tokens: Any
    stop_tokens: Any
    bias_tokens: Any
    bias: Any
    processor_values: Any


class SlotTables(_Fields):
    """One row for each slot; numpy's for one request, JAX's for all of them.

    Attributes:
        token_ids: int32[slots, max_model_len], prompt and output.
        allowed: int32[slots, ceil(vocab / 32)], a bit for each token.
        min_tokens: int32[slots, 1].
        stop_tokens: int32[slots, n], to be banned before min_tokens; PAD elsewhere, as in all of these.
        bias_tokens, bias: int32 and float32[slots, n].
        processor_values: float32[slots, processors or 1]; NaN if a request does not take part.
    """

    PAD: ClassVar[int] = INT32_MAX

    @classmethod
    def neutral(cls, *, max_model_len: int, vocab_size: int, num_processors: int) -> SlotTables:
        """Returns the row of a request that wants none of it."""
        return cls(
            np.zeros(max_model_len, np.int32),
            np.full(-(-vocab_size // 32), -1, np.int32),
            np.zeros(1, np.int32),
            np.full(LIMITS.stop_tokens, cls.PAD, np.int32),
            np.full(LIMITS.logit_bias, cls.PAD, np.int32),
            np.zeros(LIMITS.logit_bias, np.float32),
            # At least one: see `Placement.mapped`.
            np.full(max(num_processors, 1), np.nan, np.float32),
        )


class SamplerState(NamedTuple):
    """The sampler's state on the device from step to step; None in a plain step.

    Attributes:
        tables: tables of the slots; a full step adds the tokens that it samples.
        masks: int32[rows, ceil(vocab / 32)] of this step, a bit for each token that grammar and bad words allow.
    """

    tables: SlotTables | None
    masks: Any

    @property
    def neutral_slot(self) -> int:
        """The slot of rows that need none."""
        return 0 if self.tables is None else len(self.tables.token_ids) - 1


class Slots:
    """Gives running requests a slot each and keeps their tables on the device. Not thread-safe.

    Nothing is allocated before the first request that needs one.

    Args:
        num_slots: requests that run at once.
        max_model_len: tokens of one.
        vocab_size: vocabulary size of the model.
        processors: names of the engine's logits processors, in order.
        placement: the devices.
        announce: told of a request's tables before they are uploaded.

    Attributes:
        tables: the device's arrays, one row more than there are slots: the neutral one. The step that samples returns
            them with the sampled tokens added.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_model_len: int,
        vocab_size: int,
        processors: tuple[str, ...],
        placement: Placement,
        announce: Announce | None = None,
    ) -> None:
        self._announce = announce
        self._num_slots = num_slots
        self._processors, self._placement = processors, placement
        self._neutral = SlotTables.neutral(
            max_model_len=max_model_len, vocab_size=vocab_size, num_processors=len(processors)
        )
        self._tables: SlotTables | None = None
        self._slot_of: dict[Request, int] = {}
        self._no_masks: dict[int, jax.Array] = {}

    @property
    def tables(self) -> SlotTables:
        if self._tables is None:
            rows = self._num_slots + 1
            # Committed, like a step's results; otherwise jit would compile `_load` twice.
            self._tables = SlotTables(*(self._placement.put(np.stack([each] * rows)) for each in self._neutral))
        return self._tables

    @tables.setter
    def tables(self, tables: SlotTables) -> None:
        self._tables = tables

    def shapes(self, num_rows: int) -> SamplerState:
        """Returns the shapes of a full step's state, for a step of this number of sequences."""
        rows = self._num_slots + 1
        shape = functools.partial(jax.ShapeDtypeStruct, sharding=self._placement.whole)
        tables = SlotTables(*(shape((rows, *each.shape), each.dtype) for each in self._neutral))
        return SamplerState(tables, shape((num_rows, len(self._neutral.allowed)), jnp.int32))

    def warmup(self, numbers_of_rows: Iterable[int]) -> None:
        """Compiles the programs and uploads the arrays that requests with tables would otherwise wait for."""
        self.load(self.neutral, self._neutral)
        for num_rows in numbers_of_rows:
            self.masks(num_rows, ())

    @property
    def neutral(self) -> int:
        """The slot of rows that need none."""
        return self._num_slots

    def forget(self) -> None:
        """Drops the state of earlier steps."""
        self._tables, self._slot_of = None, {}

    def masks(self, num_rows: int, given: Sequence[tuple[int, np.ndarray]]) -> Any:
        """Returns int32[num_rows, ceil(vocab / 32)]: the given rows' masks, and all bits elsewhere."""
        shape = (num_rows, len(self._neutral.allowed))
        if given:
            masks = np.full(shape, -1, np.int32)
            for row, mask in given:
                masks[row] = mask
            return masks
        if num_rows not in self._no_masks:
            self._no_masks[num_rows] = self._placement.put(np.full(shape, -1, np.int32))
        return self._no_masks[num_rows]

    def of(self, request: Request) -> int:
        """Returns a running request's slot; its tables are uploaded when it gets one, all tokens known then."""
        slot = self._slot_of.get(request)
        if slot is None:
            self._slot_of = {each: slot for each, slot in self._slot_of.items() if each.state is RequestState.RUNNING}
            slot = next(iter(set(range(self._num_slots)).difference(self._slot_of.values())))
            row = self._row(request)
            if self._announce is not None:
                self._announce("slot", slot, row)
            self.load(slot, row)
            self._slot_of[request] = slot
        return slot

    def load(self, slot: int, row: SlotTables) -> None:
        """Uploads the tables of a slot."""
        self.tables = _load(self.tables, slot, row)

    def _row(self, request: Request) -> SlotTables:
        params = request.params
        row = SlotTables(*(each.copy() for each in self._neutral))
        row.token_ids[: request.num_known_tokens] = request.token_ids(0, request.num_known_tokens)
        # The host's masks have these: they know when nothing but the end is left.
        if params.allowed_token_ids is not None and not request.needs_mask:
            row.allowed[:] = mask_of(params.allowed_token_ids, len(row.allowed))
        row.min_tokens[0] = params.min_tokens if request.grammar is None else 0
        row.stop_tokens[: len(request.eos_token_ids)] = sorted(request.eos_token_ids)
        if params.logit_bias:
            row.bias_tokens[: len(params.logit_bias)] = list(params.logit_bias)
            row.bias[: len(params.logit_bias)] = list(params.logit_bias.values())
        for name, value in (params.logits_processors or {}).items():
            row.processor_values[self._processors.index(name)] = value
        return row


@jax.jit
def _load(tables: SlotTables, slot: int, row: SlotTables) -> SlotTables:
    return SlotTables(*(array.at[slot].set(each) for array, each in zip(tables, row, strict=True)))
