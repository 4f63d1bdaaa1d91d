"""How a linear map of few rows is launched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_core.calls import LinearCall
from torch_core.errors import Unsupported
from torch_core.plan.plan import Descriptor, DeviceLimits
from torch_core.planner import plan_call
from torch_core.specs import ArraySpec

CALL = LinearCall(hidden_states=ArraySpec((3, 512), "bfloat16"), kernel=ArraySpec((512, 96), "bfloat16"))


def is_copied(call, arch=90):
    *_, launch = plan_call(call, DeviceLimits(arch=arch)).launches
    return isinstance(dict(launch.arguments)["kernel"], Descriptor)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_hopper_the_copy_engine_brings_the_kernel(dtype):
    assert is_copied(LinearCall(hidden_states=ArraySpec((1, 512), dtype), kernel=ArraySpec((512, 96), dtype)))


@pytest.mark.parametrize(
    "changes",
    [{"strides": (97, 1)}, {"aligned": False}],
    ids=["odd rows", "an odd address"],
)
def test_what_the_copy_engine_cannot_follow_is_loaded(changes):
    assert not is_copied(replace(CALL, kernel=ArraySpec((512, 96), "bfloat16", **changes)))


def test_other_devices_load():
    assert not is_copied(CALL, arch=80)


@pytest.mark.parametrize("has_norm", [False, True])
def test_a_norm_is_a_launch_of_its_own(has_norm):
    call = replace(CALL, norm_weight=ArraySpec((512,), "bfloat16") if has_norm else None)
    assert len(plan_call(call).launches) == 1 + has_norm


def test_more_rows_than_the_kernels_take_are_refused():
    with pytest.raises(Unsupported, match="hidden_states has 17 rows"):
        plan_call(replace(CALL, hidden_states=ArraySpec((17, 512), "bfloat16")))
