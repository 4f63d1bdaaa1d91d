"""Dropout by a counter: the generator, and the kernels in Triton's interpreter against the reference in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support import triton_ops
from tests.support.attention_cases import (
    AttentionCase,
    assert_matches_reference,
    dense_case,
    random_dense_case,
    with_dropout,
)
from tests.support.backward_cases import assert_gradients_match, backward_call, random_backward_case
from torch_core import ops
from torch_core.attention import dropout
from torch_core.attention.dropout import keep_mask
from torch_core.base.errors import InvalidInput


def test_the_generator_gives_the_words_of_its_authors() -> None:
    # kat_vectors of Random123: philox4x32 7, counter and key 0.
    zero = np.zeros(1, np.uint32)
    words = [int(word[0]) for word in dropout._philox(zero, zero, zero, zero)]
    assert words == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.97])
def test_the_share_of_weights_that_go_is_the_rate(rate: float, seed: int) -> None:
    seeds = np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, (4, 2)).astype(np.int32)
    kept = keep_mask(seeds, np.arange(200), (0, 300), rate)
    # Five standard deviations of 240,000 draws.
    assert abs(kept.mean() - (1 - rate)) < 5 * (rate * (1 - rate) / kept.size) ** 0.5


def test_a_mask_of_some_keys_is_that_part_of_the_mask_of_all() -> None:
    seeds = np.array([5, -7], np.int32)
    assert (
        keep_mask(seeds, np.arange(3, 9), (5, 21), 0.3) == keep_mask(seeds, np.arange(9), (0, 40), 0.3)[3:, 5:21]
    ).all()


def test_sequences_without_queries_or_keys_are_nothing_to_drop_from(seed: int) -> None:
    case = with_dropout(dense_case(seed, key_lens=[0, 4, 3], query_lens=[2, 0, 3]), 0.3)
    assert_matches_reference(case, *case.run(triton_ops.attention_with_lse))
    for run in (ops.run, triton_ops.run_triton):
        call = backward_call(case, run, with_d_lse=True)
        assert_gradients_match(call, run(call), f"case {seed}")


@pytest.mark.parametrize("seed", [3, 8, 16, 31])
def test_a_random_problem_is_as_exact_as_torch_in_its_dtype(seed: int) -> None:
    case = with_dropout(random_dense_case(seed, max_len=20), 0.3)
    assert_matches_reference(case, *case.run(triton_ops.attention_with_lse))


@pytest.mark.parametrize("seed", [3, 8, 16, 31])
def test_gradients_of_a_random_problem_are_as_exact_as_torch_in_its_dtype(seed: int) -> None:
    case = with_dropout(random_backward_case(seed, 14), 0.3)
    call = backward_call(case, ops.run, with_d_lse=bool(seed % 2))
    assert_gradients_match(call, triton_ops.run_triton(call), f"case {case.seed}")


def _long(seed: int) -> AttentionCase:
    case = dense_case(seed, key_lens=[150, 3], query_lens=[130, 5], num_heads=2, num_kv_heads=1, head_size=16)
    return with_dropout(case, 0.2)


@pytest.mark.nightly
def test_long_sequences_drop_alike_in_edge_and_body_tiles(seed: int) -> None:
    case = _long(seed)
    assert_matches_reference(case, *case.run(triton_ops.attention_with_lse))
    call = backward_call(case, ops.run, with_d_lse=False)
    assert_gradients_match(call, triton_ops.run_triton(call), f"case {seed}")


@pytest.mark.parametrize("seed", range(8))
def test_a_cpu_is_as_exact_as_torch_in_its_dtype(seed: int) -> None:
    case = with_dropout(random_dense_case(seed, max_len=60), 0.3)
    assert_matches_reference(case, *case.run(ops.attention_with_lse))


@pytest.mark.parametrize("seed", range(8))
def test_gradients_on_a_cpu_are_as_exact_as_torch_in_its_dtype(seed: int) -> None:
    call = backward_call(with_dropout(random_backward_case(seed, 60), 0.3), ops.run, with_d_lse=bool(seed % 2))
    assert_gradients_match(call, ops.run(call), f"case {seed}")


def test_a_sequence_drops_the_same_weights_beside_any_neighbours(seed: int) -> None:
    case = _long(seed)
    alone = case.run(ops.attention)[130:135]
    given = case.tensors()
    second = {name: given[name][130:] for name in ("query",)} | {name: given[name][150:] for name in ("key", "value")}
    starts = {"query_start_loc": torch.tensor([0, 5]).int(), "key_start_loc": torch.tensor([0, 3]).int()}
    changes: dict[str, Any] = {**second, **starts, "dropout_seeds": given["dropout_seeds"][1:]}
    again = case.run(ops.attention, **changes)
    assert torch.equal(again, alone)


@pytest.mark.parametrize(
    ("rate", "seeds", "text"),
    [
        (1.0, True, "dropout_rate is 1.0; it must be a static number, at least 0 and less than 1."),
        (-0.1, True, "dropout_rate is -0.1; it must be a static number, at least 0 and less than 1."),
        (0.5, False, "dropout_rate is 0.5 and dropout_seeds missing; a rate above 0 needs seeds, and seeds need one."),
        (0.0, True, "dropout_rate is 0.0 and dropout_seeds given; a rate above 0 needs seeds, and seeds need one."),
    ],
)
def test_a_rate_and_seeds_that_do_not_go_together_are_refused(rate: float, seeds: bool, text: str) -> None:
    case = dense_case(0, key_lens=[3], query_lens=[3])
    given: dict[str, Any] = {"dropout_seeds": torch.zeros(1, 6, 2, dtype=torch.int32)} if seeds else {}
    with pytest.raises(InvalidInput) as error:
        case.run(ops.attention, dropout_rate=rate, **given)
    assert str(error.value) == text
