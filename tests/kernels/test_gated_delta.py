"""The kernel of the gated delta rule, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.support.delta_cases import assert_as_exact_as_torch, delta_call
from tests.support.triton_ops import run_triton


@pytest.mark.parametrize("gates", ["g", "gk", None])
def test_ragged_sequences_are_as_exact_as_torchs(gates, seed):
    call = delta_call(seed, (5, 1, 0, 6), gates=gates, dtype="bfloat16" if gates == "g" else "float32")
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)


@pytest.mark.parametrize("options", [{"states": False}, {"use_qk_l2norm_in_kernel": False, "heads": (1, 1)}], ids=str)
def test_each_option_is_as_exact_as_torchs(options, seed):
    call = delta_call(seed, (2, 0, 3), padding=20, **options)
    call.key[:5] /= 3
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)
