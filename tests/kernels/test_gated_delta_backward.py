"""The kernels of the gated delta rule's derivative, in Triton's interpreter, and its specification."""

from __future__ import annotations

import pytest
import torch

from tests.support.delta_cases import delta_backward_call, delta_call
from tests.support.state_cases import assert_gradients_are_as_exact, assert_is_the_slope
from tests.support.triton_ops import run_triton
from torch_core import reference
from torch_core.base.errors import Unsupported
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec


@pytest.mark.parametrize(
    ("lens", "options"),
    [
        ((66, 1, 0), {"dtype": "bfloat16", "heads": (4, 2)}),
        ((66,), {"dtype": "bfloat16", "heads": (2, 1), "gates": "gk"}),
        ((9, 2), {"gates": "gk", "sizes": (8, 20)}),
        ((9, 2), {"dtype": "bfloat16", "sizes": (130, 4)}),
        ((9,), {"dtype": "float16", "gates": None, "states": False, "use_qk_l2norm_in_kernel": False}),
    ],
    ids=str,
)
def test_gradients_are_as_exact_as_torchs(lens, options, seed):
    call = delta_backward_call(delta_call(seed, lens, **{"heads": (1, 1), **options}))
    assert_gradients_are_as_exact(reference.gated_delta_backward, call, run_triton(call))


@pytest.mark.parametrize("gates", ["g", "gk"])
def test_gradients_after_strong_gates_have_the_digits_of_float32(gates, seed):
    call = delta_call(seed, (40,), heads=(1, 1), gates=gates, padding=0)
    getattr(call, gates)[2:20:4] = -torch.inf
    getattr(call, gates)[4:20:4] = -30.0
    call = delta_backward_call(call)
    assert_gradients_are_as_exact(reference.gated_delta_backward, call, run_triton(call))


@pytest.mark.parametrize("gates", ["g", "gk"])
def test_gradients_of_keys_that_are_alike_have_the_digits_of_float32(gates, seed):
    call = delta_call(seed, (40,), heads=(1, 1), gates=gates, padding=0)
    call.key[:] = call.key[0] + call.key / 32
    call.beta[:] = 1
    getattr(call, gates)[:] = 0
    call = delta_backward_call(call)
    assert_gradients_are_as_exact(reference.gated_delta_backward, call, run_triton(call))


def test_the_specification_is_the_slope_of_the_forward_one(seed):
    call = delta_call(seed, (3, 1, 0, 2), heads=(2, 1), gates="gk", padding=0)
    call = call.map(lambda x: x.double().nan_to_num() if x.is_floating_point() else x)
    assert_is_the_slope(reference.gated_delta_rule, reference.gated_delta_backward, delta_backward_call(call), call)


@pytest.mark.parametrize("change", [{"dtype": "float32", "sizes": (130, 4)}, {"sizes": (4, 260)}], ids=str)
def test_what_the_kernels_do_not_differentiate_is_refused(change, seed):
    call = delta_backward_call(delta_call(seed, (4,), **{"dtype": "bfloat16", **change}))
    with pytest.raises(Unsupported, match="which implementation 'triton' does not serve; implementation 'torch' or"):
        plan_call(call.map(array_spec))
