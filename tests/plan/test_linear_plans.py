"""Which kernel a linear map of one row runs on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_core.calls import LinearCall
from torch_core.errors import Unsupported
from torch_core.plan.plan import DeviceLimits
from torch_core.planner import plan_call
from torch_core.specs import ArraySpec

CALL = LinearCall(hidden_states=ArraySpec((1, 512), "bfloat16"), kernel=ArraySpec((512, 96), "bfloat16"))


def kernel_of(call, arch=90):
    (launch,) = plan_call(call, DeviceLimits(arch=arch)).launches
    return launch.name


@pytest.mark.parametrize("activation", [None, "silu"])
def test_on_hopper_the_copy_engine_reads_ahead(activation):
    assert kernel_of(replace(CALL, activation=activation)) == "hopper_linear_row_kernel"


@pytest.mark.parametrize(
    "call",
    [
        LinearCall(hidden_states=ArraySpec((1, 512), "float32"), kernel=ArraySpec((512, 96), "float32")),
        LinearCall(hidden_states=ArraySpec((1, 500), "bfloat16"), kernel=ArraySpec((500, 96), "bfloat16")),
        replace(CALL, kernel=ArraySpec((512, 96), "bfloat16", strides=(97, 1))),
        replace(CALL, kernel=ArraySpec((512, 96), "bfloat16", aligned=False)),
        replace(CALL, activation="relu"),
    ],
    ids=["wide elements", "a part of a step", "odd rows", "an odd address", "another activation"],
)
def test_what_the_copy_engine_cannot_follow_runs_on_the_portable_kernel(call):
    assert kernel_of(call) == "linear_row_kernel"


def test_other_devices_have_the_portable_kernel():
    assert kernel_of(CALL, arch=80) == "linear_row_kernel"


def test_more_rows_than_one_are_refused():
    with pytest.raises(Unsupported, match="hidden_states has 2 rows"):
        plan_call(replace(CALL, hidden_states=ArraySpec((2, 512), "bfloat16")))
