"""The kernels of Mamba-2, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.support.mamba_cases import assert_as_exact_as_torch, mamba_call
from tests.support.state_cases import KEPT
from tests.support.triton_ops import run_triton
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec
from torch_core.state.kernels.mamba import parts, plan


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"states": False, "optional": False, "padding": 20},
        {"dt_limit": (0.1, 0.3), "heads": (3, 1)},
        {"sizes": (6, 40)},
        KEPT,
        {"lens": (1, 1, 0, 1), "sizes": (6, 40), "dtype": "bfloat16", "state_dtype": "bfloat16"},
        {"lens": (1, 1, 0, 1), "states": False, "optional": False},
        {"lens": (1, 1, 0, 1), "dtype": "bfloat16", "in_place": True},
        {"lens": (1, 1, 0, 1), "num_kept_tokens": torch.tensor([1, 0, 0, 0], dtype=torch.int32)},
    ],
    ids=str,
)
def test_few_tokens_are_as_exact_as_torchs(options, seed):
    call = mamba_call(seed, **{"lens": (5, 1, 0, 6), **options})
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {"in_place": True, "state_dtype": "bfloat16"}),
        ("float16", {"states": False, "optional": False, "heads": (3, 1), "sizes": (40, 20)}),
    ],
    ids=str,
)
def test_prompts_go_in_chunks(dtype, options, seed):
    call = mamba_call(seed, (70, 1, 0, 130), dtype=dtype, **{"heads": (2, 2), **options})
    assert len(plan_call(call.map(array_spec)).launches) == 3
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)


@pytest.mark.parametrize("rates", [(-1e6, -1e7), (-1.0, -1e6)], ids=str)
def test_tokens_keep_their_digits_behind_what_is_forgotten(rates, seed):
    call = mamba_call(seed, (66, 130), heads=(2, 1), dtype="bfloat16")
    call.A[:] = torch.tensor(rates)
    # One token in seven forgets everything before it, or each does.
    call.dt[torch.arange(len(call.dt)) % 7 > 0] -= 14 if rates[0] < -1 else 0
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)


def test_spans_of_long_prompts_run_at_the_same_time(monkeypatch, seed):
    monkeypatch.setattr(parts, "SPANS", (64,))
    call = mamba_call(seed, (70, 3, 0, 40, 65, 130, 33), heads=(2, 1), dtype="bfloat16")
    assert len(plan.plan_mamba_chunk_scan(call.map(array_spec), plan.DeviceLimits()).launches) == 5
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, run_triton(given)["out"], given.states)


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"sizes": (8, 300)}], ids=str)
def test_prompts_that_no_chunk_serves_go_token_by_token(change, seed):
    call = mamba_call(seed, (40,), **{"dtype": "bfloat16", **change})
    assert [launch.name for launch in plan_call(call.map(array_spec)).launches] == ["mamba_step_kernel"]


@pytest.mark.parametrize(
    ("lens", "wanted"),
    [((512,), None), ((8192,), 2048), ((32768,), 8192), ((8192, 8192), 2048), ((100, 8192), 2048), ((600,) * 40, None)],
)
def test_spans_fill_a_device_with_few_sequences(lens, wanted, seed):
    call = mamba_call(seed, lens, heads=(32, 1), sizes=(2, 128), dtype="bfloat16", padding=0).map(array_spec)
    last = plan.plan_mamba_chunk_scan(call, plan.DeviceLimits(num_sms=64)).launches[-1]
    assert dict(last.constexprs)["SPAN"] == (wanted or parts.WHOLE)
