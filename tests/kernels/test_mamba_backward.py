"""The kernels of Mamba-2's derivative, in Triton's interpreter, and its specification."""

from __future__ import annotations

import pytest
import torch

from tests.support.mamba_cases import mamba_backward_call, mamba_call
from tests.support.state_cases import assert_gradients_are_as_exact, assert_is_the_slope
from tests.support.triton_ops import run_triton
from torch_core import reference
from torch_core.base.errors import Unsupported
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec
from torch_core.state.kernels.mamba import backward_plan, parts


@pytest.mark.parametrize(
    ("lens", "options"),
    [
        ((66, 1, 0), {"dtype": "bfloat16", "heads": (2, 1)}),
        ((9,), {"dtype": "float16", "states": False, "optional": False, "dt_limit": (0.1, 0.3)}),
        ((35, 2), {"heads": (2, 2), "sizes": (20, 8)}),
    ],
    ids=str,
)
def test_gradients_are_as_exact_as_torchs(lens, options, seed):
    call = mamba_backward_call(mamba_call(seed, lens, **{"heads": (1, 1), **options}))
    assert_gradients_are_as_exact(reference.mamba_chunk_scan_backward, call, run_triton(call))


def test_spans_run_at_the_same_time_and_parts_of_a_group_are_summed(monkeypatch, seed):
    monkeypatch.setattr(parts, "SPANS", (64,))
    monkeypatch.setattr(backward_plan, "_LEAST_MEMBERS", 1)
    call = mamba_backward_call(mamba_call(seed, (70, 3, 0, 65), heads=(2, 1), dtype="bfloat16"))
    plan = backward_plan.plan_mamba_backward(call.map(array_spec), DeviceLimits())
    assert len(plan.launches) == 8
    assert "B_sums" in dict(plan.scratch)
    assert_gradients_are_as_exact(reference.mamba_chunk_scan_backward, call, run_triton(call))


def test_gradients_of_strong_decays_are_finite_in_a_chunk_that_is_not_full(seed):
    call = mamba_call(seed, (40, 66), heads=(2, 1), dtype="bfloat16", padding=0)
    call.A[:] = torch.tensor([-16.0, -128.0])
    call = mamba_backward_call(call.with_arrays({"dt_bias": call.dt_bias + 2}))
    assert_gradients_are_as_exact(reference.mamba_chunk_scan_backward, call, run_triton(call))


def test_gradients_of_small_step_sizes_have_the_digits_of_float32(seed):
    call = mamba_call(seed, (9,), heads=(8, 1), padding=0)
    call = call.with_arrays({"dt": call.dt / 16, "dt_bias": torch.full((8,), -4.4)})
    call = mamba_backward_call(call)
    assert_gradients_are_as_exact(reference.mamba_chunk_scan_backward, call, run_triton(call))


def test_the_specification_is_the_slope_of_the_forward_one(seed):
    call = mamba_call(seed, (3, 1, 0, 2), heads=(2, 1), padding=0)
    call = call.map(lambda x: x.double().nan_to_num() if x.is_floating_point() else x)
    assert_is_the_slope(
        reference.mamba_chunk_scan, reference.mamba_chunk_scan_backward, mamba_backward_call(call), call
    )


@pytest.mark.parametrize("change", [{"B": torch.zeros(7, 1, 8), "C": torch.zeros(7, 1, 8)}, {"sizes": (260, 4)}])
def test_what_the_kernels_do_not_differentiate_is_refused(change, seed):
    sizes = change.pop("sizes", (6, 8))
    call = mamba_backward_call(mamba_call(seed, (4,), heads=(2, 1), sizes=sizes, dtype="bfloat16"))
    with pytest.raises(Unsupported, match="which implementation 'triton' does not serve; implementation 'torch' or"):
        plan_call(call.with_arrays(change).map(array_spec))
