"""One request's life: what was asked, how far it is, and which moves between states are legal."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from jattn.engine.delivery import Outbox
from torch_core.checks import check_bool, check_int, shown
from torch_core.errors import InvalidInput

__all__ = ["CompletionOutput", "Request", "RequestMetrics", "RequestOutput", "RequestState", "SamplingParams"]

_MAX_STOP_STRINGS = 16
_MAX_TOP_K = 1 << 20
_INT32_MAX = (1 << 31) - 1
#: The largest float32: logits are divided by the temperature on the device.
_MAX_TEMPERATURE = float.fromhex("0x1.fffffep+127")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen; names and defaults are vLLM's.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 or -1 for all.
        top_p: then keep the likeliest tokens whose probabilities reach this sum; 1 for all.
        max_tokens: tokens to generate at most.
        seed: of this request's random numbers; None derives one from the engine's seed and the request's number.
        stop: strings that end the text; the text is cut before the first of them. Any iterable of them; kept as a
            tuple.
        stop_token_ids: tokens that end the text, besides the model's end-of-sequence tokens. Kept as a tuple.
        ignore_eos: do not stop at the model's end-of-sequence tokens.

    Raises:
        InvalidInput: a value out of range; the message names it.

    Example:
        >>> SamplingParams(temperature=0.0, max_tokens=4).top_p
        1.0
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", _as_float("temperature", self.temperature))
        if not 0 <= self.temperature <= _MAX_TEMPERATURE:
            raise InvalidInput(f"temperature is {self.temperature!r}; it must be a finite float32 of at least 0.")
        check_int("top_k", self.top_k, -1, _MAX_TOP_K, also=" (0 or -1 for all)")
        object.__setattr__(self, "top_p", _as_float("top_p", self.top_p))
        if not 0 < self.top_p <= 1:
            raise InvalidInput(f"top_p is {self.top_p!r}; it must be above 0 and at most 1.")
        check_int("max_tokens", self.max_tokens, 1, _INT32_MAX)
        if self.seed is not None:
            check_int("seed", self.seed, 0, (1 << 32) - 1, also=", or None")
        if isinstance(self.stop, str):
            raise InvalidInput("stop is a string; pass a tuple of strings, as in stop=('\\n',).")
        object.__setattr__(self, "stop", _as_tuple("stop", self.stop))
        if len(self.stop) > _MAX_STOP_STRINGS or not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidInput(f"stop must hold at most {_MAX_STOP_STRINGS} strings, none of them empty.")
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        for index, token in enumerate(self.stop_token_ids):
            check_int(f"stop_token_ids[{index}]", token, 0, _INT32_MAX)
        check_bool("ignore_eos", self.ignore_eos)


class RequestState(enum.Enum):
    """Where a request is; see `Request.move`."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_LEGAL_MOVES = {
    RequestState.WAITING: {RequestState.RUNNING, RequestState.FINISHED},
    RequestState.RUNNING: {RequestState.PREEMPTED, RequestState.FINISHED},
    RequestState.PREEMPTED: {RequestState.RUNNING, RequestState.FINISHED},
    RequestState.FINISHED: set(),
}


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of a monotonic clock.

    Attributes:
        arrival_time: when it was added.
        first_token_time: when its first token was seen; None before.
        finish_time: when it ended; None before.
    """

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """What was generated.

    Attributes:
        text: the decoded tokens, cut before a stop string; empty without a tokenizer.
        token_ids: the generated tokens, a final stop token included.
        finish_reason: "length", "stop" or "cancelled"; None while it runs.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its result.

    Attributes:
        request_id: as given or numbered.
        prompt: the prompt's text; None if it came as token ids.
        prompt_token_ids: the prompt's tokens.
        outputs: one completion.
        num_cached_tokens: prompt tokens whose keys and values a shared prefix held already.
        metrics: when things happened.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    metrics: RequestMetrics


@dataclass(slots=True, eq=False)
class Request:
    """The engine's own, mutable view of a request; only the engine and its scheduler write it.

    Attributes:
        request_id: unique among the engine's live requests.
        prompt_token_ids: the prompt.
        params: how to sample.
        seed: of its random numbers.
        eos_token_ids: tokens that end it.
        salt: only requests of equal salt share cached prefixes; None for the engine's own.
        output_token_ids: generated and seen.
        outbox: where its news go.
        num_computed_tokens: tokens whose keys and values were written or will be by a dispatched step.
        num_pending_tokens: tokens sampled on the device and not seen yet.
        pending_row: where the last dispatched step put its sampled token.
        order: who comes first where not all can: the least.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    metrics: RequestMetrics
    prompt: str | None = None
    salt: bytes | None = None
    outbox: Outbox = field(default_factory=Outbox)
    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_pending_tokens: int = 0
    pending_row: int = -1
    order: int = 0
    finish_reason: str | None = None

    @property
    def num_known_tokens(self) -> int:
        """Prompt and generated tokens that the host has seen."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """All tokens, those still on the device included."""
        return self.num_known_tokens + self.num_pending_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """Generated tokens, those still on the device included."""
        return len(self.output_token_ids) + self.num_pending_tokens

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens that may still be sampled for it."""
        return self.params.max_tokens - self.num_sampled_tokens

    @property
    def end_reason(self) -> str | None:
        """Why the tokens that it has are its last: "stop" or "length"; None if there is more to come."""
        if self.output_token_ids and self.output_token_ids[-1] in self.eos_token_ids:
            return "stop"
        return "length" if len(self.output_token_ids) >= self.params.max_tokens else None

    def restart(self) -> None:
        """Puts it back to waiting with the tokens that the host has seen; all that was computed of it is gone."""
        self.state = RequestState.WAITING
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.pending_row = -1

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Returns the known tokens at positions `start` to `stop - 1`."""
        prompt_len = len(self.prompt_token_ids)
        head = self.prompt_token_ids[start : min(stop, prompt_len)]
        return [*head, *self.output_token_ids[max(start - prompt_len, 0) : max(stop - prompt_len, 0)]]

    def move(self, state: RequestState) -> None:
        """Changes the state along a legal move.

        Raises:
            InvalidInput: the move is not legal.
        """
        if state not in _LEGAL_MOVES[self.state]:
            raise InvalidInput(f"request {self.request_id!r} is {self.state.value}; it cannot become {state.value}.")
        self.state = state


def _as_float(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InvalidInput(f"{name} is {shown(value)}; it must be a number.")
    try:
        return float(value)
    except OverflowError:
        raise InvalidInput(f"{name} is {shown(value)}; it must be a number that fits a float.") from None


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise InvalidInput(f"{name} is {shown(values)}; it must be a sequence.") from None
