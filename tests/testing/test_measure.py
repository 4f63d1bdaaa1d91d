"""The numbers of the cross-check, on logits small enough to work out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jattn.llm.testing.measure import Truth, compare_tokens, layer_rows, measure

EPS = 2.0**-23


def truth_of(logits: np.ndarray, torch_logits: np.ndarray | None = None, eps: float = EPS) -> Truth:
    torch_logits = logits if torch_logits is None else torch_logits
    return Truth.of([logits.astype(np.float64)], [torch_logits.astype(np.float32)], eps=eps)


def test_equal_logits_have_no_deviation(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(3, 5)).astype(np.float32)

    deviation = measure([logits], truth_of(logits))

    assert (deviation.max_abs, deviation.error, deviation.kl) == (0, 0, 0)
    assert deviation.cosine == pytest.approx(1, abs=1e-15)


def test_the_limit_is_twice_torchs_error_and_eps() -> None:
    truth = truth_of(np.array([[1.0, -8.0]]), np.array([[2.0, -8.0]]), eps=0.25)

    assert truth.scale == 8
    assert truth.torch_error == 0.125
    assert truth.limit == 0.75


def test_the_limit_is_that_of_the_run_in_which_torch_errs_most() -> None:
    exact, found = np.array([[1.0, -8.0]]), np.array([[2.0, -8.0]], np.float32)

    assert Truth.of([exact], [exact], [(exact, exact), (exact, found)], eps=0.25).limit == 0.75
    assert Truth.of([exact], [found], [(exact, exact)], eps=0.25).limit == 0.75


def test_the_error_of_a_further_run_with_small_logits_counts_by_the_scale_of_all() -> None:
    exact = np.array([[1.0, -8.0]])

    assert Truth.of([exact], [exact], [(exact / 8, exact / 8 + 1)], eps=0.25).torch_error == 0.125


def test_max_abs_is_against_torch_and_error_against_the_truth() -> None:
    truth = truth_of(np.array([[0.0, 4.0]]), np.array([[1.0, 4.0]]))

    deviation = measure([np.array([[3.0, 4.0]], np.float32)], truth)

    assert deviation.max_abs == 2
    assert deviation.error == 0.75


def test_kl_and_cosine_are_those_of_the_worst_position() -> None:
    expected = np.array([[0.0, 0.0], [math.log(3), 0.0]])
    found = np.array([[0.0, 0.0], [0.0, math.log(3)]], np.float32)

    deviation = measure([found], truth_of(expected))

    assert deviation.kl == pytest.approx(0.75 * math.log(3) - 0.25 * math.log(3), rel=1e-6)
    assert deviation.cosine == pytest.approx(0, abs=1e-12)


def test_a_nan_in_any_sequence_comes_out() -> None:
    clean = np.ones((1, 2))
    truth = Truth.of([clean, clean, clean], [clean, clean, clean], eps=EPS)

    deviation = measure([clean, np.array([[1.0, np.nan]]), clean], truth)

    for found in (deviation.max_abs, deviation.error, deviation.cosine, deviation.kl):
        assert found is not None
        assert math.isnan(found)


def test_logits_that_are_all_zero_are_compared_without_dividing_by_zero() -> None:
    zeros = np.zeros((2, 3))

    deviation = measure([zeros.astype(np.float32)], truth_of(zeros))

    assert (deviation.error, deviation.cosine, deviation.kl) == (0, 1, 0)


def tokens_against(rows: list[list[float]], expected: list[int], found: list[int], *, free_running: bool = False):
    truth = truth_of(np.array(rows), eps=2.0**-10)
    return compare_tokens([expected], [found], truth, [1], free_running=free_running)


def test_equal_tokens_have_no_difference() -> None:
    assert tokens_against([[1.0, 0.0], [0.0, 1.0]], [0, 1], [0, 1]) == (None, 0)


def test_the_first_difference_is_named_with_its_gap() -> None:
    difference, ties = tokens_against([[1.0, 0.0], [0.5, 0.0], [1.0, 0.0]], [0, 0, 0], [0, 1, 1])

    assert difference is not None
    assert (difference.prompt, difference.position, difference.expected, difference.found) == (0, 1, 0, 1)
    assert difference.gap == 0.5
    assert ties == 0


def test_the_logits_row_of_a_new_token_is_found_behind_the_prompt() -> None:
    truth = truth_of(np.array([[9.0, 0.0], [9.0, 0.0], [2.0, 0.0]]))

    difference, _ = compare_tokens([[0]], [[1]], truth, [3], free_running=False)

    assert difference is not None
    assert difference.gap == 2


def test_a_difference_below_the_allowed_error_is_a_tie_and_the_rest_is_still_compared() -> None:
    difference, ties = tokens_against([[1.0, 0.9999], [1.0, 0.0]], [0, 0], [1, 1])

    assert ties == 1
    assert difference is not None
    assert difference.position == 1


def test_after_a_tie_a_free_run_is_not_compared_any_further() -> None:
    assert tokens_against([[1.0, 0.9999], [1.0, 0.0]], [0, 0], [1, 1], free_running=True) == (None, 1)


def test_the_earliest_difference_of_all_prompts_is_named_and_ties_after_it_are_counted() -> None:
    rows = np.array([[1.0, 0.9999], [1.0, 0.0], [1.0, 0.0]])
    truth = Truth.of([rows, rows, rows], [rows, rows, rows], eps=2.0**-10)

    difference, ties = compare_tokens(
        [[0, 0, 0]] * 3, [[0, 0, 1], [0, 1, 0], [1, 0, 0]], truth, [1, 1, 1], free_running=False
    )

    assert difference is not None
    assert (difference.prompt, difference.position) == (1, 1)
    assert ties == 1


def test_the_limit_of_a_layer_is_that_of_the_sequence_in_which_torch_errs_most() -> None:
    exact = np.array([[[1.0, -8.0]]] * 3)
    off = [*(exact + np.array([[[1.0, 0.0]]]))]
    states = [*exact]

    (row, _, _) = layer_rows("xla", [exact], [states, off], [states, states], eps=0.25)

    assert (row.error, row.limit, row.by_position) == (0.0, 0.75, ((0.0,),))
