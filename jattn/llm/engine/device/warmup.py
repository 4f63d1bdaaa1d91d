"""Compiles an engine's programs in the background, likely ones first, while its steps run those that are compiled."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection

from jattn.llm.engine.device.buckets import Bucket
from jattn.llm.engine.device.programs import Programs
from jattn.llm.reports import LOGGER


class WarmUp:
    """Compiles the missing programs of some buckets in threads of its own. Any thread may call any method.

    A step whose program is missing runs in a larger compiled one, if there is any, and its own is compiled next.

    Args:
        programs: the compiled programs.
        buckets: buckets of the programs.
        report: called on one of the threads with the number that is done, that of all, and the name of the last.
        finished: called on one of the threads after the last program.
    """

    def __init__(
        self,
        programs: Programs,
        buckets: Collection[Bucket],
        report: Callable[[int, int, str], None],
        finished: Callable[[], object],
    ) -> None:
        order, num_needed = in_order(buckets)
        self._programs, self._report, self._finished = programs, report, finished
        self._needed = {bucket for bucket in order[:num_needed] if bucket not in programs.compiled}
        self._waiting = deque(bucket for bucket in order if bucket not in programs.compiled)
        self._unfinished = set(self._waiting)
        self._num_done, self._total = 0, len(self._waiting)
        self._lock = threading.Lock()
        # The steps that run meanwhile need the other half of the cores.
        count = max(1, min((os.cpu_count() or 1) // 2, programs.num_compilers()))
        # Python would wait for the whole queue of other threads at its end; `end` waits for the programs under way.
        self._threads = [threading.Thread(target=self._work, name="jattn-warmup", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        if not self._total:
            finished()

    @property
    def is_ready(self) -> bool:
        """Whether every step has a program that serves it."""
        return not self._needed

    def find(self, bucket: Bucket) -> Bucket | None:
        """Returns the smallest compiled bucket that serves the steps of a bucket; None if there is none.

        A missing program is compiled next.
        """
        compiled = self._programs.compiled
        if bucket in compiled:
            return bucket
        with self._lock:
            if bucket in self._waiting:
                self._waiting.remove(bucket)
                self._waiting.appendleft(bucket)
        return min((each for each in tuple(compiled) if each.covers(bucket)), key=_work_of, default=None)

    def awaits(self, bucket: Bucket) -> bool:
        """Returns whether the program of a bucket is still to come."""
        return bucket in self._unfinished

    def end(self) -> None:
        """Drops the programs that wait, and waits for those under way."""
        with self._lock:
            self._waiting.clear()
            self._unfinished.clear()
            self._total = 0
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _work(self) -> None:
        while (bucket := self._next()) is not None:
            try:
                self._programs.ensure(bucket)
            except Exception as error:
                # The step that needs the program compiles it again, and its caller gets the error.
                LOGGER.warning("the program for %s cannot be compiled: %s", bucket, error)
            with self._lock:
                self._num_done += 1
                self._needed.discard(bucket)
                self._unfinished.discard(bucket)
                done, total = self._num_done, self._total
            if total:
                self._report(done, total, str(bucket))
            if done == total:
                self._finished()

    def _next(self) -> Bucket | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None


def in_order(buckets: Collection[Bucket]) -> tuple[list[Bucket], int]:
    """Returns buckets in the order in which steps are likely to need them, and how many of them serve every step.

    A short prompt and its decoding come first. The largest buckets follow, which serve every step at a higher cost,
    and then the others, from small to large.
    """
    by_size = sorted(buckets, key=lambda each: (each.sampler.kind, each.piece_tokens, _work_of(each)))
    first: dict[tuple[bool, bool, int], Bucket] = {}
    for bucket in by_size:
        # The encoder runs before the decoder, a prompt before decoding, and single steps are for the last tokens.
        first.setdefault((not bucket.encodes, bucket.decodes, -bucket.num_steps), bucket)
    largest = [each for each in by_size if not any(other.covers(each) for other in by_size if other != each)]
    order = list(dict.fromkeys([*(first[key] for key in sorted(first)), *largest]))
    return [*order, *(bucket for bucket in by_size if bucket not in set(order))], len(order)


def _work_of(bucket: Bucket) -> tuple[int, int, int]:
    """Returns the tokens that attention, and that linear layers, compute; then the part of the sampler."""
    return bucket.num_seqs * bucket.max_query_len, bucket.num_inputs, bucket.sampler.kind
