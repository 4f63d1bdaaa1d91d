"""The scheduler's decisions alone: no device, no tokens sampled; a step's outcome is written by the test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jattn.llm.engine import EngineConfig, SamplingParams
from jattn.llm.engine.request.outputs import RequestMetrics
from jattn.llm.engine.request.request import Request, RequestState
from jattn.llm.engine.scheduler import ScheduledStep, Scheduler
from torch_core.base.errors import RequestTooLong
from torch_core.cache import CacheConfig, CacheManager, CommittedStep, StateConfig


class Bench:
    """A scheduler over an allocator, and a stand-in for the device that answers every step at once with token 7."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        pads_rows: bool = False,
        steps_of_device: int | None = None,
        most_served: int = 1 << 30,
        prompt_sizes: tuple[int, ...] = (),
        states: StateConfig | None = None,
        **sizes: Any,
    ) -> None:
        self.most_served = most_served
        config = EngineConfig(
            **{
                "block_size": 4,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 16,
                "num_scheduler_steps": 1,
                "num_blocks": num_blocks,
                "num_host_blocks": num_host_blocks,
                "enable_prefix_caching": False,
                **sizes,
            }
        )
        self.cache = CacheManager(
            CacheConfig(
                num_blocks=num_blocks,
                block_size=4,
                enable_prefix_caching=config.enable_prefix_caching,
                num_host_blocks=num_host_blocks,
                states=states,
            )
        )
        self.swaps: list[CommittedStep] = []
        self.scheduler = Scheduler(
            config,
            self.cache,
            self._move,
            in_turns=config.fixed_shapes,
            pads_rows=pads_rows,
            num_scheduler_steps=steps_of_device,
            prompt_sizes=prompt_sizes,
            is_served=lambda rows: max(row.num_new_tokens for row in rows) <= self.most_served,
        )
        self._next_token = 0

    def _move(self, step: CommittedStep) -> None:
        self.swaps.append(step)
        self.cache.retire(step.step_id)

    def add(self, name: str, num_prompt_tokens: int, max_tokens: int = 8, *, order: int | None = None) -> Request:
        # No two prompts begin alike.
        first = self._next_token
        self._next_token += num_prompt_tokens
        return self.add_prompt(
            name, tuple(range(first, self._next_token)), max_tokens, first if order is None else order
        )

    def add_prompt(
        self, name: str, tokens: tuple[int, ...], max_tokens: int = 8, order: int = 0, encoded: tuple[int, ...] = ()
    ) -> Request:
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(name, tokens, params, np.zeros(0, np.int32), frozenset(), RequestMetrics(0.0), order=order)
        request.encoder_token_ids, request.num_encoder_slots = encoded, len(encoded)
        self.scheduler.add(request)
        return request

    def add_samples(
        self, tokens: tuple[int, ...], max_tokens: int, encoded: tuple[int, ...] = ()
    ) -> tuple[Request, ...]:
        """Adds "first" and "second", two samples of a prompt, whose turn is behind that of order 0."""
        samples = tuple(self.add_prompt(name, tokens, max_tokens, 1, encoded) for name in ("first", "second"))
        samples[0].followers += samples[1:]
        for index, sample in enumerate(samples):
            sample.index, sample.samples = index, samples
        return samples

    def step(self) -> dict[str, int]:
        """Runs one step and returns the new tokens of each request, in the order of the rows."""
        step = self.scheduler.schedule()
        if step is None:
            return {}
        self.answer(step)
        return {row.request.request_id: row.num_new_tokens for row in step.rows}

    def schedule(self) -> ScheduledStep:
        """Takes the next step, which there must be."""
        step = self.scheduler.schedule()
        assert step is not None
        return step

    def answer(self, step: ScheduledStep) -> None:
        for row in step.rows:
            request = row.request
            tokens = [7] * row.num_samples
            request.output_token_ids += tokens
            if tokens:
                self.cache.append_tokens(request.request_id, tokens)
            if request.end_reason:
                self.scheduler.finish(request)
        self.cache.retire(step.committed.step_id)


def test_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    bench = Bench()
    for name in "abc":
        bench.add(name, 3)

    assert list(bench.step()) == ["a", "b", "c"]


def test_steps_of_several_tokens_end_at_each_boundary_of_a_snapshot() -> None:
    states = StateConfig(num_slots=16, snapshot_blocks=2)
    bench = Bench(num_blocks=128, num_scheduler_steps=4, enable_prefix_caching=True, states=states)
    bench.add("a", 6, 14)
    while bench.step():
        pass

    assert bench.cache.stats().snapshots == 3, "behind 4, 8 and 16 tokens"


