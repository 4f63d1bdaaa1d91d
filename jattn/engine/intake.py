"""The door: turns what a user asks into a request, or refuses it with the argument, the value and the limit."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np

from jattn.engine.delivery import Outbox
from jattn.engine.request import Request, RequestMetrics, SamplingParams
from jattn.models import PagedSpec
from torch_core.checks import check_int, shown
from torch_core.errors import InvalidInput, RequestTooLong

__all__ = ["AUTOMATIC", "Intake"]

#: What the engine's own request ids begin with, and nobody else's.
AUTOMATIC = "#"

_MAX_REQUEST_ID = 256
_MAX_SALT_BYTES = 64
_MOST_PRIORITY = 1 << 20
# So many later requests may overtake one that is a level lower: whoever waits comes to his turn.
_ARRIVALS_OF_A_PRIORITY = 64


class Intake:
    """Checks requests against a model's and an engine's limits. Has no state.

    Args:
        model: the model's vocabulary, end-of-sequence tokens and length.
        seed: the engine's.
        max_model_len: tokens of one sequence at most; the model's own limit if None.

    Attributes:
        max_model_len: the limit that holds.

    Raises:
        InvalidInput: max_model_len is above the model's own.
    """

    def __init__(self, model: PagedSpec, *, seed: int, max_model_len: int | None) -> None:
        longest = model.max_model_len
        if max_model_len is not None and max_model_len > longest:
            raise InvalidInput(f"max_model_len is {max_model_len}; the model was made for {longest} tokens at most.")
        self.max_model_len = longest if max_model_len is None else max_model_len
        self._vocab_size = model.vocab_size
        self._eos_token_ids = frozenset(model.eos_token_ids)
        self._seed = seed

    def request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None,
        *,
        number: int,
        request_id: str | None,
        taken: Collection[str],
        prompt: str | None,
        salt: bytes | None,
        priority: int,
        outbox: Outbox,
    ) -> Request:
        """Makes a request; see `Engine.add` for the arguments.

        Args:
            number: of the request: its id and its seed come from it where it brings none.
            taken: ids of unfinished requests.
            outbox: where its news go.

        Raises:
            InvalidInput: a bad argument.
            RequestTooLong: it does not fit the model.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidInput(f"params is a {type(params).__name__}; it must be SamplingParams, or None.")
        if request_id is None:
            request_id = f"{AUTOMATIC}{number}"
        else:
            _check_id(request_id, taken)
        tokens = self._tokens(request_id, prompt_token_ids)
        if prompt is not None and not isinstance(prompt, str):
            raise InvalidInput(f"prompt is a {type(prompt).__name__}; it must be the prompt's text, or None.")
        if salt is not None and not (isinstance(salt, bytes) and 1 <= len(salt) <= _MAX_SALT_BYTES):
            raise InvalidInput(f"salt must be bytes, 1 to {_MAX_SALT_BYTES} of them, or None.")
        total = len(tokens) + params.max_tokens
        if total > self.max_model_len:
            raise RequestTooLong(
                f"{request_id!r} needs {total} tokens ({len(tokens)} prompt + {params.max_tokens} new); this engine's "
                f"max_model_len is {self.max_model_len}. Shorten the prompt or lower max_tokens."
            )
        eos = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        seed = params.seed if params.seed is not None else (self._seed + number) & 0xFFFFFFFF
        check_int("priority", priority, -_MOST_PRIORITY, _MOST_PRIORITY)
        order = number + priority * _ARRIVALS_OF_A_PRIORITY
        metrics = RequestMetrics(time.monotonic())
        return Request(
            request_id, tokens, params, seed, eos, metrics, prompt=prompt, salt=salt, order=order, outbox=outbox
        )

    def _tokens(self, request_id: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        try:
            tokens = np.asarray(token_ids)
        except (ValueError, TypeError, OverflowError):
            raise InvalidInput(f"the prompt of {request_id!r} must be a flat sequence of ints; it is ragged.") from None
        if tokens.size == 0:
            raise InvalidInput(f"the prompt of {request_id!r} is empty; it needs at least one token.")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InvalidInput(
                f"the prompt of {request_id!r} has dtype {tokens.dtype} and shape {tokens.shape}; it must be a flat "
                "sequence of ints."
            )
        bad = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))
        if bad.size:
            raise InvalidInput(
                f"prompt token {int(bad[0])} of {request_id!r} is outside the vocabulary; ids are 0 to "
                f"{self._vocab_size - 1}."
            )
        return tuple(tokens.tolist())


def _check_id(request_id: object, taken: Collection[str]) -> None:
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= _MAX_REQUEST_ID:
        raise InvalidInput(f"request_id must be a string of 1 to {_MAX_REQUEST_ID} characters.")
    if request_id.startswith(AUTOMATIC):
        raise InvalidInput(
            f"request_id is {shown(request_id)}; ids that begin with {AUTOMATIC!r} are the engine's own numbers."
        )
    if request_id in taken:
        raise InvalidInput(f"request_id {shown(request_id)} belongs to an unfinished request; ids must be unique.")
