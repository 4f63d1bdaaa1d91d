"""Layers with windows beside layers without: blocks behind a window return, and no token is another one."""

from __future__ import annotations

from typing import Any

import pytest

from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from tests.engine.conftest import alternating_decoder
from tests.engine.test_engine import GREEDY, prompts_of, run
from torch_core.base.errors import InvalidInput, RequestTooLong

# Few shapes, and one pool, so that tests share what they compile.
SIZES: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "fixed_shapes": True,
    "num_blocks": 26,
}
ONE_GROUP: dict[str, Any] = SIZES | {"disable_hybrid_kv_cache_manager": True, "num_blocks": None}


def engines(*windows: int | None, **changes: Any) -> tuple[Engine, Engine]:
    """The model's engine, and one that keeps all tokens for all layers."""
    model = alternating_decoder(*windows)
    return Engine(model, EngineConfig(**(SIZES | changes))), Engine(model, EngineConfig(**ONE_GROUP))


def most_used(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], int]:
    request, most = engine.add(prompt, params), 0
    while engine.num_unfinished:
        engine.step()
        most = max(most, engine.cache_stats().used)
    return request.output_token_ids, most


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_scheduler_steps": 1, "steps_in_flight": 1},
        {"speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        {"num_host_blocks": 24},
        pytest.param({"scrub_on_free": True}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_group_for_all_layers(changes, seed) -> None:
    grouped, one_group = engines(6, None, **changes)
    (shared,) = prompts_of(seed, 21)
    prompts = [*prompts_of(seed + 1, 30, 2), *(shared + tail for tail in prompts_of(seed + 2, 3, 6, 1))]

    first, again = run(grouped, prompts), run(grouped, prompts)

    assert first == again == run(one_group, prompts)
    stats = grouped.cache_stats()
    assert (stats.used, stats.deferred) == (0, 0)
    assert stats.hit_tokens > 0
    if "num_host_blocks" in changes:
        assert stats.swapped_in == stats.swapped_out > 0
    elif "speculative_config" not in changes:
        assert stats.preemptions > 0


def test_a_shared_prefix_is_attended_once_in_the_layers_that_see_all_of_it(seed) -> None:
    grouped, one_group = engines(
        6, None, fixed_shapes=False, enable_cascade_attention=True, num_blocks=60, num_scheduler_steps=1
    )
    (prompt,) = prompts_of(seed, 13)

    assert samples(grouped, prompt, seed) == samples(one_group, prompt, seed)
    assert any("shared prefixes" in name for name in grouped.programs)


@pytest.mark.nightly
def test_two_windows_and_none_are_three_groups_with_the_tokens_of_one(seed) -> None:
    grouped, one_group = engines(3, None, 9, num_blocks=40)
    prompts = prompts_of(seed, 30, 2, 13)

    assert run(grouped, prompts) == run(one_group, prompts)
    assert grouped.pool_plan.num_groups == 3


def test_a_long_sequence_keeps_a_window_of_blocks_for_layers_that_see_no_more(seed) -> None:
    grouped, one_group = engines(6, None, num_blocks=45)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    (prompt,) = prompts_of(seed, 100)

    tokens, most = most_used(grouped, prompt, params)
    tokens_of_one_group, most_of_one_group = most_used(one_group, prompt, params)

    assert tokens == tokens_of_one_group
    # 120 tokens are 30 blocks, of two layers each in one group. A layer with a window of 6 keeps that and what two
    # steps in flight write: 37 tokens, which are at most 11 blocks.
    assert (most_of_one_group, one_group.pool_plan.num_layers) == (30, 2)
    assert (most <= 30 + 11, grouped.pool_plan.num_layers) == (True, 1)


def samples(engine: Engine, prompt: list[int], seed: int) -> list[list[int]]:
    params = SamplingParams(n=3, temperature=0.9, max_tokens=9, seed=seed % 1000, ignore_eos=True)
    request = engine.add(prompt, params)
    while engine.num_unfinished:
        engine.step()
    return [sample.output_token_ids for sample in request.samples]


def test_n_samples_fork_the_blocks_of_every_group(seed) -> None:
    grouped, one_group = engines(6, None)
    (prompt,) = prompts_of(seed, 18)

    assert samples(grouped, prompt, seed) == samples(one_group, prompt, seed)
    assert grouped.cache_stats().forks == 2


def test_a_prefix_is_hit_though_blocks_behind_the_window_were_evicted(seed) -> None:
    grouped, _ = engines(6, None)
    first, second = prompts_of(seed, 20, 26)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    run(grouped, [first], params)
    # It takes what was released longest ago: the first blocks of the layer with the window.
    run(grouped, [second], params)
    before = grouped.cache_stats()

    run(grouped, [first], params)

    assert before.evictions > 0
    assert grouped.cache_stats().hit_tokens - before.hit_tokens == 16


def test_a_window_that_no_sequence_outgrows_makes_no_group() -> None:
    model = alternating_decoder(20, None)

    assert Engine(model, EngineConfig(**SIZES, max_model_len=20)).pool_plan.num_groups == 1
    assert Engine(model, EngineConfig(**SIZES, max_model_len=21)).pool_plan.num_groups == 2


def test_a_prompt_longer_than_the_pool_is_refused_with_the_blocks_of_all_groups() -> None:
    grouped, _ = engines(6, None)

    with pytest.raises(RequestTooLong) as error:
        grouped.add([1] * 100, GREEDY)

    assert str(error.value) == "the request needs 34 blocks (100 prompt + 12 new tokens); the pool can ever give 25."


def test_beside_a_draft_model_all_layers_are_one_group_of_what_any_of_them_sees() -> None:
    draft: dict[str, Any] = {"num_speculative_tokens": 2, "model": alternating_decoder(9)}
    engines = [
        Engine(alternating_decoder(*windows), EngineConfig(**SIZES, speculative_config=draft))
        for windows in ((6, None), (6, 3))
    ]

    kept = [engine._core._cache_config.layouts for engine in engines]

    assert [[layout.reach for layout in layouts] for layouts in kept] == [[None], [9]]


def test_the_plan_says_that_groups_share_the_pool() -> None:
    grouped, _ = engines(6, None)

    assert str(grouped.pool_plan) == (
        "26 blocks of 4 tokens in 1 layers of each of 2 groups: room for 48 tokens, 0.000 GiB"
    )


def test_a_setting_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidInput) as error:
        EngineConfig(disable_hybrid_kv_cache_manager=1)  # type: ignore[arg-type]

    assert str(error.value) == "disable_hybrid_kv_cache_manager is 1; it must be True or False."
