"""Every implementation of attention against the float64 specification, and the results that need no oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn import ops
from tests.ops.runner import IMPLEMENTATIONS, arrays, keywords, run_case, run_numpy
from tests.support.attention_cases import (
    AttentionCase,
    assert_matches_reference,
    dense_case,
    paged_case,
    random_dense_case,
    random_paged_case,
)
from torch_core.base.specs import AttentionSpec

# XLA compiles every case for about a second, so it gets the few seeds that together draw nearly every feature, cache
# dtype, window and kind of batch.
PAGED = [("torch", seed) for seed in range(12)] + [("xla", seed) for seed in (0, 1, 7, 12, 34)]
DENSE = [("torch", seed) for seed in range(6)] + [("xla", seed) for seed in (7, 37, 60)]

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.mark.parametrize(("implementation", "number"), PAGED)
def test_paged_attention_is_as_exact_as_its_dtype_allows(implementation: str, number: int) -> None:
    case = random_paged_case(number, rare=False, per_token_head=False)
    assert_matches_reference(case, *run_case(case, implementation))


@pytest.mark.parametrize(("implementation", "number"), DENSE)
def test_dense_attention_is_as_exact_as_its_dtype_allows(implementation: str, number: int) -> None:
    case = random_dense_case(number, rare=False)
    assert_matches_reference(case, *run_case(case, implementation))


@each_implementation
def test_a_long_context_over_many_runs_of_keys_is_exact(implementation: str) -> None:
    case = paged_case(5, seq_lens=[700, 3], query_lens=[2, 1], num_heads=2, num_kv_heads=1)
    assert_matches_reference(case, *run_case(case, implementation))


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """Memory that torch does not initialise holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@each_implementation
@pytest.mark.parametrize("case", [paged_case, dense_case])
def test_rows_of_no_sequence_are_zeros_where_a_program_is_given_wrong_starts(
    case: Callable[..., AttentionCase], implementation: str, filled_memory: None
) -> None:
    lens = {"seq_lens": [9, 9, 9]} if case is paged_case else {"key_lens": [9, 9, 9]}
    made = case(6, query_lens=[3, 0, 3], **lens)

    output, lse = run_numpy(made, implementation, query_start_loc=np.array([0, 3, 0, 3], np.int32))

    assert np.isfinite(output[:3]).all()
    assert not output[3:].any()
    assert (lse[3:] == -np.inf).all()


@each_implementation
def test_sequences_without_tokens_and_padding_give_zeros_and_minus_infinity(implementation: str) -> None:
    case = paged_case(6, seq_lens=[9, 0, 4], query_lens=[1, 0, 0], padding_tokens=3)
    output, lse = run_numpy(case, implementation)
    assert not output[1:].any()
    assert (lse[1:] == -np.inf).all()
    assert np.isfinite(lse[0]).all()


@each_implementation
def test_a_row_that_sees_nothing_gives_zero_and_minus_infinity_even_with_a_sink(implementation: str) -> None:
    # Five queries, two keys, aligned bottom-right: the first three stand before every key.
    sinks = np.array([1.0, -2.0], np.float32)
    case = dense_case(7, key_lens=[2], query_lens=[5], num_heads=2, num_kv_heads=1, sinks=sinks)
    output, lse = run_numpy(case, implementation)
    assert not output[:3].any()
    assert (lse[:3] == -np.inf).all()
    assert np.isfinite(lse[3:]).all()


@each_implementation
def test_a_sink_takes_its_share_of_the_softmax_and_counts_in_the_lse(implementation: str) -> None:
    # One key with score 0 against a sink with logit log(3): a quarter of the value, and lse log(4).
    sinks = np.full(2, np.log(3), np.float32)
    case = dense_case(8, key_lens=[1], query_lens=[1], num_heads=2, num_kv_heads=1, sinks=sinks)
    case.operands["query"][:] = 0
    output, lse = run_numpy(case, implementation)
    assert output == pytest.approx(np.repeat(case.operands["value"], 2, 1) / 4, rel=1e-6)
    assert lse == pytest.approx(np.full((1, 2), np.log(4)), rel=1e-6)


@each_implementation
@pytest.mark.parametrize("make", [paged_case, dense_case])
def test_a_sink_of_minus_infinity_is_none(make: Callable[..., AttentionCase], implementation: str) -> None:
    # One head without a sink beside heads that have one, as in a layer whose sinks were taken out.
    lens = {"seq_lens": [9, 0]} if make is paged_case else {"key_lens": [9, 0]}
    sinks = np.array([-np.inf, 0.5], np.float32)
    case = make(14, query_lens=[3, 0], num_heads=2, num_kv_heads=1, sinks=sinks, **lens)
    assert_matches_reference(case, *run_case(case, implementation))


@each_implementation
def test_a_sink_of_minus_infinity_has_no_gradient_and_disturbs_no_other(implementation: str) -> None:
    case = dense_case(15, key_lens=[4], query_lens=[4], num_heads=2, num_kv_heads=1)
    given = arrays(case)
    options = {**keywords(case.spec), **case.limits, "implementation": implementation}

    def loss(query: jax.Array, sinks: jax.Array) -> jax.Array:
        return (ops.attention(**{**given, "query": query}, sinks=sinks, **options) ** 2).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    # exp of it is 0 in float32, as that of minus infinity is exactly.
    far = gradients(given["query"], jnp.full(2, -1e30, jnp.float32))
    none = gradients(given["query"], jnp.full(2, -jnp.inf, jnp.float32))
    for one, other in zip(far, none, strict=True):
        assert np.isfinite(other).all()
        assert np.allclose(one, other, rtol=1e-6, atol=1e-6)


@each_implementation
def test_a_zero_query_gives_the_mean_of_the_values(implementation: str) -> None:
    case = dense_case(9, key_lens=[6], query_lens=[1])
    case.operands["query"][:] = 0
    mean = case.operands["value"].mean(0).repeat(3, 0)
    assert run_numpy(case, implementation)[0][0] == pytest.approx(mean, rel=1e-5, abs=1e-6)


@each_implementation
def test_doubling_the_values_doubles_the_output_exactly(implementation: str) -> None:
    case = dense_case(10, key_lens=[20], query_lens=[20])
    once = run_numpy(case, implementation)[0]
    twice = run_numpy(case, implementation, value=case.operands["value"] * 2)[0]
    assert (twice == 2 * once).all()


@each_implementation
def test_query_heads_of_one_group_with_equal_queries_give_equal_outputs(implementation: str) -> None:
    case = dense_case(11, key_lens=[12], query_lens=[12], num_heads=6, num_kv_heads=2)
    query = case.operands["query"].reshape(12, 2, 3, 32)
    query[:] = query[:, :, :1]
    output = run_numpy(case, implementation)[0].reshape(12, 2, 3, 32)
    assert (output == output[:, :, :1]).all()
    assert not (output[:, 0] == output[:, 1]).all()


@each_implementation
def test_a_window_of_the_whole_sequence_changes_nothing(implementation: str) -> None:
    make = functools.partial(paged_case, 12, seq_lens=[33, 8], query_lens=[4, 1])
    windowed = make(spec=AttentionSpec(scale=0.2, window_left=32))
    plain = make(spec=AttentionSpec(scale=0.2))
    for one, other in zip(run_case(windowed, implementation), run_case(plain, implementation), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_both_implementations_run_in_the_querys_dtype() -> None:
    case = paged_case(13, seq_lens=[5], query_lens=[1], dtype="bfloat16")
    assert {str(run_numpy(case, implementation)[0].dtype) for implementation in IMPLEMENTATIONS} == {"bfloat16"}