def test_no_more_than_max_num_seqs_run_and_a_place_that_falls_free_is_the_next_ones() -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.add(name, 3, max_tokens=2)

    assert [bench.step() for _ in range(4)] == [{"a": 3, "b": 3}, {"a": 1, "b": 1}, {"c": 3}, {"c": 1}]
    assert bench.scheduler.num_unfinished == 0


def test_where_rows_are_padded_a_long_prompt_takes_few_beside_it() -> None:
    bench = Bench(pads_rows=True, max_num_seqs=8)
    for name, length in (("a", 3), ("b", 6), ("c", 2), ("d", 2), ("e", 2)):
        bench.add(name, length)

    # Two rows of 6 are within the budget of 16; three are not, however short the third one is.
    assert bench.step() == {"a": 3, "b": 6}
    assert {name: new for name, new in bench.step().items() if name not in "ab"} == {"c": 2, "d": 2, "e": 2}


def test_a_step_holds_no_more_tokens_than_its_budget_and_the_rest_of_a_prompt_comes_later() -> None:
    bench = Bench(max_num_batched_tokens=8)
    request = bench.add("a", 19)

    sizes = [bench.step()["a"] for _ in range(3)]

    assert sizes == [8, 8, 3]
    assert (len(request.output_token_ids), request.num_computed_tokens) == (1, 19)


def test_what_one_prompt_leaves_of_the_budget_the_next_one_gets() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", 5)
    bench.add("b", 9)

    assert [bench.step(), bench.step()] == [{"a": 5, "b": 3}, {"a": 1, "b": 6}]


def test_a_chunk_that_does_not_reach_the_prompts_end_samples_nothing() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", 12)

    samples = []
    for _ in range(2):
        step = bench.schedule()
        samples += [row.num_samples for row in step.rows]
        bench.answer(step)

    assert samples == [0, 1]


def test_running_requests_decode_beside_the_chunks_of_a_prompt() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.add("short", 2)
    bench.step()
    bench.add("long", 9)

    steps = [bench.step() for _ in range(4)]

    assert steps == [{"short": 1, "long": 3}] * 3 + [{"short": 1, "long": 1}]


def test_a_long_prompt_and_running_requests_take_turns_where_bits_must_not_depend_on_neighbours() -> None:
    bench = Bench(max_num_batched_tokens=4, fixed_shapes=True)
    bench.add("short", 2)
    bench.step()
    bench.add("long", 12)

    assert [list(bench.step()) for _ in range(6)] == [["short"], ["long"]] * 3


def test_the_last_token_of_a_prompt_is_decoded_where_another_prompt_leaves_it_alone_as_the_docs_say() -> None:
    # The limit of fixed_shapes: which program computes it depends on the other prompt.
    bench = Bench(max_num_batched_tokens=32, fixed_shapes=True)
    bench.add("first", 11)
    bench.add("second", 22)

    assert [bench.step(), bench.step()] == [{"first": 11, "second": 21}, {"first": 1, "second": 1}]


def test_the_newest_request_is_preempted_when_blocks_run_out_and_comes_back_first() -> None:
    # Four usable blocks: both prompts fit, neither can grow beside the other.
    bench = Bench(num_blocks=5)
    old, new = bench.add("old", 8, max_tokens=6), bench.add("new", 8, max_tokens=6)
    late = bench.add("late", 3, max_tokens=2)
    assert bench.step() == {"old": 8, "new": 8}

    assert bench.step() == {"old": 1}
    assert (old.state, new.state) == (RequestState.RUNNING, RequestState.PREEMPTED)
    order = []
    while bench.scheduler.num_unfinished:
        order += [name for name in bench.step() if name not in order]

    assert order == ["old", "new", "late"]
    assert [len(request.output_token_ids) for request in (old, new, late)] == [6, 6, 2]
    assert bench.cache.stats().used == 0


def test_a_preempted_request_is_computed_again_with_what_it_had_said() -> None:
    bench = Bench(num_blocks=5)
    bench.add("old", 8, max_tokens=3)
    new = bench.add("new", 8, max_tokens=3)
    bench.step()
    bench.step()
    assert new.state is RequestState.PREEMPTED

    sizes = []
    while new.finish_reason is None and bench.scheduler.num_unfinished:
        sizes += [bench.step().get("new", 0)]

    # Its 8 prompt tokens and the one that it had sampled.
    assert next(size for size in sizes if size) == 9


