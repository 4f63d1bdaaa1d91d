"""The Hopper kernel of a product with a gate's activation, its own source without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.emulated.run import run_emulated_operation
from tests.support.gated_product_cases import assert_as_exact_as_torch, gated_product
from torch_core.base.errors import Unsupported
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec
from torch_core.rowwise.reference import row_product


def _run(call: Any, seed: int, resident: int = 1) -> torch.Tensor:
    plan = plan_call(call.map(array_spec), DeviceLimits(num_sms=3))
    assert [launch.name for launch in plan.launches] == ["hopper_gated_product_kernel"]
    return run_emulated_operation(plan, call.arrays(), seed, resident)["out"]


@pytest.mark.parametrize(
    ("num_rows", "warpgroups", "dtype"),
    [(530, 3, torch.bfloat16), (530, 3, torch.float16), (230, 2, torch.bfloat16), (50, 1, torch.bfloat16)],
)
def test_uneven_tiles_are_as_exact_as_torch(num_rows, warpgroups, dtype, seed):
    # Rows and columns that are no multiple of a tile's, more tiles than programs, more steps than slots.
    call = gated_product(seed, num_rows, 320, 200, dtype)
    (launch,) = plan_call(call.map(array_spec), DeviceLimits(num_sms=3)).launches
    assert dict(launch.constexprs)["WARPGROUPS"] == warpgroups
    assert_as_exact_as_torch(call, _run(call, seed, resident=2))


def test_large_gates_below_zero_make_zeros_of_large_numbers(seed):
    call = gated_product(seed, 512, 256, 136, torch.bfloat16)
    call.x.mul_(2.0**66)
    found, expected = _run(call, seed), row_product(call)["out"]
    assert not found.isnan().any()
    assert torch.equal(found == 0, expected == 0)


def test_rows_do_not_show_in_others(seed):
    call = gated_product(seed, 520, 256, 136, torch.bfloat16)
    expected = _run(call, seed)
    call.x[1:] = torch.nan
    assert torch.equal(_run(call, seed)[:1], expected[:1])


@pytest.mark.parametrize("changes", [{"arch": 80}, {"arch": 100}])
def test_other_devices_refuse_an_activation(changes, seed):
    call = gated_product(seed, 520, 256, 136, torch.bfloat16).map(array_spec)
    with pytest.raises(Unsupported, match="Hopper"):
        plan_call(call, DeviceLimits(**changes))
    assert plan_call(replace(call, activation=None), DeviceLimits(**changes)).launches
