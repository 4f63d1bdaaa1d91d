"""The cache manager: the public verbs of the block allocator, with their checks, their lock and their process guard."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.cache import lifecycle
from torch_core.cache.audit import audit_state, collect_stats
from torch_core.cache.config import CacheConfig
from torch_core.cache.records import CacheStats, CommittedStep, StepPlan
from torch_core.cache.state import CacheState
from torch_core.cache.stepping import commit_plan, plan_step, retire_step

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def _verb(
    method: Callable[Concatenate[CacheManager, _Args], _Result],
) -> Callable[Concatenate[CacheManager, _Args], _Result]:
    """Runs a method under the manager's lock, and only in the process that created the manager."""

    @functools.wraps(method)
    def guarded(self: CacheManager, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        # Before the lock: a child process may have inherited it locked by a thread that it does not have.
        if os.getpid() != self._process:
            raise Unsupported(
                f"this cache manager belongs to process {self._process}; a fork (process {os.getpid()}) must not use "
                "it, because both would hand out the same blocks. Start workers with the 'spawn' method."
            )
        with self._lock:
            return method(self, *args, **kwargs)

    return guarded


class CacheManager:
    """Assigns the blocks of a paged key/value cache to sequences, and shares blocks between equal prefixes.

    With `CacheConfig.states` it also assigns state slots. A sequence that shares a prefix then continues from a
    snapshot of the state at a block boundary, in a slot of its own.

    The life of a step is `plan` (decides, changes nothing), `commit` (takes blocks; the step may now be dispatched)
    and `retire` (the step's output was seen: keys of the blocks it filled become visible to others, blocks that left
    a table while it ran are free again). Steps may overlap: step n + 1 can be committed before step n has retired and
    before its sampled tokens are known. Steps run on the device in the order of their ids.

    Every call either succeeds or raises and leaves the state as it was. Every method may be called from any thread;
    one lock serialises them, so `plan` and `commit` by several threads need `step`, which does both under one hold.

    Example:
        >>> cache = CacheManager(CacheConfig(num_blocks=8, block_size=4))
        >>> cache.add("a", [1, 2, 3, 4, 5])
        0
        >>> step = cache.commit(cache.plan([("a", 5)]))
        >>> step.rows[0].block_ids, step.rows[0].num_computed_tokens, step.rows[0].num_new_tokens
        ((1, 2), 0, 5)
        >>> cache.append_tokens("a", [6])
        >>> cache.retire(step.step_id)
        >>> cache.add("b", [1, 2, 3, 4, 9, 9])
        4
        >>> cache.finish("a"), cache.finish("b"), cache.stats().used
        (None, None, 0)
    """

    def __init__(self, config: CacheConfig) -> None:
        if not isinstance(config, CacheConfig):
            raise InvalidInput("config", f"is a {type(config).__name__}", "it must be a CacheConfig")
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._state = CacheState(config)

    @property
    def config(self) -> CacheConfig:
        """The sizes that the cache was built with."""
        return self._state.config

    @property
    def num_available(self) -> int:
        """Blocks that a step can take now: free ones, and cached ones without a holder."""
        return self._state.pool.num_available

    # Sequences

    def check_admission(self, seq_id: str | None, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Refuses a request that could never finish, even alone in an empty pool. Needs no lock: sizes never change.

        Args:
            seq_id: the sequence's name in errors; None leaves the name out.
            num_prompt_tokens, max_new_tokens: its length, and the most tokens that it may grow by.

        Raises:
            RequestTooLong: it needs more blocks than the pool or its block table has.
            InvalidInput: a number is negative or not an int.
        """
        lifecycle.check_admission(self._state, seq_id, num_prompt_tokens, max_new_tokens)

    @_verb
    def add(
        self,
        seq_id: str,
        token_ids: Sequence[int],
        *,
        salt: bytes | None = None,
        extra_keys: Iterable[bytes | str | int] = (),
    ) -> int:
        """Registers a sequence and gives it the blocks of its longest cached prefix.

        The shared blocks are held from then on, so call this when the sequence is about to run.

        Args:
            seq_id: unused name of the sequence, at most 1,024 characters.
            token_ids: token ids of the prompt: at least one, each from 0 to 2**31 - 1.
            salt: 1 to 64 bytes; sequences share blocks only if their salts are equal.
            extra_keys: other inputs that the content depends on, such as adapter or image ids; bytes, str or int.

        Returns:
            The number of cached prompt tokens: whole blocks, with at least one token left to compute.

        Raises:
            InvalidInput: an argument is of the wrong type or range, or the id is in use.
            RequestTooLong: the prompt alone can never fit.
        """
        return lifecycle.add(self._state, seq_id, token_ids, salt, extra_keys)

    @_verb
    def append_tokens(self, seq_id: str, token_ids: Sequence[int]) -> None:
        """Adds the next token ids of a sequence (sampled, or given), from which keys are computed.

        Raises:
            InvalidInput: the sequence is unknown, or an id is not an int from 0 to 2**31 - 1.
        """
        self._state.append_tokens([(seq_id, token_ids)])

    @_verb
    def append_each(self, new: Sequence[tuple[str, Sequence[int]]]) -> None:
        """`append_tokens` for pairs of a sequence and its tokens, under one hold of the lock; of all pairs or of none.

        Raises:
            InvalidInput: as `append_tokens`.
        """
        self._state.append_tokens(new)

    @_verb
    def finish(self, seq_id: str) -> None:
        """Forgets a sequence. Blocks that no step in flight uses are free at once, the others when it retires.

        Raises:
            InvalidInput: the sequence is unknown, or has finished before.
        """
        lifecycle.remove(self._state, seq_id)

    @_verb
    def cancel(self, seq_id: str) -> None:
        """Like `finish`, but at any moment, and counted as a cancellation.

        Raises:
            InvalidInput: unknown sequence.
        """
        lifecycle.remove(self._state, seq_id)
        self._state.counters["cancelled"] += 1

    @_verb
    def preempt(self, seq_id: str) -> None:
        """Releases a sequence's blocks and keeps its tokens; `resume` continues it, and it is computed again.

        Raises:
            InvalidInput: unknown sequence, or one without blocks on the device.
        """
        lifecycle.preempt(self._state, seq_id)

    @_verb
    def resume(self, seq_id: str) -> int:
        """Restores a preempted sequence, starting from its cached blocks.

        Returns:
            The number of cached tokens; the other tokens, including generated ones, must be computed again.

        Raises:
            InvalidInput: unknown sequence, or one that is not preempted.
        """
        return lifecycle.resume(self._state, seq_id)

    @_verb
    def fork(self, parent_id: str, child_id: str) -> int:
        """Adds a sequence with the parent's tokens, sharing all its blocks; a shared tail is copied when written.

        The child starts at the parent's last known token. It does not get the parent's later tokens in flight.

        Returns:
            The number of the child's tokens that are computed or in flight.

        Raises:
            InvalidInput: unknown parent, one that is preempted or swapped out, or a child id that is in use.
        """
        return lifecycle.fork(self._state, parent_id, child_id)

    @_verb
    def computed_blocks(self, seq_id: str) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Returns the tokens of a sequence whose steps have retired, and its block tables in all groups.

        They are 0 and empty while it has no blocks on the device.

        Raises:
            InvalidInput: unknown sequence.
        """
        table = self._state.known(seq_id).table
        return (0, ()) if table is None else (table.retired, table.rows or table.freeze())

    @_verb
    def swap_out(self, seq_id: str) -> CommittedStep:
        """Moves a sequence's blocks to host memory: a step without rows, whose `swaps` the caller executes in order.

        Returns:
            The step. Its device blocks are free when it retires.

        Raises:
            OutOfBlocks: too few free host blocks.
            InvalidInput: unknown sequence, or one without blocks on the device.
        """
        return lifecycle.swap_out(self._state, seq_id)

    @_verb
    def swap_in(self, seq_id: str) -> CommittedStep:
        """Moves a sequence's blocks back to the device; it may be planned at once.

        Raises:
            OutOfBlocks: too few blocks in the pool.
            InvalidInput: unknown sequence, or one that is not swapped out.
        """
        return lifecycle.swap_in(self._state, seq_id)

    @_verb
    def scrub(self) -> CommittedStep:
        """Scrubs the blocks freed since the last step: a step without rows, for an engine that becomes idle.

        While steps follow each other, each lists its own `blocks_to_scrub`, and this call is not needed.

        Raises:
            InvalidInput: the cache was built without `scrub_on_free`.
        """
        if not self._state.config.scrub_on_free:
            raise InvalidInput("scrub_on_free", "is False: the cache does not note freed blocks. Set it in CacheConfig")
        return commit_plan(self._state, plan_step(self._state, ()))

    # Steps

    @_verb
    def plan(self, work: Sequence[tuple[str, int]]) -> StepPlan:
        """Computes the blocks that a step needs. Changes nothing.

        Args:
            work: pairs of sequence id and number of new tokens (at least 1), each sequence once.

        Raises:
            OutOfBlocks: the pool has too few blocks now; the error has `needed`, `free` and `evictable`.
            RequestTooLong: a block table would overflow.
            InvalidInput: unknown, repeated, preempted or swapped-out sequence, or a count below 1.
        """
        return plan_step(self._state, work)

    @_verb
    def commit(self, plan: StepPlan) -> CommittedStep:
        """Takes the blocks of a plan and fixes the rows of the step.

        Raises:
            InvalidInput: the plan is another manager's, or the state has changed since.
        """
        return commit_plan(self._state, plan)

    @_verb
    def step(self, work: Sequence[tuple[str, int]]) -> CommittedStep:
        """Plans and commits under one hold of the lock. Raises the same errors as `plan`."""
        return commit_plan(self._state, plan_step(self._state, work))

    @_verb
    def retire(self, step_id: int, num_kept_tokens: Mapping[str, int] | None = None) -> None:
        """Reports that a step's output was seen. Calls may be out of order: one takes effect after those of all earlier
        steps.

        A step may have reserved slots for tokens whose ids were not yet known: drafts, or several decoding steps in one
        program. `num_kept_tokens` releases the slots of rejected tokens; the sequence continues after the kept tokens,
        as if the step had been that short. (vLLM reserves such slots as `num_lookahead_tokens` of `allocate_slots`.)
        The step itself leaves the state after the kept tokens in a sequence's slot (`num_kept_tokens` of the ops).

        Args:
            step_id: the step.
            num_kept_tokens: sequence id to the number of its row's new tokens that are kept, at least 1; a sequence
                that is not named keeps all. Pass it before the ids of the step are appended, so that no key is computed
                for a slot that holds another token.

        Raises:
            InvalidInput: the step is not in flight (or was retired before); a sequence has no row in the step; a count
                is out of range; a later step continues after the row; or the ids of tokens that are not kept are
                already known.

        Example:
            >>> cache = CacheManager(CacheConfig(num_blocks=8, block_size=4))
            >>> cache.add("a", [1, 2, 3])
            0
            >>> cache.retire(cache.step([("a", 3)]).step_id)
            >>> cache.append_tokens("a", [4])
            >>> step = cache.step([("a", 8)])
            >>> step.rows[0].block_ids
            (1, 2, 3)
            >>> cache.retire(step.step_id, {"a": 2})
            >>> cache.append_tokens("a", [5, 6])
            >>> cache.step([("a", 1)]).rows[0].block_ids
            (1, 2)
        """
        retire_step(self._state, step_id, num_kept_tokens)

    @_verb
    def reset(self) -> None:
        """Forgets the content of all blocks, the keys and the steps in flight: the device memory was lost or replaced.

        Sequences stay, preempted, with their tokens; `resume` or `finish` them. No step may still run on the device.
        """
        lifecycle.reset(self._state)

    # Views

    @_verb
    def num_computed_tokens(self, seq_id: str) -> int:
        """Returns the tokens of a sequence that committed steps have computed; 0 while it is not on the device.

        Raises:
            InvalidInput: unknown sequence.
        """
        table = self._state.known(seq_id).table
        return 0 if table is None else table.scheduled

    @_verb
    def until_snapshot(self, seq_id: str, num_tokens: int) -> int:
        """Returns how many of a sequence's next tokens a step should compute, to end where a snapshot is due.

        A longer step is correct, too, but leaves no state at that boundary, so other sequences share less. Without
        states it is `num_tokens`.

        Raises:
            InvalidInput: unknown sequence, or a number that is not positive.
        """
        check_int("num_tokens", num_tokens, 1)
        table, slots = self._state.known(seq_id).table, self._state.slots
        return num_tokens if slots is None or table is None else slots.until_snapshot(table, num_tokens)

    @_verb
    def stats(self) -> CacheStats:
        """Returns a frozen snapshot of counts and totals."""
        return collect_stats(self._state)

    @_verb
    def audit(self, *, rehash: bool = True) -> None:
        """Recomputes every invariant from scratch.

        Args:
            rehash: also hash the tokens of all sequences again. It costs more than the rest of the audit. An engine
                that audits whenever it is idle may leave it out; published keys are then compared with the sequences'
                own keys.

        Raises:
            CacheCorruption: an invariant is broken; the message has one sentence for each, with the blocks.
        """
        audit_state(self._state, rehash=rehash)
