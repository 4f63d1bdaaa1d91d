"""The kernels of the gated delta rule's derivative, in Triton's interpreter, and its specification."""

from __future__ import annotations

import pytest
import torch

from tests.support.delta_cases import delta_backward_call, delta_call
from tests.support.triton_ops import run_triton
from torch_core import reference
from torch_core.base.errors import Unsupported
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec


@pytest.mark.parametrize(
    ("lens", "options"),
    [
        ((66, 1, 0), {"dtype": "bfloat16", "heads": (2, 1)}),
        ((9,), {"dtype": "float16", "gates": None, "states": False, "use_qk_l2norm_in_kernel": False}),
    ],
    ids=str,
)
def test_gradients_are_as_exact_as_torchs(lens, options, seed):
    call = delta_backward_call(delta_call(seed, lens, **{"heads": (1, 1), **options}))
    exact = reference.gated_delta_backward(call)
    narrow = reference.gated_delta_backward(call, compute_dtype=torch.float32)
    for name, found in run_triton(call).items():
        rounded = narrow[name].to(found.dtype).double()
        allowed = (rounded - exact[name]).abs().max() + torch.finfo(call.value.dtype).eps * exact[name].abs().max()
        assert (found.double() - exact[name]).abs().max() <= 2 * allowed, name


def test_the_specification_is_the_slope_of_the_forward_one(seed):
    call = delta_call(seed, (4, 1, 0, 2), heads=(2, 1), gates="gk", padding=0)
    call = call.map(lambda x: x.double().nan_to_num() if x.is_floating_point() else x)
    backward = delta_backward_call(call)
    found = reference.gated_delta_backward(backward)
    names, step, ends = ("query", "key", "value", "beta", "gk"), 1e-6, []
    ways = {name: torch.randn_like(getattr(call, name)) for name in names}
    for sign in (1, -1):
        moved = call.map(torch.clone).with_arrays({k: getattr(call, k) + sign * step * ways[k] for k in names})
        total = (reference.gated_delta_rule(moved) * backward.d_out).sum()
        kept = moved.cache_indices >= 0
        ends.append(total + (moved.states[moved.cache_indices.long()] * backward.d_last)[kept].sum())
    slope = sum((found[f"d_{name}"] * ways[name]).sum() for name in names)
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"gates": "gk"}, {"sizes": (130, 4)}], ids=str)
def test_what_the_kernels_do_not_differentiate_is_refused(change, seed):
    call = delta_backward_call(delta_call(seed, (4,), **{"dtype": "bfloat16", **change}))
    with pytest.raises(Unsupported, match="which implementation 'triton' does not serve; implementation 'torch' or"):
        plan_call(call.map(array_spec))
