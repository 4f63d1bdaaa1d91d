"""Layers with other heads in other cache groups: blocks of as many bytes hold more tokens of the narrower layers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from jattn.llm.engine import Engine, EngineConfig
from jattn.llm.models import Decoder, FullAttentionConfig
from tests.engine.conftest import tiny_decoder
from tests.engine.test_cache_groups import ONE_GROUP, SIZES, samples
from tests.engine.test_engine import prompts_of, run
from tests.support.tiny_models import dense_logits

#: In tiny decoders two key/value heads of 8 elements; here, too, in layers with a window.
NARROW = FullAttentionConfig(head_dim=8, num_key_value_heads=1, attention_k_eq_v=True)
WIDE = FullAttentionConfig(head_dim=32, num_key_value_heads=2)
UNEVEN = FullAttentionConfig(head_dim=12, num_key_value_heads=2)


@functools.cache
def decoder(full: FullAttentionConfig) -> Decoder:
    return tiny_decoder(
        num_hidden_layers=2, layer_windows=(6, None), full_attention=full, value_norm=True, layer_scalar=True
    )


def engine(full: FullAttentionConfig, sizes: dict[str, Any] = SIZES, **changes: Any) -> Engine:
    return Engine(decoder(full), EngineConfig(**(sizes | changes)))


def test_tokens_from_blocks_of_two_sizes_are_those_of_whole_sequences(seed) -> None:
    found, (prompt,) = engine(NARROW), prompts_of(seed, 21)

    first, again = (run(found, [prompt])[0] for _ in range(2))

    assert first == again
    assert found.cache_stats().hit_tokens == 16
    tokens = [*prompt, *first]
    assert (
        dense_logits(decoder(NARROW), np.array(tokens), padded_to=40)[20:-1].argmax(-1).tolist()[: len(first)] == first
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("full", "changes"),
    [
        (NARROW, {}),
        (WIDE, {}),
        (NARROW, {"num_host_blocks": 24}),
        (WIDE, {"speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_min": 1}}),
        (NARROW, {"scrub_on_free": True}),
    ],
    ids=["narrow", "wide", "swapped", "speculative", "scrubbed"],
)
def test_tokens_are_those_of_layers_with_arrays_of_their_own(full, changes, seed) -> None:
    grouped, apart = engine(full, **changes), engine(full, ONE_GROUP)
    (shared,) = prompts_of(seed, 21)
    prompts = [*prompts_of(seed + 1, 30, 2), *(shared + tail for tail in prompts_of(seed + 2, 3, 6, 1))]

    first, again = run(grouped, prompts), run(grouped, prompts)

    assert first == again == run(apart, prompts)
    assert samples(grouped, prompts[0], seed) == samples(apart, prompts[0], seed)
    stats = grouped.cache_stats()
    assert (stats.used, stats.deferred, stats.forks) == (0, 0, 2)
    assert stats.hit_tokens > 0
    if "num_host_blocks" in changes:
        assert stats.swapped_in == stats.swapped_out > 0


@pytest.mark.parametrize(
    ("full", "block_sizes", "arrays"),
    [
        (NARROW, [8, 4], [(26, 2, 4, 2, 8)]),
        (WIDE, [4, 16], [(26, 2, 4, 2, 32)]),
        (UNEVEN, [4], [(26, 2, 4, 2, 8), (26, 2, 4, 2, 12)]),
    ],
    ids=["narrow", "wide", "uneven"],
)
def test_blocks_have_as_many_bytes_in_every_group_or_layers_have_their_own(full, block_sizes, arrays) -> None:
    found = engine(full)

    assert [layout.block_size for layout in found._core._cache_config.layouts] == block_sizes
    assert [shape for shape, _ in found._core.device.pool.shapes] == arrays


def test_the_plan_counts_the_tokens_that_all_groups_have_room_for() -> None:
    # 25 blocks: a block of the layer with the window for 4 tokens, and one of the other layer for 8.
    assert engine(NARROW).pool_plan.num_tokens == 64
