"""Prefixes that requests share are attended once while they decode: the same tokens, in the programs for it."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from jattn.llm.engine.device.buckets import Cascade
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import prompts_of, run
from tests.engine.test_weights import other_decoder
from torch_core.base.errors import InvalidInput
from torch_core.cache import group_layers

SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
PARAMS = SamplingParams(temperature=0.8, max_tokens=9, ignore_eos=True)


def engine_of(model: Any = None, **changes: Any) -> Engine:
    options: dict[str, Any] = SIZES | {"enable_cascade_attention": True} | changes
    return Engine(model or other_decoder(), EngineConfig(**options))


@pytest.mark.nightly
def test_groups_say_the_same_with_their_prefix_attended_once(seed) -> None:
    shared, second = prompts_of(seed, 70, 66)
    prompts = [shared] * 4 + [second] * 2 + prompts_of(seed + 1, 5)
    engine = engine_of(num_scheduler_steps=2)

    said = run(engine, prompts, PARAMS)

    assert said == run(engine_of(num_scheduler_steps=2, enable_cascade_attention=False), prompts, PARAMS)
    assert len({tuple(tokens) for tokens in said[:4]}) > 1
    assert any("shared prefixes" in name for name in engine.programs)
    assert engine.cache_stats().used == 0


def test_requests_that_share_nothing_run_the_plain_program(decoder, seed) -> None:
    engine = engine_of(decoder, max_num_seqs=7)

    run(engine, prompts_of(seed, 9, 20, 3), PARAMS)

    assert not any("shared prefixes" in name for name in engine.programs)


@pytest.mark.parametrize(
    ("model_changes", "changes"),
    [
        ({}, {"enable_cascade_attention": False}),
        ({}, {"fixed_shapes": True}),
        ({}, {"enable_prefix_caching": False}),
        ({}, {"max_num_seqs": 1}),
        ({"sliding_window": 8}, {}),
        ({"position_embedding": "alibi"}, {}),
    ],
    ids=["off", "batch invariant", "no prefix cache", "one sequence", "window", "ALiBi"],
)
def test_where_it_cannot_serve_no_program_is_made_for_it(model_changes, changes) -> None:
    model = tiny_decoder(**model_changes)
    config = EngineConfig(**(SIZES | {"enable_cascade_attention": True} | changes))

    assert Cascade.of(model, config, group_layers(model.paged_spec.windows)) is None


def test_by_itself_it_is_chosen_on_gpus_alone_and_elsewhere_by_option(decoder) -> None:
    groups = group_layers(decoder.paged_spec.windows)

    chosen = Cascade.of(decoder, EngineConfig(**SIZES), groups)

    assert (chosen is not None) == (jax.default_backend() == "gpu")
    assert Cascade.of(decoder, EngineConfig(**SIZES, enable_cascade_attention=True), groups) is not None


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="enable_cascade_attention is 'yes'; it must be True or False"):
        EngineConfig(enable_cascade_attention="yes")  # type: ignore[arg-type]
