"""Steps with prompts that are cut where padding would cost more than a second step."""

from __future__ import annotations

import pytest

from jattn.llm.engine import scheduler
from tests.engine.test_scheduler import Bench


@pytest.mark.parametrize(
    ("prompts", "steps"),
    [
        # One step of 1,536 would cost as much as the two, and end "b" later.
        ((500, 600), [{"a": 500, "b": 600}]),
        # The rest of 52 rides with a step of the cheapest kind.
        ((1000, 1100), [{"a": 1000, "b": 1048}, {"a": 1, "b": 52}]),
        ((1000, 1000), [{"a": 1000, "b": 1000}]),
        # "c" waits, and holds no blocks meanwhile.
        ((1000, 1048, 300), [{"a": 1000, "b": 1048}, {"a": 1, "b": 1, "c": 300}]),
    ],
)
def test_a_rest_that_padding_would_pay_dearly_runs_in_a_second_step(prompts, steps, monkeypatch) -> None:
    # Not because they are the first of many.
    monkeypatch.setattr(scheduler, "FIRST_TOKENS", 4096)
    sizes = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
    bench = Bench(num_blocks=1200, max_num_batched_tokens=4096, prompt_sizes=sizes)
    for name, length in zip("abc", prompts, strict=False):
        bench.add(name, length)

    assert [bench.step() for _ in steps] == steps


def test_where_programs_have_no_sizes_for_prompts_the_first_step_takes_all_of_them(monkeypatch) -> None:
    monkeypatch.setattr(scheduler, "FIRST_TOKENS", 8)
    bench = Bench(max_num_batched_tokens=64)
    for name in "abc":
        bench.add(name, 8)

    assert bench.step() == {"a": 8, "b": 8, "c": 8}


def test_a_sample_that_waits_for_the_second_step_keeps_its_prompt() -> None:
    bench = Bench(num_blocks=1200, max_num_batched_tokens=4096, prompt_sizes=(256, 512, 1024, 2048, 3072, 4096))
    bench.add_samples(tuple(range(100)), 4)
    assert bench.step() == {"first": 99}
    bench.add("long", 2047, order=0)

    assert [bench.step(), bench.step()] == [{"first": 1, "long": 2047}, {"long": 1, "first": 1, "second": 1}]


def test_a_request_that_came_back_from_the_host_is_not_computed_again_for_less_padding() -> None:
    sizes = (256, 512, 1024, 2048, 3072, 4096)
    bench = Bench(num_blocks=1200, num_host_blocks=600, max_num_batched_tokens=4096, prompt_sizes=sizes)
    request = bench.add("swapped", 400, order=5)
    bench.step()
    bench.step()
    bench.scheduler._preempt(request)
    bench.add("first", 1000, order=1)
    bench.add("second", 1048, order=2)

    assert [bench.step().get("swapped") for _ in range(2)] == [None, 1]


@pytest.mark.parametrize(("num_decoding", "prompt"), [(48, 600), (250, 518)])
def test_the_more_rows_decode_the_less_padding_they_wait_for(num_decoding: int, prompt: int) -> None:
    sizes = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    bench = Bench(num_blocks=1200, max_num_seqs=512, max_num_batched_tokens=2048, prompt_sizes=sizes)
    for index in range(num_decoding):
        bench.add(f"row {index}", 1, max_tokens=9)
    bench.step()
    bench.add("long", 600)

    assert bench.step()["long"] == prompt


def test_the_first_of_many_prompts_do_not_wait_for_a_full_step() -> None:
    sizes = (64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192)
    bench = Bench(num_blocks=8000, max_num_seqs=64, max_num_batched_tokens=8192, prompt_sizes=sizes)
    for index in range(28):
        bench.add(str(index), 500)

    def num_prompts() -> int:
        return sum(count > 1 for count in bench.step().values())

    assert [num_prompts() for _ in range(4)] == [4, 8, 16, 0]
    for index in range(28, 36):
        bench.add(str(index), 500)
    assert num_prompts() == 4, "a later burst begins again"


def test_a_long_prompt_is_not_cut_for_others_that_came_with_it() -> None:
    bench = Bench(num_blocks=8000, max_num_batched_tokens=8192, prompt_sizes=(1024, 2048, 4096, 8192))
    bench.add("long", 8000)
    bench.add("short", 100)

    assert [bench.step(), bench.step()] == [{"long": 8000}, {"long": 1, "short": 100}]
