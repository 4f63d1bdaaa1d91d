"""What is run under compute-sanitizer: a problem for every kernel, and for every tile that the Hopper kernels have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.kernels import sanitize
from tests.support.latent_cases import LatentCase
from torch_core.attention.backward_call import backward_of
from torch_core.attention.call import AttentionCall, DenseCall
from torch_core.attention.hopper_prefill import longest_query
from torch_core.attention.kernels.backward_hopper.plan import hopper_backward_tile
from torch_core.attention.kernels.hopper.plan import hopper_tile
from torch_core.attention.kernels.hopper_fp8.plan import hopper_fp8_tile
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call
from torch_core.launch.plan import DeviceLimits, LaunchPlan
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec
from torch_core.variants.in_use import plans_in_use

_TILES = {
    "hopper_prefill_kernel": hopper_tile,
    "hopper_fp8_prefill_kernel": hopper_fp8_tile,
    "hopper_backward_kernel": hopper_backward_tile,
}
_LENGTHS = [1 << i for i in range(8, 18)]


def _calls(kernel: str) -> Iterator[AttentionCall[ArraySpec]]:
    backward = kernel == "hopper_backward_kernel"
    for case in sanitize.backward_shapes() if backward else sanitize.shapes():
        call: Any = case.call("cpu").map(array_spec)
        yield _backward(call) if backward else replace(call, with_lse=True)


def _backward(call: DenseCall[ArraySpec]) -> AttentionCall[ArraySpec]:
    out = ArraySpec((*call.query.shape[:2], call.value_head_size), call.query.dtype)
    lse = ArraySpec(call.query.shape[:2], "float32")
    return backward_of(call, out=out, lse=lse, d_out=out, d_lse=lse)


def _launches(kernel: str) -> list[tuple[AttentionCall[ArraySpec], LaunchPlan]]:
    return [
        (call, launch)
        for call in _calls(kernel)
        for launch in plan_call(call, DeviceLimits()).launches
        if launch.name == kernel
    ]


@pytest.mark.parametrize("kernel", _TILES)
def test_every_tile_has_a_problem(kernel: str) -> None:
    tile_of = _TILES[kernel]
    sizes = {size: {tile_of(head_size=size, max_query_len=n) for n in _LENGTHS} for size in (64, 128, 192, 256)}
    tiles = {size: found - {None} for size, found in sizes.items() if found != {None}}

    run = {
        size: {
            tile_of(head_size=size, max_query_len=longest_query(call))
            for call, _ in _launches(kernel)
            if call.head_size == size
        }
        for size in tiles
    }

    assert run == tiles


def test_backward_problems_of_hopper_have_sinks_and_windows() -> None:
    calls = [call for call, _ in _launches("hopper_backward_kernel")]
    assert any(call.sinks is not None for call in calls)
    assert any(call.spec.window_left is not None for call in calls)


def _launched() -> Iterator[str]:
    for case, differentiate in sanitize.problems():
        if isinstance(case, Call):
            calls: list[Any] = [case.map(array_spec)]
        elif isinstance(case, LatentCase):
            calls = [case.call(with_lse=True).map(array_spec)]
        else:
            calls = [replace(case.call("cpu").map(array_spec), with_lse=True)]
            calls += [_backward(calls[0])] if differentiate else []
        for call in calls:
            yield from (launch.name for launch in plan_call(call, DeviceLimits()).launches)


def test_every_kernel_of_one_device_has_a_problem() -> None:
    several = ("sum over", "attention over devices")
    plans = {label: plan for label, plan in plans_in_use().items() if not label.startswith(several)}
    kernels = {launch.name for plan in plans.values() for launch in plan.launches}
    assert len(kernels) > 50
    assert kernels - set(_launched()) == set()
