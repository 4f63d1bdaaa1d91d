"""The kernel of the short convolution, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.support.conv_cases import assert_as_exact_as_torch, conv_call, cut_in_two, whole_results
from tests.support.state_cases import KEPT
from tests.support.triton_ops import run_triton


@pytest.mark.parametrize(("dtype", "lens"), [("bfloat16", (5, 1, 0, 19, 1, 2)), ("float32", (70, 0, 1))], ids=str)
def test_ragged_sequences_are_as_exact_as_torchs(dtype, lens, seed):
    call = conv_call(seed, lens, dtype=dtype)
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.conv_states)


@pytest.mark.parametrize(
    "options",
    [
        {"width": 2, "activation": None},
        {"width": 3, "bias": False, "state_dtype": "bfloat16"},
        {"width": 7, "lens": (7, 6, 5, 0, 1)},
        {"states": False},
        {"lens": (1,), "padding": 0},
        {"first_column": 5, "out_sizes": (12, 8)},
        {"lens": (1, 1, 1, 0), "first_column": 3, "out_sizes": (5, 12, 3), "padding": 2},
        KEPT,
    ],
    ids=str,
)
def test_each_option_is_as_exact_as_torchs(options, seed):
    call = conv_call(seed, **{"lens": (5, 1, 0, 6), **options})
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, whole_results(run_triton(given)), given.conv_states)


def test_slots_are_those_of_the_sequences_order_unless_given(seed):
    call = conv_call(seed, (2, 3)).with_arrays({"cache_indices": None, "has_initial_state": None})
    call = call.with_arrays({"conv_states": torch.randn(call.conv_states.shape)})
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.conv_states)


@pytest.mark.parametrize("at", [1, 18])
def test_a_prompt_in_chunks_has_the_bits_of_the_whole_prompt(at, seed):
    call = conv_call(seed, (20,), dtype="bfloat16", padding=0)
    whole = call.map(torch.clone)
    expected = run_triton(whole)["out"]
    found = [run_triton(part)["out"] for part in cut_in_two(call, at)]
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(call.conv_states[call.cache_indices], whole.conv_states[call.cache_indices])


def test_rows_of_larger_arrays_are_read_where_they_are(seed):
    call = conv_call(seed, (5, 1))
    wide = torch.full((len(call.x), 50), torch.nan)
    wide[:, 30:] = call.x
    given = call.map(torch.clone).with_arrays({"x": wide[:, 30:], "weight": call.weight.T.contiguous().T})
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.conv_states)
