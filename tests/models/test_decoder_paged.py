"""The paged forward pass equals the dense one, whatever the steps, the batch mates and the blocks are."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jattn.llm.models.decoder_layer import DecoderLayer
from tests.support.tiny_models import PagedRun, dense_logits, paged_step, tiny_config, tiny_model

IMPLEMENTATIONS = ["xla", "torch"]


def random_tokens(seed, *lengths):
    random = np.random.default_rng(seed)
    return [random.integers(0, 257, length).astype(np.int32) for length in lengths]


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=64 * 2.0**-23 * np.abs(expected).max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_prefill_of_unequal_sequences_equals_the_dense_forward(implementation, seed):
    model = tiny_model(tiny_config(), seed, implementation)
    sequences = random_tokens(seed, 19, 1, 8)
    for found, tokens in zip(PagedRun(model).step(sequences), sequences, strict=True):
        assert_close(found, dense_logits(model, tokens))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunks_and_single_tokens_equal_the_dense_forward(implementation, seed):
    model = tiny_model(tiny_config(), seed, implementation)
    sequences = random_tokens(seed, 13, 17)
    run, found = PagedRun(model), [[], []]
    for cuts in (((0, 9), (0, 1)), ((9, 10), (1, 14)), ((10, 11), (14, 15)), ((11, 13), (15, 17))):
        step = run.step([tokens[start:end] for tokens, (start, end) in zip(sequences, cuts, strict=True)])
        for rows, logits in zip(found, step, strict=True):
            rows.append(logits)
    for rows, tokens in zip(found, sequences, strict=True):
        assert_close(np.concatenate(rows), dense_logits(model, tokens))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sliding_window_is_the_same_in_both_paths(implementation, seed):
    model = tiny_model(tiny_config(sliding_window=5, num_hidden_layers=1), seed, implementation)
    (tokens,) = random_tokens(seed, 20)
    run = PagedRun(model)
    found = np.concatenate([run.step([tokens[:16]])[0], *(run.step([tokens[i : i + 1]])[0] for i in range(16, 20))])
    assert_close(found, dense_logits(model, tokens))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_order_of_blocks_changes_no_bit(implementation, seed):
    model = tiny_model(tiny_config(), seed, implementation)
    sequences = random_tokens(seed, 19, 11)
    order = np.random.default_rng(seed).permutation(12)
    for found, expected in zip(
        PagedRun(model, order=order).step(sequences), PagedRun(model).step(sequences), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_logits_do_not_depend_on_batch_mates_to_the_bit(implementation, seed):
    """Same padded shapes, other neighbours: what the engine's buckets guarantee."""
    model = tiny_model(tiny_config(), seed, implementation)
    sequences = random_tokens(seed, 9, 6, 3, 14)

    def decode(chosen):
        run = PagedRun(model)
        run.step([sequences[index][:-1] for index in chosen])
        return run.step([sequences[index][-1:] for index in chosen], num_tokens=4, max_query_len=1)

    together = decode([0, 1, 2, 3])
    np.testing.assert_array_equal(decode([0])[0], together[0])
    np.testing.assert_array_equal(decode([2, 0])[1], together[0])


def test_a_step_changes_no_attribute_of_the_model(seed):
    model = tiny_model(tiny_config(num_hidden_layers=1), seed)
    before = nnx.split(model)[0]
    jax.eval_shape(model, *PagedRun(model, 1, 8).arguments(random_tokens(seed, 5), 8, None))
    assert nnx.split(model)[0] == before


@pytest.mark.parametrize(
    ("changes", "traced"),
    [({}, 1), ({"layer_windows": (None, 5, 5, None, 5)}, 2), ({"norm_placement": "after"}, 2)],
    ids=["one kind", "with windows between", "the last before a norm that no other has"],
)
def test_a_program_traces_layers_that_are_alike_once(changes, traced, seed, monkeypatch):
    model = tiny_model(tiny_config(num_hidden_layers=5, **changes), seed)
    called, calls = DecoderLayer.__call__, []
    monkeypatch.setattr(
        DecoderLayer, "__call__", lambda self, *rest, **named: calls.append(self) or called(self, *rest, **named)
    )
    jax.eval_shape(model, *PagedRun(model, 1, 8).arguments(random_tokens(seed, 5), 8, None))
    assert len(calls) == traced


def test_outside_a_program_each_layer_sees_values(seed, monkeypatch):
    model = tiny_model(tiny_config(num_hidden_layers=3), seed)
    called, seen = DecoderLayer.__call__, []

    def look(self, x, normed, angles, kv_cache, metadata, following, **options):
        seen.append(metadata.seq_lens.tolist())
        return called(self, x, normed, angles, kv_cache, metadata, following, **options)

    monkeypatch.setattr(DecoderLayer, "__call__", look)
    model(*PagedRun(model, 1, 8).arguments(random_tokens(seed, 5), 8, None))
    assert seen == [[5]] * 3


def test_a_donated_cache_is_updated_in_place(seed):
    run = PagedRun(tiny_model(tiny_config(num_hidden_layers=1), seed), 1, 8)
    arguments = run.arguments(random_tokens(seed, 4), 8, None)
    undonated: Any = paged_step
    step = jax.jit(undonated.__wrapped__, static_argnums=0, donate_argnums=4)
    compiled = step.lower(run.graph, run.state, *arguments).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(cache.nbytes for cache in run.caches)
