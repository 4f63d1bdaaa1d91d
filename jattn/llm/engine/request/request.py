"""One request: its prompt and parameters, its tokens so far, and its state."""

from __future__ import annotations

import enum
import time
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jattn.llm.engine.options.params import PACKED_SEED, SamplingKind, SamplingParams
from jattn.llm.engine.request.bad_words import BadWords
from jattn.llm.engine.request.grammar import Grammar, mask_of
from jattn.llm.engine.request.lora import LoadedAdapter
from jattn.llm.engine.request.outputs import (
    CompletionOutput,
    Logprob,
    Logprobs,
    Outbox,
    RequestMetrics,
    RequestOutput,
    SamplingMask,
    TextOf,
    TokenDelta,
    as_dict,
)
from torch_core.base.errors import InvalidInput

#: The prefix of the engine's own request ids; callers may not use it.
AUTOMATIC = "#"


class RequestState(enum.Enum):
    """The state of a request; see `Request.move`."""

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


@dataclass(slots=True, eq=False)
class Request:
    """The engine's own, mutable view of a request; only the engine and its scheduler write it.

    Attributes:
        request_id: unique among the engine's unfinished requests. If its caller gave none it is empty until
            `take_number`.
        prompt_token_ids: the prompt; with an encoder, the first tokens of the decoder.
        params: sampling parameters; max_tokens is a number.
        sampling: the same for the device, `Rows.pack`.
        eos_token_ids: tokens that end it.
        forced_eos_token_id: its last token if it reaches max_tokens, instead of the sampled one; None for none.
        sampling_kind: the part of the sampler that it needs.
        needs_slot: whether its tokens or tables must be on the device.
        bad_words: texts that are not generated, or None.
        grammar: required format of the text, or None.
        index: index of the sample among those of its prompt.
        samples: all of them in order, itself included.
        followers: for the first sample, the samples that wait to fork its prompt's blocks.
        encoder_token_ids: the encoder's input; empty without an encoder.
        num_encoder_slots: number of cache slots, in whole blocks, before the first token's, for the encoder's output.
        salt: only requests of equal salt share cached prefixes; None for the engine's own. It contains the inputs and
            the adapter.
        inputs: int32[...], the numbers that it brings for the model; see `PagedSpec.inputs`.
        keeps_mask: whether its outputs have a `sampling_mask`.
        adapter: its low-rank adapter, or None.
        output_token_ids: generated tokens that the host has seen.
        outbox: queue of its outputs.
        num_delivered: generated tokens that were put there.
        end_is_delivered: its finish reason was put there.
        stuck_at: number of generated tokens after which its bad words allowed no other; None as long as they do.
        num_computed_tokens: tokens whose keys and values were written or will be by a dispatched step; negative while
            the encoder has not run: the slots that it still has to fill.
        num_pending_tokens: tokens sampled on the device and not seen yet.
        pending_row: row of its sampled token in the last dispatched step.
        logprobs: log-probabilities of the generated tokens, if requested; entries after the last token are undefined.
        prompt_logprobs: log-probabilities of the prompt's tokens by position, if requested.
        routed_experts: int16[tokens, layers, top_k] of its computed tokens when it ended, if an engine records them.
        weights_versions: versions of the weights that sampled its tokens, in order; see `Engine.weights_version`.
        max_tokens: most tokens to generate.
        ended_by: the end-of-sequence token, or token of stop_token_ids, that ended it; None before and without.
        order: rank among requests that compete; the smallest is first.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    sampling: np.ndarray
    eos_token_ids: frozenset[int]
    metrics: RequestMetrics
    sampling_kind: SamplingKind = SamplingKind.PLAIN
    needs_slot: bool = False
    bad_words: BadWords | None = None
    grammar: Grammar | None = None
    index: int = 0
    forced_eos_token_id: int | None = None
    prompt: str | None = None
    salt: bytes | None = None
    inputs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    keeps_mask: bool = False
    adapter: LoadedAdapter | None = None
    outbox: Outbox = field(default_factory=Outbox)
    num_delivered: int = 0
    end_is_delivered: bool = False
    stuck_at: int | None = None
    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_pending_tokens: int = 0
    pending_row: int = -1
    order: int = 0
    finish_reason: str | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    routed_experts: np.ndarray | None = None
    samples: tuple[Request, ...] = ()
    followers: list[Request] = field(default_factory=list)
    encoder_token_ids: tuple[int, ...] = ()
    num_encoder_slots: int = 0
    weights_versions: tuple[int, ...] = ()
    max_tokens: int = 0
    ended_by: int | None = None

    def __post_init__(self) -> None:
        self.max_tokens = self.max_tokens or self.params.max_tokens or 0

    @property
    def given_id(self) -> str | None:
        """The id that its caller gave; None for the engine's own, by which no caller knows it."""
        return None if self.request_id.startswith(AUTOMATIC) else self.request_id

    @property
    def wants_logprobs(self) -> bool:
        """Whether it keeps log-probabilities or masks of its tokens."""
        return self.params.logprobs is not None or self.keeps_mask

    @property
    def num_known_tokens(self) -> int:
        """Prompt and generated tokens that the host has seen."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """All tokens, those still on the device included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending_tokens

    @property
    def most_tokens(self) -> int:
        """Prompt tokens, and the most tokens to generate."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def cached_token_ids(self) -> list[int]:
        """The block allocator's tokens: the encoder's input with padding, then the known tokens."""
        padding = self.num_encoder_slots - len(self.encoder_token_ids)
        return [*self.encoder_token_ids, *[0] * padding, *self.token_ids(0, self.num_known_tokens)]

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens that may still be sampled for it now: with a mask one, when all before it are known."""
        wanted = self.max_tokens - len(self.output_token_ids) - self.num_pending_tokens
        return min(wanted, int(not self.num_pending_tokens)) if self.needs_mask else wanted

    @property
    def needs_mask(self) -> bool:
        """Whether the host says which tokens may come next."""
        return self.grammar is not None or self.bad_words is not None

    @property
    def awaits_fork(self) -> bool:
        """Whether it waits for the first sample of its prompt, to share its blocks."""
        first = self.samples[0] if self.samples else self
        return first.finish_reason is None and self in first.followers

    @property
    def end_reason(self) -> str | None:
        """The reason why its tokens are complete: "stop", "error" or "length"; None if they are not."""
        last = self.output_token_ids[-1] if self.output_token_ids else None
        if self.stuck_at is not None and len(self.output_token_ids) > self.stuck_at:
            return "error"
        # A grammar lets the end come where nothing else can, also where the end is to be ignored.
        if self.grammar is not None and last in self.grammar.eos_token_ids:
            return "stop" if self.grammar.error is None else "error"
        if last in self.eos_token_ids:
            return "stop"
        return "length" if len(self.output_token_ids) >= self.max_tokens else None

    def end(self, reason: str) -> None:
        """Sets the finish reason, and takes the token that ended it from its tokens if its parameters say so."""
        last = self.output_token_ids[-1] if self.output_token_ids and reason in ("stop", "error") else None
        ends = self.eos_token_ids if self.grammar is None else self.eos_token_ids | set(self.grammar.eos_token_ids)
        # With the reason, so that it is not looked for again.
        self.finish_reason, self.ended_by = reason, last if last in ends else None
        if self.ended_by is not None and not self.params.include_eos_token:
            del self.output_token_ids[-1]
            del self.logprobs[len(self.output_token_ids) :]

    def output(
        self,
        completions: tuple[CompletionOutput, ...] | None = None,
        text_of: TextOf = None,
        *,
        finished: bool | None = None,
    ) -> RequestOutput:
        """Returns the tokens of all samples so far, without their text.

        Args:
            completions: those to report instead, such as ones with text.
            text_of: function from a token id to the token's text, for log-probabilities of the prompt.
            finished: whether its reader has reached the end of all samples; None for whether they ended.

        Example:
            >>> from jattn.llm.engine import Engine, SamplingParams
            >>> from jattn.llm.load import embedded_model_folder, load_model
            >>> with Engine(load_model(embedded_model_folder())[0]) as engine:
            ...     request = engine.add([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True, logprobs=0))
            ...     while engine.num_unfinished:
            ...         deltas = engine.step()
            >>> output = request.output().outputs[0]
            >>> len(output.token_ids), len(output.logprobs), output.finish_reason
            (2, 2, 'length')
        """
        samples = self.samples or (self,)
        if completions is None:
            completions = tuple(each.completion(tuple(each.output_token_ids), each.finish_reason) for each in samples)
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.encoder_token_ids or self.prompt_token_ids,
            completions,
            self.num_cached_tokens,
            self.metrics,
            all(each.finish_reason is not None for each in samples) if finished is None else finished,
            self._known_prompt_logprobs(text_of),
        )

    def completion(
        self,
        token_ids: tuple[int, ...],
        finish_reason: str | None,
        *,
        start: int = 0,
        logprobs: tuple[dict[int, Logprob], ...] | None = None,
        text: str = "",
        stop_string: str | None = None,
    ) -> CompletionOutput:
        """Returns a record of some of its generated tokens.

        Args:
            token_ids: the tokens.
            finish_reason: reason to report, which its reader may not have reached.
            start: index of the first of them.
            logprobs: their log-probabilities, if its parameters ask for them; None to look them up.
            text: their text.
            stop_string: the stop string that ended it.
        """
        mask = total = stop_reason = experts = None
        if self.keeps_mask and token_ids:
            kept = [each.kept for each in self.logprobs[start : start + len(token_ids)]]
            mask = SamplingMask(np.array(kept, np.uint32).reshape(len(kept), -1))
        if self.params.logprobs is not None:
            logprobs = self.known_logprobs(start, token_ids) if logprobs is None else logprobs
            total = sum(each[token].logprob for each, token in zip(logprobs or (), token_ids, strict=True))
        if finish_reason is not None:
            experts = self._known_routed_experts()
            if finish_reason == "stop":
                is_asked = stop_string is None and self.ended_by in self.params.stop_token_ids
                stop_reason = self.ended_by if is_asked else stop_string
        return CompletionOutput(
            text,
            token_ids,
            finish_reason,
            self.index,
            logprobs,
            total,
            stop_reason,
            self.weights_versions,
            mask,
            experts,
        )

    def known_logprobs(
        self, start: int, token_ids: Sequence[int], text_of: TextOf = None
    ) -> tuple[dict[int, Logprob], ...] | None:
        """Returns the log-probabilities of generated tokens from index `start` on; None if none are asked for."""
        wanted = self.params.logprobs
        if wanted is None:
            return None
        found = self.logprobs[start : start + len(token_ids)]
        return tuple(as_dict(token, each, wanted, text_of) for token, each in zip(token_ids, found, strict=True))

    def _known_routed_experts(self) -> np.ndarray | None:
        """Returns the experts of a request that ended, without those of the last token."""
        found = self.routed_experts
        if found is None or self.params.return_routed_experts is False:
            return None
        # A stop string may have ended it earlier.
        return found[: len(self.prompt_token_ids) + len(self.output_token_ids) - 1]

    def _known_prompt_logprobs(self, text_of: TextOf) -> tuple[dict[int, Logprob] | None, ...] | None:
        wanted = self.params.prompt_logprobs
        if wanted is None:
            return None
        # The first sample brings them all, unless it was cancelled on the way: then the next one brings the rest.
        # Looked up, and not iterated: the engine's thread may add to them.
        found = ChainMap(*(sample.prompt_logprobs for sample in self.samples or (self,)))
        return tuple(
            as_dict(token, found[place], wanted, text_of) if place in found else None
            for place, token in enumerate(self.prompt_token_ids)
        )

    def mask(self) -> np.ndarray | None:
        """Returns int32[ceil(vocab / 32)], a bit for each token that may come next; None if it needs no mask."""
        words = self.bad_words
        allowed = None if words is None else words.allowed(self.prompt_token_ids, self.output_token_ids)
        if self.grammar is not None:
            return self.grammar.mask(self.output_token_ids, self.params, allowed)
        if words is None or allowed is None:
            return None
        if self.params.allowed_token_ids is not None:
            allowed = allowed & mask_of(self.params.allowed_token_ids, len(allowed))
        if np.any(allowed):
            return allowed
        self.stuck_at = len(self.output_token_ids)
        return words.end

    def take_number(self, number: int) -> None:
        """Takes the number of its arrival: for its order, and for its id and its seed if the caller gave none."""
        self.order += number
        if not self.request_id:
            self.request_id = f"{AUTOMATIC}{number}"
        if self.params.seed is None:
            # A sum of arrays: it begins again after the largest uint32.
            seed = self.sampling[PACKED_SEED : PACKED_SEED + 1].view(np.uint32)
            seed += np.uint32(number & 0xFFFFFFFF)

    def deliver(self) -> None:
        """Puts the tokens and the finish reason that came since the last delivery into its outbox."""
        count, ended = len(self.output_token_ids), self.finish_reason is not None
        delta = TokenDelta(self.request_id, tuple(self.output_token_ids[self.num_delivered :]), self.finish_reason)
        # One line, so that an exception between two lines can neither repeat nor lose a token.
        self.num_delivered, self.end_is_delivered, _ = count, ended, self.outbox.deltas.append(delta)

    def until_stop(self, tokens: list[int]) -> list[int]:
        """Returns tokens up to the first that ends the request."""
        return tokens[: next(index for index, token in enumerate(tokens) if token in self.eos_token_ids) + 1]

    def extend(self, new: list[int], weights_version: int) -> None:
        """Adds generated tokens; at max_tokens the last of them becomes the forced one, if a model has such.

        Args:
            new: the tokens.
            weights_version: version of the weights that sampled them.
        """
        if new and (not self.weights_versions or self.weights_versions[-1] != weights_version):
            self.weights_versions += (weights_version,)
        forced = self.forced_eos_token_id
        if forced is not None and len(self.output_token_ids) + len(new) >= self.max_tokens:
            new[-1] = forced
            if self.logprobs:
                # It is certain, as in transformers.
                self.logprobs[-1] = self.logprobs[-1]._replace(logprob=0.0, rank=1)
        self.output_token_ids += new
        if self.metrics.first_token_time is None:
            self.metrics = replace(self.metrics, first_token_time=time.monotonic())

    def restart(self) -> None:
        """Puts it back to waiting with the tokens that the host has seen; all that was computed of it is gone."""
        self.state = RequestState.WAITING
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.pending_row = -1

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Returns the known tokens at positions `start` to `stop - 1`."""
        prompt_len = len(self.prompt_token_ids)
        if start >= prompt_len:
            return self.output_token_ids[start - prompt_len : stop - prompt_len]
        return [*self.prompt_token_ids[start:stop], *self.output_token_ids[: max(stop - prompt_len, 0)]]

    def move(self, state: RequestState) -> None:
        """Changes the state along a legal move.

        Raises:
            InvalidInput: the move is not legal.
        """
        if state not in _LEGAL_MOVES[self.state]:
            raise InvalidInput(f"request {self.request_id!r} is {self.state.value}; it cannot become {state.value}.")
        self.state = state
