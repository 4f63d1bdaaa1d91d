"""Joining two attention results over disjoint keys."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn import ops
from tests.ops.runner import IMPLEMENTATIONS, run_numpy
from tests.support import reference
from tests.support.attention_cases import assert_as_exact, dense_case, to_torch
from torch_core.base.specs import AttentionSpec

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def merged(implementation: str, *states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    output, lse = ops.merge_states(*(jnp.asarray(x) for x in states), implementation=implementation)
    return np.array(output), np.array(lse)


def random_states(seed: int, dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    outputs = [np.array(jnp.asarray(rng.normal(size=(7, 3, 8)), dtype)) for _ in range(2)]
    lses = [rng.normal(size=(7, 3)).astype(np.float32) * 5 for _ in range(2)]
    return [outputs[0], lses[0], outputs[1], lses[1]]


@each_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_result_is_as_exact_as_its_dtype_allows(implementation: str, dtype: str, seed: int) -> None:
    states = random_states(seed, dtype)
    output, lse = merged(implementation, *states)
    exact, exact_lse = reference.merge_states(*(to_torch(x).double() for x in states))
    assert str(output.dtype) == dtype
    torch_dtype = getattr(torch, dtype)
    assert_as_exact(to_torch(output), exact, exact.to(torch_dtype), torch_dtype)
    assert_as_exact(to_torch(lse), exact_lse, exact_lse.float(), torch.float32, "lse")


@each_implementation
@pytest.mark.parametrize("empty", [-np.inf, np.inf])
def test_an_empty_side_counts_for_nothing_whatever_its_output_holds(implementation: str, empty: float) -> None:
    output, lse, other, other_lse = random_states(1)
    other[:], other_lse[:] = np.nan, empty
    for states in ((output, lse, other, other_lse), (other, other_lse, output, lse)):
        merged_output, merged_lse = merged(implementation, *states)
        assert merged_output == pytest.approx(output, rel=1e-6)
        assert merged_lse == pytest.approx(lse, rel=1e-6)


@each_implementation
@pytest.mark.parametrize("empty", [(-np.inf, -np.inf), (np.inf, -np.inf), (np.inf, np.inf)])
def test_two_empty_sides_give_zeros_and_minus_infinity(implementation: str, empty: tuple[float, float]) -> None:
    output, lse, other, other_lse = random_states(2)
    output[:], other[:] = np.nan, np.inf
    lse[:], other_lse[:] = empty
    merged_output, merged_lse = merged(implementation, output, lse, other, other_lse)
    assert not merged_output.any()
    assert (merged_lse == -np.inf).all()


@each_implementation
def test_a_side_that_is_no_number_makes_the_result_none(implementation: str) -> None:
    output, lse, other, other_lse = random_states(3)
    other_lse[:], lse[0] = np.nan, -np.inf
    for states in ((output, lse, other, other_lse), (other, other_lse, output, lse)):
        assert all(np.isnan(each).all() for each in merged(implementation, *states))


@each_implementation
def test_far_apart_lses_do_not_overflow(implementation: str) -> None:
    output, lse, other, other_lse = random_states(3)
    lse[:], other_lse[:] = 3e4, -3e4
    merged_output, merged_lse = merged(implementation, output, lse, other, other_lse)
    assert (merged_output == output).all()
    assert (merged_lse == 3e4).all()


@each_implementation
def test_two_halves_of_the_keys_merge_to_the_whole(implementation: str) -> None:
    spec = AttentionSpec(scale=0.2, causal=False)
    case = dense_case(4, key_lens=[20], query_lens=[3], spec=spec)
    parts = []
    for keys in (slice(0, 10), slice(10, 20)):
        key, value = (case.operands[name][keys] for name in ("key", "value"))
        parts += run_numpy(case, implementation, key=key, value=value, key_start_loc=np.array([0, 10], np.int32))
    output, lse = merged(implementation, *parts)
    whole, whole_lse = run_numpy(case, implementation)
    assert output == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert lse == pytest.approx(whole_lse, rel=1e-6)
