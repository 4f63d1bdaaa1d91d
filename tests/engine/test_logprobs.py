"""The likeliest tokens of a row, by groups, and the values that a request is told."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.llm.engine import LLM, CompletionOutput, Engine, EngineConfig, SamplingParams
from jattn.llm.engine.device.sampler import likeliest
from jattn.llm.engine.request.outputs import RequestMetrics, SamplingMask
from jattn.llm.engine.request.request import Request
from jattn.llm.models import Decoder
from tests.engine.test_engine import compiled_forward, prompts_of
from torch_core.base.errors import InvalidInput


@pytest.mark.parametrize(("vocab", "count"), [(40, 3), (3000, 5), (3001, 1), (3000, 0), (5, 20)])
def test_the_likeliest_come_in_order_and_the_earlier_of_equals_first(vocab, count, seed) -> None:
    logits = np.random.default_rng(seed).integers(-9, 9, (3, vocab)).astype(np.float32)
    # Fewer finite values than are asked for, as a mask may leave them.
    logits[2, 2:] = -np.inf

    top, ids = jax.jit(likeliest, static_argnums=1)(jnp.asarray(logits), count)

    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    assert np.array_equal(top, np.take_along_axis(logits, expected, axis=-1))
    assert np.array_equal(np.asarray(ids)[2, :2], expected[2, :2])
    assert all(len(set(row)) == len(row) for row in np.asarray(ids).tolist())
    assert np.array_equal(np.take_along_axis(logits, np.asarray(ids), axis=-1), top)


def test_processed_log_probabilities_are_the_samplers_own_at_its_temperature(decoder: Decoder, seed: int) -> None:
    (prompt,) = prompts_of(seed, 9)
    config = EngineConfig(block_size=4, logprobs_mode="processed_logprobs", enable_return_sampling_mask=True)
    params = SamplingParams(temperature=0.7, top_k=3, max_tokens=5, ignore_eos=True, logprobs=0)
    (output,) = LLM(decoder, config=config).generate([prompt], params)[0].outputs

    assert output.logprobs is not None
    assert output.sampling_mask is not None
    whole = np.asarray([[*prompt, *output.token_ids]])
    logits = np.asarray(compiled_forward(decoder)(whole)[0], np.float64)[len(prompt) - 1 : -1]
    kept = logits >= np.sort(logits, axis=-1)[:, -3:-2]
    scores = np.where(kept, logits / 0.7, -np.inf)
    scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    found = [each[token].logprob for each, token in zip(output.logprobs, output.token_ids, strict=True)]
    np.testing.assert_allclose(found, scores[np.arange(5), output.token_ids], atol=1e-5)
    assert output.sampling_mask.token_ids == [np.flatnonzero(row).tolist() for row in kept]


def test_a_mask_is_refused_where_the_engine_records_none(decoder: Decoder) -> None:
    engine = Engine(decoder, EngineConfig(block_size=4))
    with pytest.raises(
        InvalidInput, match=r"^return_sampling_mask .* EngineConfig\(enable_return_sampling_mask=True\)"
    ):
        engine.add([1, 2], SamplingParams(return_sampling_mask=True))


def test_a_sample_without_tokens_has_no_mask_and_its_later_part_keeps_its_own() -> None:
    request = Request(
        "a", (1,), SamplingParams(), np.zeros(0, np.int32), frozenset(), RequestMetrics(0.0), keeps_mask=True
    )
    first, mask = request.completion((), None), SamplingMask(np.ones((1, 2), np.uint32))
    later = CompletionOutput("x", (1,), None, sampling_mask=mask)

    assert first.sampling_mask is None
    assert (first + later).sampling_mask is mask
    assert (later + first).sampling_mask is mask
    both = (later + later).sampling_mask
    assert both is not None
    assert both.bits.shape == (2, 2)