def test_with_host_blocks_a_preempted_request_is_swapped_and_goes_on_where_it_was() -> None:
    bench = Bench(num_blocks=5, num_host_blocks=4)
    bench.add("old", 8, max_tokens=3)
    new = bench.add("new", 8, max_tokens=3)
    bench.step()
    bench.step()
    assert new.num_computed_tokens == 8

    sizes = []
    while bench.scheduler.num_unfinished:
        sizes += [bench.step().get("new", 0)]

    assert [size for size in sizes if size] == [1, 1]
    assert [swap.to_host for step in bench.swaps for swap in step.swaps] == [True] * 2 + [False] * 2


def test_nobody_is_preempted_while_a_sampled_token_is_still_on_the_device() -> None:
    bench = Bench(num_blocks=5, steps_in_flight=2)
    requests = [bench.add("old", 8), bench.add("new", 8)]
    step = bench.schedule()
    for request in requests:
        request.num_pending_tokens = 1

    assert bench.scheduler.schedule() is None

    for request in requests:
        request.num_pending_tokens = 0
    bench.answer(step)
    assert bench.step() == {"old": 1}


def test_a_request_that_does_not_fit_yet_waits_and_preempts_nobody() -> None:
    bench = Bench(num_blocks=6)
    bench.add("old", 12, max_tokens=8)
    bench.step()
    waiting = bench.add("waiting", 12, max_tokens=4)

    while waiting.state is RequestState.WAITING:
        bench.step()

    assert bench.cache.stats().preemptions == 0
    while bench.scheduler.num_unfinished:
        bench.step()
    assert bench.cache.stats().used == 0


def test_a_prompt_in_chunks_does_not_keep_the_others_from_decoding_several_tokens_at_once() -> None:
    bench = Bench(num_scheduler_steps=4, max_num_batched_tokens=4, fixed_shapes=True)
    bench.add("a", 2, max_tokens=16)
    bench.step()
    assert bench.step() == {"a": 4}

    bench.add("long", 8)
    assert [bench.step() for _ in range(3)] == [{"long": 4}, {"a": 4}, {"long": 4}]


def test_a_request_gets_no_more_tokens_at_once_than_it_may_still_say() -> None:
    bench = Bench(num_scheduler_steps=4)
    bench.add("a", 2, max_tokens=4)
    bench.add("b", 2, max_tokens=9)
    bench.step()

    assert [bench.step(), bench.step()] == [{"a": 3, "b": 4}, {"b": 4}]


def test_a_program_of_several_steps_is_not_used_for_one_token() -> None:
    bench = Bench(num_scheduler_steps=4)
    bench.add("a", 2, max_tokens=2)
    bench.step()

    step = bench.schedule()

    assert (step.num_decode_steps, step.num_tokens) == (1, 1)


def test_one_token_is_decoded_for_a_program_where_the_host_keeps_up() -> None:
    bench = Bench(num_scheduler_steps=4, steps_of_device=1)
    bench.add("a", 2, max_tokens=20)
    bench.add("b", 2, max_tokens=20)
    bench.step()

    assert [bench.step(), bench.step()] == [{"a": 1, "b": 1}] * 2


def test_every_request_ends_however_small_the_pool() -> None:
    bench = Bench(num_blocks=5, max_num_batched_tokens=6)
    requests = [bench.add(str(number), 1 + number * 5 % 9, max_tokens=1 + number * 3 % 7) for number in range(20)]

    for _ in range(500):
        if not bench.scheduler.num_unfinished:
            break
        assert bench.step()

    assert [len(request.output_token_ids) for request in requests] == [r.params.max_tokens for r in requests]
    bench.cache.audit()


def test_a_request_that_can_never_fit_is_refused_and_not_queued() -> None:
    bench = Bench(num_blocks=5)

    with pytest.raises(RequestTooLong, match="'big' needs 5 blocks"):
        bench.add("big", 12, max_tokens=8)

    assert bench.scheduler.num_unfinished == 0


def test_who_is_earlier_in_order_is_admitted_first_and_preempted_last() -> None:
    bench = Bench(num_blocks=5)
    late, early = bench.add("late", 8, max_tokens=6, order=2), bench.add("early", 8, max_tokens=6, order=1)

    assert [list(bench.step()) for _ in range(2)] == [["early", "late"], ["early"]]
    assert (early.state, late.state) == (RequestState.RUNNING, RequestState.PREEMPTED)


def test_many_prompts_do_not_keep_a_running_request_from_decoding_in_every_step() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("running", 2, max_tokens=20)
    bench.step()
    for number in range(9):
        bench.add(str(number), 11, max_tokens=1)

    while bench.scheduler.num_unfinished > 1:
        assert bench.step()["running"] == 1


