"""Every step that a scheduler can make has a bucket among those that `warmup` compiles."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn.llm.engine import EngineConfig, SamplingParams, SpeculativeConfig
from jattn.llm.engine.device.buckets import Bucket, StepBuckets, bucket_sizes
from jattn.llm.engine.device.placement import Placement
from jattn.llm.engine.device.runner import ModelRunner
from jattn.llm.engine.options.params import SamplingKind
from jattn.llm.engine.request.outputs import RequestMetrics
from jattn.llm.engine.request.request import Request
from jattn.llm.engine.scheduler import ScheduledRow, ScheduledStep
from jattn.pool import KVPool
from tests.engine.conftest import tiny_decoder
from torch_core.cache import CommittedStep, group_layers

SIZES: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 300,
    "enable_cascade_attention": False,
}
KINDS = ((0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 4, 1.0))


@functools.cache
def runner(
    ragged: bool, invariant: bool, guesses: int, max_blocks: int = 75, max_num_seqs: int = 24
) -> tuple[ModelRunner, frozenset[Bucket]]:
    model = tiny_decoder()
    pool = KVPool(model.paged_spec.cache_spec(4), num_layers=2, num_blocks=2)
    speculative = SpeculativeConfig(num_speculative_tokens=guesses) if guesses else None
    sizes: dict[str, Any] = SIZES | {"max_num_seqs": max_num_seqs}
    config = EngineConfig(**sizes, fixed_shapes=invariant, speculative_config=speculative)
    layers = group_layers(model.paged_spec.windows)
    made = ModelRunner(model, pool, config, Placement(), layers, max_blocks=max_blocks, ragged=ragged)
    return made, frozenset(made.buckets.all())


def row_of(num_new: int, kind: int, num_samples: int, guesses: int = 0) -> ScheduledRow:
    temperature, top_k, top_p = KINDS[kind]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    request = Request("r", (1,), params, np.zeros(0, np.int32), frozenset(), RequestMetrics(0.0))
    return ScheduledRow(request, 0, num_new, num_samples, (1,) * guesses)


def test_an_engine_that_reports_no_likeliest_tokens_has_its_programs() -> None:
    model = tiny_decoder()
    pool = KVPool(model.paged_spec.cache_spec(4), num_layers=2, num_blocks=2)
    layers = group_layers(model.paged_spec.windows)
    config = EngineConfig(**SIZES, max_logprobs=0)
    made = ModelRunner(model, pool, config, Placement(), layers, max_blocks=8, ragged=True)

    made.programs._lowered(made.buckets.decode(1, made.buckets.samplers[SamplingKind.FULL], 1))


@pytest.mark.parametrize("guesses", [0, 3])
@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize(("max_blocks", "max_num_seqs"), [(75, 24), (8, 24), (75, 3)])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_every_step_finds_its_program_compiled(max_blocks, max_num_seqs, invariant, ragged, guesses, data) -> None:
    made, compiled = runner(ragged, invariant, guesses, max_blocks, max_num_seqs)
    kinds = st.integers(0, 2)
    num_steps = 1
    if data.draw(st.booleans(), label="decoding alone"):
        num_steps = 1 if guesses else data.draw(st.sampled_from([1, 4]))
        guessed = data.draw(st.lists(st.integers(0, guesses), min_size=1, max_size=max_num_seqs))
        rows = [row_of(num_steps + some, data.draw(kinds), num_steps + some, some) for some in guessed]
    else:
        others = st.integers(1, min(300 // max_num_seqs, 4 * max_blocks))
        lengths = data.draw(st.lists(others, max_size=max_num_seqs - 1))
        # Where rows are padded the scheduler keeps them within the budget.
        most = 300 - sum(lengths) if ragged or invariant else max(300 // (len(lengths) + 1), 1)
        lengths.append(data.draw(st.integers(1, min(most, 4 * max_blocks))))
        rows = [row_of(length, data.draw(kinds), data.draw(st.integers(0, 1))) for length in lengths]

    bucket = made.buckets.of(ScheduledStep(tuple(rows), CommittedStep(step_id=0), num_steps))[0]

    assert bucket in compiled
    assert bucket.num_seqs >= len(rows)
    assert bucket.num_tokens >= sum(row.num_new_tokens for row in rows)
    assert bucket.max_query_len >= max(row.num_new_tokens for row in rows) or num_steps > 1


@pytest.mark.parametrize(("ragged", "programs"), [(True, 24), (False, 60)])
def test_there_are_few_programs(ragged, programs) -> None:
    assert _without_greedy(runner(ragged, False, 0)[1]) == programs


def step_buckets(**sizes: Any) -> StepBuckets:
    config = EngineConfig(max_num_batched_tokens=512, **sizes)
    options: dict[str, Any] = {"longest_query": None, "num_encoder_blocks": 0}
    return StepBuckets(config, None, num_logprobs=0, max_blocks=8, num_groups=1, **options)


def test_a_step_with_prompts_has_room_for_no_more_rows_than_tokens() -> None:
    rows = {bucket.num_tokens: bucket.num_seqs for bucket in step_buckets(max_num_seqs=256).all() if not bucket.decodes}
    assert rows == {64: 64, 128: 128, 256: 256, 384: 256, 512: 256}


def test_prompts_of_greedy_requests_draw_no_noise_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    buckets = step_buckets()
    for kind in (SamplingKind.GREEDY, SamplingKind.PLAIN):
        rows = row_of(1, 0, 1), row_of(20, 0, 1)
        rows[0].request.sampling_kind, rows[1].request.sampling_kind = SamplingKind.GREEDY, kind
        bucket = buckets.of(ScheduledStep(rows, CommittedStep(step_id=0)))[0]
        assert bucket.sampler.kind is kind
        assert bucket in set(buckets.all())


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (256, (1, 4, 16, 32, 64, 128, 256)),
        (464, (1, 4, 16, 32, 64, 128, 256, 384, 464)),
    ],
)
def test_steps_of_many_sequences_have_a_size_between_two_powers_of_two(most, sizes) -> None:
    config = EngineConfig(max_num_seqs=most, max_num_batched_tokens=512)
    assert bucket_sizes(config, by_tokens=False)[0].sizes == sizes


@pytest.mark.parametrize(("by_tokens", "between"), [(True, (384, 768)), (False, ())])
def test_steps_that_cost_by_their_tokens_have_sizes_between_two_powers_of_two(by_tokens, between) -> None:
    config = EngineConfig(max_num_batched_tokens=1024)
    assert bucket_sizes(config, by_tokens=by_tokens)[1].sizes == tuple(sorted((64, 128, 256, 512, 1024, *between)))


@pytest.mark.parametrize(("max_blocks", "max_num_seqs", "programs"), [(8, 24, 34), (75, 3, 40)])
def test_no_program_is_for_longer_or_more_prompts_than_can_be(max_blocks, max_num_seqs, programs) -> None:
    _, compiled = runner(False, False, 0, max_blocks, max_num_seqs)

    longest = {bucket.max_query_len for bucket in compiled if bucket.num_seqs > 1}
    assert max(longest) == min(300, 4 * max_blocks)
    assert _without_greedy(compiled) == programs


def _without_greedy(buckets: frozenset[Bucket]) -> int:
    """Counts those that every device has: on a GPU greedy steps have programs of their own."""
    return sum(bucket.sampler.kind is not SamplingKind.GREEDY for bucket in buckets)
