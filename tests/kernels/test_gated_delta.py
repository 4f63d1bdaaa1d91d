"""The kernel of the gated delta rule, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.support.delta_cases import assert_as_exact_as_torch, delta_call
from tests.support.triton_ops import run_triton
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec


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


@pytest.mark.parametrize(
    ("dtype", "options"), [("bfloat16", {}), ("float16", {"gates": None, "states": False})], ids=str
)
def test_prompts_go_in_chunks(dtype, options, seed):
    call = delta_call(seed, (70, 1, 0, 130), heads=(2, 1), dtype=dtype, **options)
    assert len(plan_call(call.map(array_spec)).launches) == 2
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)


def test_equal_keys_do_not_overflow_a_chunks_inverse(seed):
    call = delta_call(seed, (64,), heads=(1, 1), gates=None, padding=0, dtype="float16")
    call.key[:] = call.key[0]
    call.beta[:] = 0.99
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"gates": "gk"}, {"sizes": (8, 130)}], ids=str)
def test_prompts_that_no_chunk_serves_go_token_by_token(change, seed):
    call = delta_call(seed, (40,), **{"dtype": "bfloat16", **change})
    assert [launch.name for launch in plan_call(call.map(array_spec)).launches] == ["gated_delta_kernel"]
