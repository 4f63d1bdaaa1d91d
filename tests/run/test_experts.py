"""A layer of experts on CPU tensors, against the reference, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.expert_cases import assert_as_exact_as_torch, experts_call
from torch_core import ops
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.experts.call import ACTIVATIONS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_is_the_weighted_sum_of_each_tokens_experts(activation, dtype, seed):
    call = experts_call(seed, 9, activation=activation, dtype=dtype, bias=True, unused=0.2)
    assert_as_exact_as_torch(call, ops.run(call)["out"])


def test_no_token_gives_no_row(seed):
    assert ops.run(experts_call(seed, 0))["out"].shape == (0, 48)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": torch.zeros(3, 4).int()}, "topk_ids has shape .3, 4.; it must be .* top_k = 2, that of topk_we"),
        ({"topk_ids": torch.zeros(3, 2)}, "topk_ids is float32; it must be int32"),
        ({"down_kernel": torch.zeros(8, 9, 48)}, "gate_up_kernel has 80 columns; they must be gate and up of down_ke"),
        ({"down_kernel": torch.zeros(7, 40, 48)}, "down_kernel has shape .* num_experts = 8, that of gate_up_kernel"),
        ({"down_bias": torch.zeros(8, 40)}, "down_bias has shape .8, 40.; it must be .* hidden_size = 48"),
        ({"down_kernel": torch.zeros(8, 40, 48).half()}, "down_kernel is float16; beside hidden_states of float32"),
        ({"topk_weights": torch.zeros(3, 2).double()}, "topk_weights is float64; beside hidden_states of float32 it"),
        ({"activation": "tanh"}, "activation is 'tanh'; use one of silu, gelu"),
        ({"out_dtype": "float16"}, "out_dtype is 'float16'; it must be None, 'float32' or 'float32'"),
    ],
)
def test_a_bad_call_is_refused(change, message):
    with pytest.raises(InvalidInput, match=message):
        ops.run(replace(experts_call(1, 3), **change))


def test_experts_of_no_size_are_refused():
    with pytest.raises(InvalidInput, match=r"gate_up_kernel has shape .8, 0, 80.; there must be at least one expert"):
        ops.run(experts_call(1, 3, hidden=1).with_arrays({
            "hidden_states": torch.zeros(3, 0), "gate_up_kernel": torch.zeros(8, 0, 80),
            "down_kernel": torch.zeros(8, 40, 0),
        }))  # fmt: skip


def test_float64_is_jnps(seed):
    call = experts_call(seed, 3)
    wide = call.with_arrays({name: x.double() for name, x in call.arrays().items() if x.is_floating_point()})
    with pytest.raises(Unsupported, match="hidden_states is float64, which implementation 'torch' does not serve"):
        ops.run(wide)