def test_a_group_of_equal_prompts_waits_until_the_first_has_computed_what_they_share() -> None:
    bench = Bench(num_blocks=128, max_num_batched_tokens=48, enable_prefix_caching=True)
    group = [bench.add_prompt(name, tuple(range(70))) for name in "abc"]
    other = bench.add_prompt("other", tuple(range(100, 130)))

    # 68 of the 70 tokens fill blocks; who has another prompt goes ahead.
    assert [bench.step() for _ in range(3)] == [{"a": 48}, {"a": 22, "other": 26}, {"a": 1, "other": 4, "b": 2, "c": 2}]
    assert [request.num_cached_tokens for request in (*group, other)] == [0, 68, 68, 0]


def test_the_next_of_a_group_computes_the_prompt_when_the_first_is_gone() -> None:
    bench = Bench(num_blocks=128, max_num_batched_tokens=48, enable_prefix_caching=True)
    first, _ = (bench.add_prompt(name, tuple(range(70))) for name in "ab")
    bench.step()

    bench.scheduler.finish(first)

    assert bench.step() == {"b": 22}
    assert not bench.scheduler._first_of.keys() - bench.scheduler._prompts.values()


def test_samples_that_waited_for_room_share_what_another_request_computed_meanwhile() -> None:
    bench = Bench(num_blocks=5, max_num_batched_tokens=32, enable_prefix_caching=True)
    prompt = tuple(range(12))
    bench.add_prompt("before", prompt, max_tokens=4)
    samples = bench.add_samples(prompt[:9], max_tokens=3)

    # Its blocks were promised to the samples, which found no room for the rest.
    assert bench.step() == {"before": 12}
    while bench.scheduler.num_unfinished:
        bench.step()

    assert [sample.finish_reason or sample.end_reason for sample in samples] == ["length"] * 2
    assert bench.cache.stats().used == 0


def test_a_prompt_that_runs_takes_the_blocks_of_samples_that_wait_where_nothing_else_is_left() -> None:
    bench = Bench(num_blocks=9, max_num_seqs=1, max_num_batched_tokens=8)
    samples = bench.add_samples(tuple(range(100, 112)), max_tokens=1)
    assert [bench.step() for _ in range(3)] == [{"first": 8}, {"first": 3}, {"first": 1}]
    urgent = bench.add("urgent", 30, max_tokens=2, order=0)

    for _ in range(7):
        assert bench.step()

    assert [request.end_reason for request in (urgent, *samples)] == ["length"] * 3
    assert bench.cache.stats().used == 0


def test_a_prompt_goes_on_where_the_only_one_that_decoded_was_preempted_for_it() -> None:
    bench = Bench(num_blocks=5, max_num_batched_tokens=8)
    late = bench.add("late", 1, max_tokens=12, order=1)
    for _ in range(3):
        bench.step()
    urgent = bench.add("urgent", 9, max_tokens=2, order=0)

    while bench.scheduler.num_unfinished:
        assert bench.step()

    assert [len(request.output_token_ids) for request in (urgent, late)] == [2, 12]


def test_a_sample_that_cannot_go_beside_an_encoders_input_does_not_hold_its_blocks() -> None:
    bench = Bench(num_blocks=18, fixed_shapes=True, max_num_batched_tokens=64, enable_prefix_caching=True)
    samples = bench.add_samples((0,), max_tokens=1, encoded=tuple(range(40)))
    assert bench.step() == {"first": 40}
    urgent = bench.add_prompt("urgent", (0,), max_tokens=1, encoded=tuple(range(100, 132)))

    while bench.scheduler.num_unfinished:
        assert bench.step()

    assert [request.end_reason for request in (urgent, *samples)] == ["length"] * 3


@pytest.mark.parametrize("in_turns", [False, True])
def test_a_prompt_without_a_compiled_program_waits_while_others_decode(in_turns) -> None:
    bench = Bench(most_served=4, fixed_shapes=in_turns, enable_prefix_caching=True)
    bench.add("a", 3, max_tokens=4)
    assert bench.step() == {"a": 3}
    bench.add("b", 9)

    assert [bench.step(), bench.step()] == [{"a": 1}, {"a": 1}]
    bench.most_served = 16
    assert "b" in bench.step() | bench.step()
    assert bench.cache.stats().preemptions == 0


def test_a_prompt_without_a_compiled_program_runs_where_nothing_else_can() -> None:
    bench = Bench(most_served=4)
    bench.add("b", 9)

    assert bench.step() == {"b": 9}
