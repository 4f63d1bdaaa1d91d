"""Which requests run in the next step and with how many tokens: admission, chunks, preemption. No tensors."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeAlias

from jattn.llm.engine.adapter_slots import AdapterSlots
from jattn.llm.engine.guesses import guesses_of
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.padding import FIRST_TOKENS, fitting
from jattn.llm.engine.request.request import Request, RequestState
from jattn.llm.reports import event
from torch_core.base.errors import OutOfBlocks
from torch_core.cache import CacheManager, CommittedStep

# Requests that overtake one that waits for a slot of an adapter.
_OVERTAKING = 64
# From this number of tokens on, equal prompts wait for the first one, which fills the cache for the others.
_WORTH_WAITING = 64


class ScheduledRow(NamedTuple):
    """One request's part of a step.

    Attributes:
        request: the request that has the tokens.
        start: position of the first new token.
        num_new_tokens: tokens to compute.
        num_samples: tokens that the row samples: none when it ends before the request's last token; more than one
            if the step decodes several in a row, or verifies guesses.
        guesses: proposed new tokens after the first one; zeros if a draft model proposes them.
    """

    request: Request
    start: int
    num_new_tokens: int
    num_samples: int
    guesses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step whose blocks are taken: ready to be dispatched.

    Attributes:
        rows: the row of each request.
        committed: the blocks it writes and reads.
        num_decode_steps: tokens that its program decodes one after the other; 1 unless every row decodes.
        encodes: its rows are inputs of the encoder, whose slots are counted up to 0.
    """

    rows: tuple[ScheduledRow, ...]
    committed: CommittedStep
    num_decode_steps: int = 1
    encodes: bool = False

    def mark_pending(self) -> None:
        """Notes in each request which of its tokens the dispatched step samples."""
        for index, row in enumerate(self.rows):
            if row.num_samples:
                row.request.num_pending_tokens += row.num_samples
                row.request.pending_row = index

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(row.num_new_tokens for row in self.rows)


