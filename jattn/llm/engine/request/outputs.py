"""The outputs of a request: deltas of tokens in its caller's outbox, and the records that callers make of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from torch_core.base.errors import InvalidInput

#: From a token id to the token's text; None without a tokenizer.
TextOf: TypeAlias = Callable[[int], str] | None


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability.

    Attributes:
        logprob: natural logarithm of its probability, as the model has it.
        rank: 1 for the likeliest token.
        decoded_token: its text, as `jattn.llm.text.tokens.TokenBytes.text` spells it; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class Logprobs(NamedTuple):
    """The log-probabilities of some tokens, with any leading axes.

    Attributes:
        logprob: float32[...], the token's.
        rank: int32[...], 1 for the likeliest.
        top_ids: int32[..., num_logprobs], the likeliest tokens in order; None for none, because XLA's GPU compiler
            refuses empty results of a device's part.
        top_logprobs: float32[..., num_logprobs], or None.
        kept: uint32[..., ceil(vocab / 32)], a bit for each token that could be sampled, the lowest first; None of
            steps that do not record it.
    """

    logprob: Any
    rank: Any
    top_ids: Any = None
    top_logprobs: Any = None
    kept: Any = None

    def at(self, index: Any) -> Logprobs:
        """Returns those at an index of the leading axes."""
        return Logprobs(*(None if array is None else array[index] for array in self))

    def read(self) -> Logprobs:
        """Returns them as numpy arrays."""
        return Logprobs(*(None if array is None else np.asarray(array) for array in self))


class TokenDelta(NamedTuple):
    """The new tokens of one request.

    Attributes:
        request_id: the request.
        token_ids: its new tokens, in order.
        finish_reason: as in `CompletionOutput`; None while it runs.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class Outbox:
    """One caller's queue of outputs: the engine's thread appends deltas, the caller takes them out.

    Attributes:
        deltas: in the order in which they came; only the engine's thread appends.
    """

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []

    def __bool__(self) -> bool:
        return bool(self.deltas)

    def take(self, request_id: str | None = None) -> list[TokenDelta]:
        """Returns the deltas, or those of one request, in order, and removes them."""
        if request_id is not None:
            taken = [delta for delta in self.deltas if delta.request_id == request_id]
            for delta in taken:
                # Another thread may have taken it meanwhile.
                with contextlib.suppress(ValueError):
                    self.deltas.remove(delta)
            return taken
        taken = self.deltas[:]
        # Each of the two statements is atomic: the engine's thread may append between them, an interrupt loses nothing.
        del self.deltas[: len(taken)]
        return taken


def checked_outbox(outbox: object) -> Outbox:
    """Returns an outbox, and raises InvalidInput for anything else."""
    if not isinstance(outbox, Outbox):
        raise InvalidInput("outbox", value=outbox, wanted="it must be an Outbox")
    return outbox


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of a request, in seconds of a monotonic clock.

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


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """The tokens that could be sampled at each position of a completion.

    Attributes:
        bits: uint32[tokens, ceil(vocab / 32)]: bit `t % 32` of word `t // 32` says whether token t could be sampled.
    """

    bits: np.ndarray

    def __add__(self, later: SamplingMask) -> SamplingMask:
        """Returns the masks of these positions and of the later ones."""
        return SamplingMask(np.concatenate([self.bits, later.bits]))

    @property
    def token_ids(self) -> list[list[int]]:
        """The same as lists of token ids, in order."""
        each = np.unpackbits(self.bits.view(np.uint8), axis=-1, bitorder="little")
        return [np.flatnonzero(row).tolist() for row in each]


# Not frozen: a step makes hundreds, and a frozen dataclass costs five times as much.
@dataclass(slots=True)
class CompletionOutput:
    """The generated tokens and text of one sample.

    Attributes:
        text: the decoded tokens, cut before a stop string; empty without a tokenizer.
        token_ids: the generated tokens, a final stop token included unless `SamplingParams.include_eos_token` is False.
        finish_reason: "length", "stop", "cancelled", or "error" if the grammar grew too large, or grammar and bad words
            allow no token; None while it runs.
        index: index of the sample, below n.
        logprobs: log-probabilities of each token, as `SamplingParams.logprobs` asks for; None without.
        sampling_mask: tokens that could be sampled, as `SamplingParams.return_sampling_mask` asks for; None without.
        cumulative_logprob: sum of the log-probabilities of the tokens.
        stop_reason: the stop string or the token of stop_token_ids that ended it; None for another reason.
        weights_versions: versions of the weights that sampled the tokens so far, in order: one, unless the weights were
            updated meanwhile. See `Engine.weights_version`.
        routed_experts: int16[tokens, layers, top_k], the experts of each token of prompt and output but the last, which
            the model did not read, if the engine has `enable_return_routed_experts` and the sample ended: those of the
            computation that wrote the token's keys and values, also that of another request whose prefix is shared. -1
            in layers without experts and for tokens that were not computed. None otherwise.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    index: int = 0
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    cumulative_logprob: float | None = None
    stop_reason: int | str | None = None
    weights_versions: tuple[int, ...] = ()
    sampling_mask: SamplingMask | None = None
    routed_experts: np.ndarray | None = None

    def __add__(self, later: CompletionOutput) -> CompletionOutput:
        """Returns this part of a sample and the next part as one."""
        total, mask, more = self.cumulative_logprob, self.sampling_mask, later.sampling_mask
        if mask is None or more is None:
            # A part without tokens has none.
            mask = more if mask is None else mask
        else:
            mask += more
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=None if self.logprobs is None else self.logprobs + (later.logprobs or ()),
            cumulative_logprob=None if total is None else total + (later.cumulative_logprob or 0.0),
            sampling_mask=mask,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its result.

    Attributes:
        request_id: the given or numbered id.
        prompt: the prompt's text; None if it came as token ids.
        prompt_token_ids: the prompt's tokens.
        outputs: the n completions; with `RequestOutputKind.DELTA` one, with only its new part.
        num_cached_tokens: number of prompt tokens whose keys and values came from a shared prefix.
        metrics: when things happened.
        finished: whether all samples ended, including those that `outputs` lacks.
        prompt_logprobs: log-probabilities of each token of the prompt, as `SamplingParams.prompt_logprobs` asks for,
            None for the first; None without.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    metrics: RequestMetrics
    finished: bool
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None


def as_dict(token: int, found: Logprobs, num_logprobs: int, text_of: TextOf) -> dict[int, Logprob]:
    """Returns vLLM's mapping for one position: the token itself first, then the likeliest in order.

    Args:
        token: the sampled token or the prompt's.
        found: values of this position, without leading axes.
        num_logprobs: number of the likeliest tokens; -1 for all.
        text_of: function from a token id to the token's text, or None.
    """
    entries = {token: (float(found.logprob), int(found.rank))}
    best: Iterable[tuple[int, float]] = ()
    if num_logprobs:
        count = len(found.top_ids) if num_logprobs < 0 else num_logprobs
        best = zip(found.top_ids[:count].tolist(), found.top_logprobs[:count].tolist(), strict=True)
    for rank, (each, value) in enumerate(best, 1):
        entries.setdefault(each, (value, rank))
    return {
        each: Logprob(value, rank, None if text_of is None else text_of(each))
        for each, (value, rank) in entries.items()
    }
