"""What the Hopper backward pass does to rows before its main kernel, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.attention_cases import dense_case
from tests.support.backward_cases import backward_call
from tests.support.interpret import run_interpreted_operation
from torch_core import ops, reference
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec


@pytest.mark.parametrize("with_d_lse", [False, True])
def test_the_shares_of_tiles_add_up_to_the_gradient_of_the_sinks(with_d_lse: bool, seed: int) -> None:
    """Rows that see nothing, and rows of padding, whose gradients are NaN, have no share."""
    case = dense_case(
        seed, key_lens=[300, 5, 0], query_lens=[270, 9, 3], num_heads=2, num_kv_heads=1, head_size=64,
        dtype="bfloat16", padding_tokens=5, sinks=np.array([0.5, -1.0], np.float32),
    )  # fmt: skip
    call = backward_call(case, ops.run, with_d_lse=with_d_lse)
    plan = plan_call(call.map(array_spec))
    first, *_, last = plan.launches
    assert (first.name, last.name) == ("prepare_backward_kernel", "sum_parts_kernel")
    outputs = dict(plan.outputs)
    written = tuple((name, outputs[name]) for name in ("d_query", "d_sinks"))
    alone = replace(plan, launches=(first, last), outputs=written)
    found = run_interpreted_operation(alone, call.arrays())["d_sinks"]
    exact = reference.attention_backward(call, compute_dtype=torch.float64)["d_sinks"]
    real = {name: x[: int(call.query_start_loc[-1])].double() for name, x in call.arrays().items()}
    weights = torch.exp(real["sinks"] - real["lse"].nan_to_num(neginf=torch.inf))
    products = (real["out"] * real["d_out"]).abs().sum(-1)
    # The kernel sees the output rounded to bfloat16, by half an eps of each element at most.
    bound = torch.finfo(torch.bfloat16).eps * (weights * products).sum(0)
    assert ((found.double() - exact).abs() <= bound).all()
    assert (exact.abs() > bound).any()