class Scheduler:
    """Serves requests by their order, prompts in chunks; preempts the last in order when blocks run out.

    A step has a token of every running request and, within the token budget, chunks of prompts. An encoder's input has
    its own step, and is never split. Requests with equal prompts wait until the first of them has computed the shared
    blocks. Not thread-safe; the engine's state owns it. Its content can be rebuilt from the requests: after an error
    that is not a refusal it is dropped.

    Args:
        config: sizes of a step.
        cache: the allocator; the scheduler is the only one to plan with it.
        move_blocks: executes and retires a step without rows: a swap.
        in_turns: prompts and decoding have steps of their own, and take turns if both are wanted; so it must be
            with an encoder.
        pads_rows: a step costs by its longest row times its rows, and that product stays within the token budget.
        prompt_sizes: numbers of tokens that steps with prompts are padded to, if they cost by their tokens.
        num_scheduler_steps: most tokens of each sequence that a step decodes; None for the config's.
        is_served: whether a step of these rows, with prompts, would find a compiled program; else decoding goes on.
        adapter_slots: memory of adapters, in which a request waits for a place; None without adapters.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: CacheManager,
        move_blocks: Callable[[CommittedStep], None],
        *,
        in_turns: bool = False,
        pads_rows: bool = False,
        prompt_sizes: Sequence[int] = (),
        num_scheduler_steps: int | None = None,
        is_served: Callable[[Sequence[ScheduledRow]], bool] = lambda rows: True,
        adapter_slots: AdapterSlots | None = None,
    ) -> None:
        self._config = config
        self._in_turns = in_turns
        self._pads_rows = pads_rows
        self._prompt_sizes = prompt_sizes
        self._is_served = is_served
        self._adapter_slots = adapter_slots
        self._num_scheduler_steps = num_scheduler_steps or config.most_scheduler_steps
        self._cache = cache
        self._num_groups = len(cache.config.layouts)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._registered: set[str] = set()
        self._to_resume: set[str] = set()
        self._swapped: set[str] = set()
        # Waiting requests whose blocks are a cached prefix, and nothing that was computed for them.
        self._prefix_only: set[str] = set()
        self._move_blocks = move_blocks
        self._prefilled_last = False
        self._guesses, self._num_guesses = guesses_of(config.speculation), config.num_speculative_tokens
        self._tokens_per_block = config.tokens_per_block
        self._prompts: dict[str, int] = {}
        self._first_of: dict[int, Request] = {}
        self._num_torn = 0
        self._num_prefilled, self._most_prefilled = 0, FIRST_TOKENS

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._running)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestTooLong: it could never finish, even alone in an empty pool; nothing has changed.
        """
        num_slots = request.num_encoder_slots
        self._cache.check_admission(request.given_id, num_slots + len(request.prompt_token_ids), request.max_tokens)
        insort(self._waiting, request, key=_order)
        prompt = request.encoder_token_ids or request.prompt_token_ids
        # An encoder's output is shared as a whole or not at all.
        shared = num_slots or len(prompt) // self._tokens_per_block * self._tokens_per_block
        # The other samples of a prompt wait for the first one anyway.
        if self._config.enable_prefix_caching and shared >= _WORTH_WAITING and request.index == 0:
            # A hash will do: of two prompts that share one, the second waits for nothing.
            self._prompts[request.request_id] = hash((request.salt, prompt[:shared]))

    def schedule(self) -> ScheduledStep | None:
        """Takes the blocks of the next step and returns it, or None when nothing can run before a step retires."""
        decodable, has_prompts = self._split()
        self._most_prefilled, self._num_prefilled = max(FIRST_TOKENS, 2 * self._num_prefilled), 0
        if self._in_turns:
            wait = not has_prompts or (self._prefilled_last and decodable)
            step = None if wait else self._schedule_prefill([], others_run=bool(decodable))
            self._prefilled_last = step is not None
            step = step or self._schedule_decode(decodable) or self._schedule_prefill([])
        else:
            step = self._schedule_prefill(decodable, others_run=bool(decodable)) if has_prompts else None
            step = step or self._schedule_decode(decodable)
        if step is None and all(_remaining(request) > 1 for request in self._running):
            # All decoding requests were preempted, and blocks are free.
            step = self._schedule_prefill([])
            others = [*self._running[1:], *filter(self._holds_blocks, self._waiting)]
            if step is None and others and not self._cache.stats().steps_in_flight:
                # They hold the blocks that the first needs.
                for request in others:
                    self._preempt(request)
                step = self._schedule_prefill([], most_rows=1)
        if step is not None:
            for request, start, num_new_tokens, _, _ in step.rows:
                request.num_computed_tokens = start + num_new_tokens
                if request.followers:
                    self._fork(request)
        return step

    def finish(self, request: Request) -> None:
        """Forgets a request that ended; its blocks are free when no step in flight uses them."""
        request.move(RequestState.FINISHED)
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._forget_first(request)
        self._guesses.forget(request.request_id)
        self._prompts.pop(request.request_id, None)
        if request.request_id in self._registered:
            self._registered.remove(request.request_id)
            self._to_resume.discard(request.request_id)
            self._swapped.discard(request.request_id)
            self._prefix_only.discard(request.request_id)
            self._cache.finish(request.request_id)

    def _schedule_prefill(
        self, decodable: Sequence[_Decodable], *, others_run: bool = False, most_rows: int | None = None
    ) -> ScheduledStep | None:
        """Takes the blocks of prompts and of one token of each decoding request; None if none runs.

        If other requests can run, prompts wait for the program that serves them.
        """
        prompts = self._prefill_candidates(self._config.max_num_batched_tokens - len(decodable), most_rows)
        num_new = sum(row.num_new_tokens for row in prompts)
        if (fits := fitting(self._prompt_sizes, num_new, len(decodable))) < num_new:
            whole, prompts = prompts, self._prefill_candidates(fits)
            chosen = {row.request.request_id for row in prompts}
            self._hold_back(row.request for row in whole if row.request.request_id not in chosen)
        decoding = _rows_of_one(decodable)
        if others_run and prompts and not self._is_served([*decoding, *prompts]):
            self._hold_back(row.request for row in prompts)
            return None
        while prompts:
            rows = [*decoding, *prompts]
            try:
                committed = self._cache.step([(row.request.request_id, row.num_new_tokens) for row in rows])
            except OutOfBlocks:
                self._hold_back([prompts.pop().request])
                continue
            for row in prompts:
                self._num_prefilled += row.num_new_tokens
                if row.request.state is not RequestState.RUNNING:
                    self._start(row.request)
            return ScheduledStep(tuple(rows), committed, encodes=prompts[0].start < 0)
        return None

    def _start(self, request: Request) -> None:
        self._waiting.remove(request)
        self._prefix_only.discard(request.request_id)
        # In their order, so that those of a group stand side by side.
        insort(self._running, request, key=_order)
        request.move(RequestState.RUNNING)
        cached = request.num_computed_tokens
        event(logging.DEBUG, "request_started", request_id=request.request_id, num_cached_tokens=cached)
        prompt = self._prompts.get(request.request_id)
        if prompt is not None and not request.output_token_ids:
            self._first_of.setdefault(prompt, request)

    def _prefill_candidates(self, budget: int, most_rows: int | None = None) -> list[ScheduledRow]:
        """Returns the rows that the token budget allows, in order, about as many as there are blocks for."""
        places = self._config.max_num_seqs - len(self._running)
        room = self._room()
        rows: list[ScheduledRow] = []
        longest = num_tokens = 0
        for request in chain([r for r in self._running if _remaining(r) > 1], self._with_adapters(self._admissible())):
            is_new = request.state is not RequestState.RUNNING
            if budget == 0 or (rows and room <= 0) or (is_new and places == 0) or len(rows) == most_rows:
                break
            if is_new:
                if not self._can_return(request, rows):
                    break
                try:
                    self._register(request)
                except OutOfBlocks:
                    break
                places -= 1
            start = request.num_computed_tokens
            # Forks take over all but the last token, which each sample computes for itself.
            num_new = min(budget, _remaining(request) - bool(request.followers)) if start >= 0 else -start
            # An encoder's input is not split, and shares a step only with other inputs.
            if num_new > budget or (rows and (rows[0].start < 0) != (start < 0)):
                self._hold_back([request])
                break
            if self._cache.config.states is not None:
                num_new = self._cache.until_snapshot(request.request_id, num_new)
            longest, num_tokens = max(longest, num_new), num_tokens + num_new
            is_long = self._pads_rows and (len(rows) + 1) * longest > self._config.max_num_batched_tokens
            if rows and (is_long or (self._prompt_sizes and num_tokens > self._most_prefilled)):
                self._hold_back([request])
                break
            rows.append(ScheduledRow(request, start, num_new, int(start + num_new == request.num_tokens)))
            budget -= num_new
            room -= num_new
        return rows

    def _room(self) -> int:
        return self._cache.num_available // self._num_groups * self._tokens_per_block

    def _can_return(self, request: Request, rows: Sequence[ScheduledRow]) -> bool:
        """Returns whether a request in host memory would find blocks to go on, beside those that run and these rows."""
        if request.request_id not in self._swapped or not (rows or self._running):
            return True
        # With blocks for fewer steps it would be copied back and forth.
        growth = (1 + -(-len(self._running) // 4)) * self._tokens_per_block
        return self._room() >= request.num_computed_tokens + growth + sum(row.num_new_tokens for row in rows)

    def _admissible(self) -> Iterator[Request]:
        """Yields the waiting requests, without those that should wait for blocks that another one is computing."""
        computing = {prompt for prompt, first in self._first_of.items() if not first.output_token_ids}
        for request in [request for request in self._waiting if not request.awaits_fork]:
            prompt = self._prompts.get(request.request_id)
            if prompt is None or prompt not in computing:
                if prompt is not None and prompt not in self._first_of:
                    computing.add(prompt)
                yield request

    def _with_adapters(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Yields the requests whose adapters have a slot, or get one.

        Behind a request that waits for a slot, others go on for a while, so that it does not wait for ever.
        """
        slots, last = self._adapter_slots, None
        if slots is None:
            yield from requests
            return
        slots.begin(request.adapter for request in self._running)
        for request in requests:
            if request.adapter is not None and last is not None and request.order > last:
                continue
            if slots.take(request.adapter):
                yield request
            elif last is None:
                last = request.order + _OVERTAKING

    def _holds_blocks(self, request: Request) -> bool:
        seq_id = request.request_id
        return seq_id in self._registered and seq_id not in self._to_resume and seq_id not in self._swapped

    def _hold_back(self, requests: Iterable[Request]) -> None:
        """Lets requests wait: a prefix that one found could be missing for an older one; what was computed is kept."""
        for request in requests:
            if request.request_id in self._prefix_only:
                self._drop_blocks(request)

    def _schedule_decode(self, decodable: Sequence[_Decodable]) -> ScheduledStep | None:
        num_steps, num_guesses = self._num_scheduler_steps, self._num_guesses
        if self._waiting and len(self._running) < self._config.max_num_seqs:
            num_steps = 1
        while decodable:
            # If half of its steps are unwanted, a program costs more than the host's work that it saves.
            if num_steps > 1 and 2 * max(map(_wanted, decodable)) <= num_steps:
                num_steps = 1
            if num_steps + num_guesses == 1:
                # One token of each of many: worth a short way.
                rows = _rows_of_one(decodable)
            else:
                rows = [self._decode_row(*each, num_steps, num_guesses) for each in decodable]
            try:
                committed = self._cache.step([(row.request.request_id, row.num_new_tokens) for row in rows])
                return ScheduledStep(tuple(rows), committed, num_steps)
            except OutOfBlocks:
                if num_steps > 1 or any(row.guesses for row in rows):
                    num_steps, num_guesses = 1, 0
                    continue
                if any(request.num_pending_tokens for request in self._running):
                    return None
                self._preempt(max(chain(self._running, filter(self._holds_blocks, self._waiting)), key=_order))
                decodable, _ = self._split()
        return None

    def _decode_row(self, request: Request, wanted: int, num_steps: int, num_guesses: int) -> ScheduledRow:
        # The last token that a request wants follows its guesses.
        if self._cache.config.states is not None:
            wanted = self._cache.until_snapshot(request.request_id, min(wanted, num_steps + num_guesses))
        guesses = self._guesses.guess(request, min(num_guesses, wanted - 1)) if num_guesses else ()
        count = min(wanted, num_steps) + len(guesses)
        return ScheduledRow(request, request.num_computed_tokens, count, count, guesses)

    def _split(self) -> tuple[list[_Decodable], bool]:
        """Returns the running requests that decode, each with the tokens that it wants, and whether prompts wait."""
        decodable: list[_Decodable] = []
        has_prompts = bool(self._waiting)
        for request in self._running:
            known = len(request.prompt_token_ids) + len(request.output_token_ids)
            remaining = known + request.num_pending_tokens - request.num_computed_tokens
            if remaining > 1:
                has_prompts = True
            elif remaining == 1 and (wanted := request.num_wanted_tokens) > 0:
                decodable.append((request, wanted))
        return decodable[: self._config.max_num_seqs], has_prompts

    def _register(self, request: Request) -> None:
        seq_id = request.request_id
        if seq_id in self._swapped:
            self._move_blocks(self._cache.swap_in(seq_id))
            self._swapped.remove(seq_id)
        elif seq_id in self._to_resume:
            request.num_computed_tokens = self._whole(request, self._cache.resume(seq_id))
            self._to_resume.remove(seq_id)
            self._prefix_only.add(seq_id)
            # Others may have computed its prompt meanwhile.
            self._fork(request)
        elif seq_id not in self._registered:
            # An encoder's output of a token depends on all others, so only equal inputs share blocks.
            found = self._add(request, repr(request.encoder_token_ids) if request.encoder_token_ids else "")
            request.num_computed_tokens = self._whole(request, found)
            if not request.output_token_ids:
                request.num_cached_tokens = max(request.num_computed_tokens + len(request.encoder_token_ids), 0)
            self._registered.add(seq_id)
            self._prefix_only.add(seq_id)
            self._fork(request)

    def _whole(self, request: Request, num_found: int) -> int:
        """Returns the computed tokens of a request that is registered; of an encoder's input part is as good as none.

        Args:
            request: just added or resumed.
            num_found: slots whose contents are cached.
        """
        if 0 < num_found < request.num_encoder_slots:
            self._cache.finish(request.request_id)
            self._num_torn += 1
            num_found = self._add(request, f"alone {self._num_torn}")
        return num_found - request.num_encoder_slots

    def _add(self, request: Request, shared_by: str) -> int:
        """Tells the cache of a request; blocks are shared where `shared_by` is equal, too. Returns the slots found."""
        keys = (hashlib.sha256(shared_by.encode()).digest(),) if shared_by else ()
        return self._cache.add(request.request_id, request.cached_token_ids, salt=request.salt, extra_keys=keys)

    def _fork(self, first: Request) -> None:
        """Lets the other samples of a prompt share its blocks once all but its last token is computed or in flight."""
        if first.followers and _remaining(first) == 1:
            for request in first.followers:
                if request.state is RequestState.WAITING and request.request_id not in self._registered:
                    num_slots = self._cache.fork(first.request_id, request.request_id)
                    request.num_computed_tokens = num_slots - request.num_encoder_slots
                    request.num_cached_tokens = request.num_computed_tokens
                    self._registered.add(request.request_id)
            first.followers = []

    def _preempt(self, request: Request) -> None:
        is_swapped = self._give_blocks(request)
        event(
            logging.INFO,
            "request_preempted",
            request_id=request.request_id,
            num_tokens=request.num_known_tokens,
            is_swapped=is_swapped,
        )
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            self._forget_first(request)
            request.move(RequestState.PREEMPTED)
            request.num_pending_tokens = 0
            insort(self._waiting, request, key=_order)

    def _forget_first(self, request: Request) -> None:
        prompt = self._prompts.get(request.request_id)
        if prompt is not None and self._first_of.get(prompt) is request:
            del self._first_of[prompt]

    def _drop_blocks(self, request: Request) -> None:
        """Releases a request's blocks; it is computed again, starting from its blocks that are still cached."""
        self._cache.preempt(request.request_id)
        self._prefix_only.discard(request.request_id)
        self._to_resume.add(request.request_id)
        request.num_computed_tokens = 0

    def _give_blocks(self, request: Request) -> bool:
        """Takes a request's blocks, and says whether their contents went to host memory, and so are not lost."""
        if self._config.num_host_blocks:
            with contextlib.suppress(OutOfBlocks):
                self._move_blocks(self._cache.swap_out(request.request_id))
                self._swapped.add(request.request_id)
                return True
        self._drop_blocks(request)
        return False


#: A request that decodes, and the tokens that it wants.
_Decodable: TypeAlias = tuple[Request, int]
_order = attrgetter("order")
_wanted = itemgetter(1)


def _rows_of_one(decodable: Iterable[_Decodable]) -> list[ScheduledRow]:
    # A named tuple's own constructor takes twice as long.
    each = ((request, request.num_computed_tokens, 1, 1, ()) for request, _ in decodable)
    return list(map(tuple.__new__, repeat(ScheduledRow), each))


def _remaining(request: Request) -> int:
    return request.num_tokens - request.num_computed_tokens
