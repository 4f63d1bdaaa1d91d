"""Blocks of requests that wait: what was computed for them is kept, a prefix that they only found is not."""

from __future__ import annotations

from jattn.llm.engine.request.request import Request
from tests.engine.test_scheduler import Bench
from torch_core.cache import StateConfig


def swapped_beside_decoding(bench: Bench, order: int = 10) -> Request:
    """Leaves "a", of order 1, to decode, and a request of 10 computed tokens in host memory."""
    request = bench.add("swapped", 9, order=order)
    bench.step()
    bench.add("a", 3, max_tokens=20, order=1)
    bench.step()
    bench.scheduler._preempt(request)
    return request


def test_a_request_back_from_the_host_that_waits_for_a_program_is_not_computed_again() -> None:
    bench = Bench(num_host_blocks=32, most_served=4)
    swapped_beside_decoding(bench)
    late = bench.add("late", 9, order=20)
    assert bench.step() == {"a": 1}

    bench.scheduler.finish(late)

    assert bench.step() == {"a": 1, "swapped": 1}


def test_a_request_back_from_the_host_that_finds_no_block_is_not_computed_again() -> None:
    # "new" needs two blocks to come back and one more to go on.
    bench = Bench(num_blocks=6, num_host_blocks=4)
    bench.add("old", 8, max_tokens=5)
    bench.add("new", 8, max_tokens=5)

    sizes = []
    while bench.scheduler.num_unfinished:
        sizes += [bench.step().get("new", 0)]

    assert [size for size in sizes if size] == [8, 1, 1, 1, 1]
    assert len(bench.swaps) == 2, "out once, and back once"


def test_a_sample_that_finds_no_block_keeps_its_prompt() -> None:
    bench = Bench(num_blocks=6)
    bench.add("other", 4, max_tokens=2)
    bench.add_samples(tuple(range(100, 109)), 3)
    assert [bench.step(), bench.step()] == [{"other": 4, "first": 8}, {"other": 1, "first": 1}]

    assert bench.step() == {"first": 1, "second": 1}


def test_a_sample_that_was_resumed_and_waits_holds_no_prefix() -> None:
    bench = Bench(most_served=4, enable_prefix_caching=True)
    request = bench.add_samples(tuple(range(100, 108)), 4)[-1]
    bench.step()
    bench.step()
    bench.scheduler.finish(request.samples[0])
    bench.add("a", 3, max_tokens=20, order=0)
    bench.step()
    bench.scheduler._preempt(request)
    bench.add("late", 9, order=20)

    assert bench.step() == {"a": 1}
    assert bench.cache.computed_blocks("second") == (0, ())


def test_a_waiting_request_gives_its_blocks_before_an_earlier_one_is_preempted() -> None:
    bench = Bench(num_blocks=9, num_host_blocks=8, most_served=4)
    request = swapped_beside_decoding(bench)
    bench.add("late", 4, max_tokens=20, order=2)
    bench.most_served = 1
    assert bench.step() == {"a": 1}
    assert bench.cache.computed_blocks("swapped")[0] == 10, "it waits for a program"

    while len(bench.swaps) < 3:
        assert bench.step() == {"a": 1}

    assert request.num_computed_tokens == 10
    assert [swap.to_host for step in bench.swaps for swap in step.swaps] == [True] * 3 + [False] * 3 + [True] * 3


def test_prompts_that_stop_at_snapshots_and_find_no_more_blocks_run_one_after_the_other() -> None:
    bench = Bench(num_blocks=5, enable_prefix_caching=True, states=StateConfig(num_slots=8, snapshot_blocks=1))
    requests = bench.add("a", 11, max_tokens=1), bench.add("b", 11, max_tokens=1)
    assert bench.step() == {"a": 8, "b": 8}

    while bench.scheduler.num_unfinished:
        assert bench.step()

    assert [request.end_reason for request in requests] == ["length"] * 2
