"""What the torch core can do, JAX can do: every option of a call, against the reference, by each implementation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from jattn import ops
from tests.ops.runner import run_case
from tests.support import reference
from tests.support.attention_cases import (
    AttentionCase,
    assert_as_exact,
    assert_matches_reference,
    dense_case,
    paged_case,
)
from torch_core.base.specs import AttentionSpec

each_implementation = pytest.mark.parametrize(
    "implementation", ["xla", "torch", pytest.param("triton", marks=pytest.mark.gpu)]
)
WINDOW = AttentionSpec(scale=0.2, window_left=9, attention_chunk=16)
BIDIRECTIONAL = AttentionSpec(scale=32**-0.5, causal=False)


def _pair(case: AttentionCase, value_head_size: int) -> AttentionCase:
    cache = case.operands.pop("kv_cache")
    operands = {**case.operands}
    query = operands.pop("query")
    pair: Any = (np.ascontiguousarray(cache[:, 0]), np.ascontiguousarray(cache[:, 1, ..., :value_head_size]))
    case.operands.clear()
    case.operands.update({"query": query, "kv_cache": pair, **operands})
    return case


def _ranges(*ranges: list[list[int]]) -> np.ndarray:
    return np.array(ranges, np.int32)


def _bias(size: int) -> np.ndarray:
    bias = np.random.default_rng(3).standard_normal((size, size)).astype(np.float32)
    bias[np.triu_indices(size, 1)] = -np.inf
    return bias


def _by_distance(furthest: int) -> np.ndarray:
    return np.random.default_rng(4).standard_normal((6, 2 * furthest + 1)).astype(np.float32)


CASES = {
    "seq_causal": lambda: paged_case(
        1, seq_lens=[30, 9], query_lens=[5, 4], seq_causal=np.array([True, False]), padding_tokens=2
    ),
    "mm_prefix_range": lambda: paged_case(
        2, seq_lens=[40, 9], query_lens=[20, 4], mm_prefix_range=_ranges([[22, 27], [0, 0]], [[5, 8], [6, 6]])
    ),
    "mm_prefix_range beyond a window": lambda: paged_case(
        3, seq_lens=[300, 9], query_lens=[20, 4], spec=WINDOW, mm_prefix_range=_ranges([[2, 290]], [[0, 0]])
    ),
    "qq_bias": lambda: paged_case(4, seq_lens=[30, 9, 3], query_lens=[5, 4, 3], qq_bias=_bias(6)),
    "qq_bias in a window": lambda: paged_case(5, seq_lens=[200, 9], query_lens=[5, 4], spec=WINDOW, qq_bias=_bias(5)),
    "relative_bias": lambda: paged_case(10, seq_lens=[90, 9, 1], query_lens=[5, 1, 1], relative_bias=_by_distance(7)),
    "relative_bias beside ALiBi in a window": lambda: paged_case(
        11, seq_lens=[200, 9], query_lens=[1, 1], spec=WINDOW, relative_bias=_by_distance(0),
        alibi_slopes=np.linspace(0.1, 0.5, 6, dtype=np.float32),
    ),
    "dense relative_bias": lambda: dense_case(
        12, key_lens=[30, 9], query_lens=[5, 12], spec=BIDIRECTIONAL, relative_bias=_by_distance(16)
    ),
    "fp8 query": lambda: paged_case(
        6, seq_lens=[30, 9], query_lens=[5, 1], dtype="float8_e4m3fn", q_scale=1.5, k_scale=0.5, v_scale=0.25
    ),
    "dense seq_causal": lambda: dense_case(
        7, key_lens=[30, 9], query_lens=[5, 9], seq_causal=np.array([False, True])
    ),
    "dense qq_bias": lambda: dense_case(8, key_lens=[30, 9], query_lens=[5, 4], qq_bias=_bias(5)),
    "dense mm_prefix_range": lambda: dense_case(
        9, key_lens=[30, 9], query_lens=[15, 9], mm_prefix_range=_ranges([[16, 27]], [[2, 5]])
    ),
}  # fmt: skip


@each_implementation
@pytest.mark.parametrize("name", CASES)
def test_an_option_of_the_core_is_served_as_the_reference_says(name: str, implementation: str) -> None:
    case = CASES[name]()
    assert_matches_reference(case, *run_case(case, implementation))


@each_implementation
def test_a_chunk_size_that_is_asked_for_keeps_the_result(implementation: str) -> None:
    case = paged_case(10, seq_lens=[300, 9], query_lens=[1, 1])
    assert_matches_reference(case, torch.from_numpy(_attend(case, implementation, kv_chunk_size=128)))


@each_implementation
def test_a_pair_of_caches_with_smaller_values_is_served(implementation: str) -> None:
    case = _pair(paged_case(11, seq_lens=[30, 9], query_lens=[5, 1]), 24)
    arrays: dict[str, Any] = {name: x for name, x in case.operands.items() if name != "kv_cache"}
    cache = tuple(case.operands["kv_cache"])
    limits: dict[str, Any] = case.limits
    found, lse = ops.paged_attention_with_lse(
        kv_cache=cache, **arrays, scale=case.spec.scale, **limits, implementation=implementation
    )
    tensors = tuple(torch.from_numpy(x) for x in cache)
    exact = case.run(_reference, kv_cache=tensors, compute_dtype=torch.float64)
    same = case.run(_reference, kv_cache=tensors, compute_dtype=torch.float32)
    assert found.shape[-1] == 24
    assert_as_exact(torch.from_numpy(np.array(found)), exact[0], same[0], torch.float32)
    assert_as_exact(torch.from_numpy(np.array(lse)), exact[1], same[1], torch.float32)


@each_implementation
def test_an_fp8_output_holds_the_result_over_its_scale(implementation: str) -> None:
    case = paged_case(12, seq_lens=[30, 9], query_lens=[5, 1])
    plain = _attend(case, implementation)
    stored = _attend(case, implementation, out_dtype=ml_dtypes.float8_e4m3fn, out_scale=0.02)
    assert stored.dtype == ml_dtypes.float8_e4m3fn
    expected = np.clip(plain / 0.02, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    # A rounding before the division can cross one step of e4m3.
    assert np.all(np.abs(stored.astype(np.float32) - expected) <= np.maximum(np.abs(expected) / 8, 2.0**-9))
    assert np.mean(stored.astype(np.float32) == expected) > 0.99


@each_implementation
def test_a_write_into_a_pair_of_caches_returns_the_pair(implementation: str) -> None:
    key, value = np.ones((2, 1, 8), np.float32), np.full((2, 1, 4), 2.0, np.float32)
    caches = np.zeros((3, 4, 1, 8), np.float32), np.zeros((3, 4, 1, 4), np.float32)
    keys, values = ops.write_kv_cache(
        jnp.asarray(key),
        jnp.asarray(value),
        jax.tree.map(jnp.asarray, caches),
        jnp.array([5, -1], jnp.int32),
        implementation=implementation,
    )
    assert np.asarray(keys).sum() == 8
    assert np.asarray(values)[1, 1].sum() == 8


def _attend(case: AttentionCase, implementation: str, **options) -> np.ndarray:
    return np.array(
        ops.paged_attention(
            **case.operands, scale=case.spec.scale, **case.limits, **options, implementation=implementation
        )
    )


def _reference(**arguments):
    return reference.paged_attention_with_lse(arguments.pop("query"), arguments.pop("kv_cache"), **arguments)
