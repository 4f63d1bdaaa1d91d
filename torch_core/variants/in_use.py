"""The kernel variants that models use: one representative plan for each, to compile and to measure."""

from __future__ import annotations

from contextlib import suppress

from torch_core.all_reduce.plan import plan_all_reduce, plan_all_reduce_norm, plan_merge
from torch_core.base.errors import Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call
from torch_core.launch.compile import KernelVariant, kernel_variant
from torch_core.launch.op import loaded
from torch_core.launch.plan import DeviceLimits, OperationPlan
from torch_core.launch.planner import plan_call
from torch_core.serves import ROOMS


def plans_in_use(arch: int = 90) -> dict[str, OperationPlan]:
    """Returns representative plans by label; the calls are those of each room's `op.py`.

    For arch 90 this includes some plans of older devices. Plans that a device does not serve are left out.
    """
    calls: dict[str, Call[ArraySpec]] = {}
    for room in ROOMS:
        calls |= loaded(f"{room.__name__}.op:calls_in_use")()
    plans = {}
    for label, call in calls.items():
        with suppress(Unsupported):
            plans[label] = plan_call(call, DeviceLimits(arch=arch))
    for label, rows, width, world in (
        ("sum over devices", 1, 4096, 2),
        ("sum over devices, wide rows", 1, 16384, 2),
        ("sum over four devices", 64, 8192, 4),
        ("sum over eight devices", 64, 16384, 8),
    ):
        x, weight = (ArraySpec(shape, "bfloat16") for shape in ((rows, width), (width,)))
        plans[label] = plan_all_reduce(x, world)
        normed = plan_all_reduce_norm(x, weight, world, epsilon=1e-5, round_first=True, add_one=False)
        plans[f"{label}, normed"] = normed
    plans["attention over devices"] = plan_merge(ArraySpec((1, 32, 128), "bfloat16"), None, 32, "bfloat16", 4)
    if arch == 90:
        older = DeviceLimits(arch=80)
        portable = ("prefill", "dense", "backward", "gated delta decode", "gated delta verifying")
        plans |= {f"{label} not on Hopper": plan_call(calls[label], older) for label in portable}
    return plans


def variants_in_use(arch: int = 90) -> dict[str, tuple[KernelVariant, bool]]:
    """Returns each distinct compiled kernel with whether it is hot, labelled by plan and kernel."""
    variants: dict[str, tuple[KernelVariant, bool]] = {}
    seen: set[KernelVariant] = set()
    for label, plan in plans_in_use(arch).items():
        for launch in plan.launches:
            variant = kernel_variant(launch, plan.specs)
            if variant not in seen:
                seen.add(variant)
                name = f"{label}: {launch.name}"
                variants[f"{name} again" if name in variants else name] = (variant, launch.hot)
    return variants
