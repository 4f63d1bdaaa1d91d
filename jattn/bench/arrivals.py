"""Requests of a served load: their lengths, when they arrive, and the latencies that came of it. No device."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jattn.bench.report import HIDDEN
from torch_core.base.errors import InvalidInput

_PERCENTILES = (50, 90, 99)
_LOAD = re.compile(r"(?P<lengths>chat|\d+x\d+):(?:(?P<users>\d+)users|(?P<rate>inf|\d+(?:\.\d+)?)/s):(?P<requests>\d+)")
# Logarithmic normal distributions of prompts and answers in a chat: medians 110 and 150, means 225 and 207, and their
# limits. ShareGPT's conversations, as vLLM's benchmark filters them, have means of about 220 and 200.
_CHAT = ((110.0, 1.2, 4, 2048), (150.0, 0.8, 4, 1024))


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one row.

    Attributes:
        text: the load as it was written; see `of`.
        lengths: tokens of prompt and answer of every request, or None for those of a chat.
        users: users that send a request each as soon as their last one ended; 0 for an open loop.
        rate: requests a second that arrive, in a Poisson process; inf for all at once, and with users.
        num_requests: requests of all users.
    """

    text: str
    lengths: tuple[int, int] | None
    users: int
    rate: float
    num_requests: int

    @classmethod
    def of(cls, text: str) -> Load:
        """Reads LENGTHS:ARRIVALS:REQUESTS, such as 1024x256:32users:128 or chat:2.5/s:64.

        Raises:
            InvalidInput: the text is no load, or a number in it is 0.
        """
        found = _LOAD.fullmatch(text)
        numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]
        if found is None or not all(numbers):
            wanted = "it must be LENGTHS:ARRIVALS:REQUESTS with numbers above 0: 1024x256:32users:128, chat:2.5/s:64"
            raise InvalidInput("loads", value=text, wanted=wanted)
        lengths = None
        if found["lengths"] != "chat":
            prompt, answer = map(int, found["lengths"].split("x"))
            lengths = prompt, answer
        return cls(text, lengths, int(found["users"] or 0), float(found["rate"] or math.inf), int(found["requests"]))

    def sizes(self, seed: int) -> list[tuple[int, int]]:
        """Returns the tokens of prompt and answer of each request; equal for equal seeds."""
        if self.lengths is not None:
            return [self.lengths] * self.num_requests
        numbers = np.random.default_rng((seed, self.num_requests))
        drawn = [
            np.clip(numbers.lognormal(math.log(median), spread, self.num_requests), least, most).astype(int).tolist()
            for median, spread, least, most in _CHAT
        ]
        return list(zip(*drawn, strict=True))

    def prompts(self, seed: int, vocab_size: int) -> list[list[int]]:
        """Returns random token ids from 1 to below `vocab_size` of each request; they share no prefix."""
        numbers = np.random.default_rng((seed, self.num_requests, 1))
        return [numbers.integers(1, vocab_size, length).tolist() for length, _ in self.sizes(seed)]

    def arrivals(self, seed: int) -> list[float]:
        """Returns the seconds from the start of the row to each arrival; zeros with users."""
        if math.isinf(self.rate):
            return [0.0] * self.num_requests
        gaps = np.random.default_rng((seed, self.num_requests, 2)).exponential(1 / self.rate, self.num_requests)
        return np.cumsum(gaps).tolist()

    @property
    def longest(self) -> int:
        """Most tokens of a request."""
        return sum(self.lengths or (most for *_, most in _CHAT))


@dataclass(slots=True)
class Timeline:
    """One request: when it came, when its tokens came, and how many. Seconds of `time.perf_counter`."""

    arrival: float
    events: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ServeRow:
    """One load. Latencies are in milliseconds, by percentile ("p50", "p90", "p99", "mean").

    Attributes:
        load: lengths, arrivals and requests; see `Load.of`.
        duration_s: seconds from the first arrival to the last token.
        requests_per_second, output_tokens_per_second: rates of the completed requests.
        ttft_ms: from the arrival to the first token.
        tpot_ms: per token after the first, mean of a request.
        itl_ms: between two events with text; several tokens may come in one.
        e2e_ms: from the arrival to the last token.
        goodput: completed requests a second within both goals; None without goals.
        error: number of failed requests, and the error of the first one.
        pool_usage: seconds since the first arrival and the share of the pool's blocks that requests hold, if watched.
    """

    load: str
    completed: int
    failed: int
    duration_s: float
    requests_per_second: float
    output_tokens_per_second: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]
    goodput: float | None
    error: str | None = field(default=None, metadata=HIDDEN)
    pool_usage: list[tuple[float, float]] = field(default_factory=list, metadata=HIDDEN)


def row_of(
    load: Load,
    timelines: Sequence[Timeline],
    *,
    ttft_goal_ms: float | None = None,
    tpot_goal_ms: float | None = None,
    pool_usage: list[tuple[float, float]] | None = None,
) -> ServeRow:
    """Returns the row of a load's requests.

    Args:
        load: the load.
        timelines: timelines of its requests.
        ttft_goal_ms, tpot_goal_ms: most milliseconds to the first token, and for each further one, of a request that
            counts for `goodput`.
        pool_usage: as in `ServeRow`.
    """
    done = [timeline for timeline in timelines if timeline.error is None and timeline.events]
    failed = [each.error or "nothing came" for each in timelines if each.error or not each.events]
    first = [1e3 * (each.events[0] - each.arrival) for each in done]
    whole = [1e3 * (each.events[-1] - each.arrival) for each in done]
    each_token = [1e3 * (each.events[-1] - each.events[0]) / max(each.num_tokens - 1, 1) for each in done]
    between = [1e3 * (b - a) for each in done for a, b in itertools.pairwise(each.events)]
    start = min(timeline.arrival for timeline in timelines)
    duration = max((timeline.events[-1] for timeline in done), default=start) - start
    # Without an answer all numbers of them are 0.
    seconds = duration or math.inf
    goals = ttft_goal_ms is not None or tpot_goal_ms is not None
    good = sum(
        early <= (ttft_goal_ms or math.inf) and later <= (tpot_goal_ms or math.inf)
        for early, later in zip(first, each_token, strict=True)
    )
    return ServeRow(
        load=load.text,
        completed=len(done),
        failed=len(failed),
        duration_s=duration,
        requests_per_second=len(done) / seconds,
        output_tokens_per_second=sum(timeline.num_tokens for timeline in done) / seconds,
        ttft_ms=_percentiles(first),
        tpot_ms=_percentiles(each_token),
        itl_ms=_percentiles(between),
        e2e_ms=_percentiles(whole),
        goodput=good / seconds if goals else None,
        error=f"at {load.text} {len(failed)} requests failed; the first: {failed[0]}" if failed else None,
        pool_usage=pool_usage or [],
    )


def _percentiles(values: list[float]) -> dict[str, float]:
    values = values or [math.nan]
    found = zip(_PERCENTILES, np.percentile(values, _PERCENTILES).tolist(), strict=True)
    return {f"p{percentile}": value for percentile, value in found} | {"mean": float(np.mean(values))}
