"""The kernel of the gated delta rule, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.support.delta_cases import assert_as_exact_as_torch, delta_call
from tests.support.state_cases import KEPT
from tests.support.triton_ops import run_triton
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec
from torch_core.state.kernels.delta import plan


@pytest.mark.parametrize("lens", [(5, 1, 0, 6), (1, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("gates", ["g", "gk", None])
def test_ragged_sequences_are_as_exact_as_torchs(gates, lens, seed):
    dtype, state_dtype = "float32" if gates is None else "bfloat16", "bfloat16" if gates == "gk" else "float32"
    call = delta_call(seed, lens, gates=gates, dtype=dtype, state_dtype=state_dtype)
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)


@pytest.mark.parametrize(
    "options", [{"states": False}, {"use_qk_l2norm_in_kernel": False, "heads": (1, 1)}, KEPT], ids=str
)
def test_each_option_is_as_exact_as_torchs(options, seed):
    call = delta_call(seed, **{"lens": (2, 0, 3), "padding": 20, **options})
    call.key[:5] /= 3
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {}),
        ("float16", {"gates": None, "states": False}),
        ("bfloat16", {"gates": "gk", "sizes": (20, 6), "state_dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_prompts_go_in_chunks(dtype, options, seed):
    call = delta_call(seed, (66, 1, 0), heads=(2, 1), dtype=dtype, **options)
    assert launches(call)[-2:] == ["gated_delta_inverses_kernel", "gated_delta_chunks_kernel"]
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)


def test_heads_that_share_a_key_have_systems_of_their_own(seed):
    call = delta_call(seed, (40,), heads=(8, 2), padding=0, dtype="bfloat16")
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)


@pytest.mark.parametrize("gates", ["g", "gk"])
def test_segments_of_a_long_sequence_start_from_the_states_before_them(gates, seed, monkeypatch):
    monkeypatch.setattr(plan, "_LEAST_SEGMENT", 1)
    call = delta_call(seed, (130, 3, 0, 70), heads=(1, 1), sizes=(18, 10), gates=gates, dtype="bfloat16")
    assert "gated_delta_starts_kernel" in launches(call)
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)


@pytest.mark.parametrize(
    ("gates", "beta", "added"),
    # Forgotten within a chunk, within two, and not within a segment; equal long keys undo the decay.
    [((-4.0, -1.0, -0.01), 0.1, 1), ((-0.95,), 0.9, 8)],
)
def test_segments_count_what_their_heads_do_not_forget(gates, beta, added, seed, monkeypatch):
    monkeypatch.setattr(plan, "_LEAST_SEGMENT", 2)
    options = {"heads": (len(gates), 1), "sizes": (18, 10), "use_qk_l2norm_in_kernel": False}
    call = delta_call(seed, (258, 3), dtype="bfloat16", **options)
    call.g[:] = torch.tensor(gates)
    call.key[:] = torch.nn.functional.normalize(call.key[:1].float(), dim=-1) * 2
    call.beta[:] = beta
    assert "kept" in dict(plan_call(call.map(array_spec)).scratch)
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states, added)


def test_a_gate_that_forgets_all_gives_the_result_of_a_sequence_that_starts_there(seed):
    call = delta_call(seed, (40,), heads=(1, 1), padding=0, states=False, dtype="bfloat16")
    call.g[20] = -torch.inf
    later = call.with_arrays({name: getattr(call, name)[20:] for name in ("query", "key", "value", "beta", "g")})
    later = later.with_arrays({"query_start_loc": torch.tensor([0, 20], dtype=torch.int32)})
    assert_as_exact_as_torch(later, run_triton(call)["out"][20:], None)


def test_equal_keys_do_not_overflow_a_chunks_inverse(seed):
    call = delta_call(seed, (64,), heads=(1, 1), gates=None, padding=0, dtype="float16")
    call.key[:] = call.key[0]
    call.beta[:] = 0.99
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states, added=64)


@pytest.mark.parametrize(
    "change", [{"dtype": "float32"}, {"gates": "gk", "dtype": "float32"}, {"sizes": (8, 260)}], ids=str
)
def test_prompts_that_no_chunk_serves_go_token_by_token(change, seed):
    call = delta_call(seed, (40,), **{"dtype": "bfloat16", **change})
    assert launches(call) == ["gated_delta_kernel"]


def launches(call):
    return [launch.name for launch in plan_call(call.map(array_spec)).launches]
