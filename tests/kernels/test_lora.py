"""The kernels of low-rank adapters, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.interpret import run_interpreted_operation
from tests.support.lora_cases import allowed_error, lora_call
from tests.support.triton_ops import run_triton
from torch_core import reference
from torch_core.adapters.tiles import row_tiles
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slices": (12, 7, 9), "dtype": "bfloat16"},
        {"slices": (12, 7), "rank": 16, "y_dtype": "float32", "dtype": "bfloat16"},
        {"slots": (1,), "num_slots": 2, "in_size": 300, "slices": (40,)},
        {"slots": (0,) * 21 + (-1, 1), "num_slots": 2, "rank": 20, "dtype": "float16", "slices": (270,)},
        {"slots": (0,) * 70 + (1, 0), "num_slots": 2, "dtype": "bfloat16"},
        {"slots": (-1, -1), "num_slots": 1},
        {"slots": (299, 7, -1, 7), "num_slots": 300, "slices": (12, 7), "dtype": "bfloat16"},
        {"slots": (2, 0), "slices": (70, 7, 9), "in_size": 300, "dtype": "bfloat16"},
        {"slots": (-1, 1), "rank": 16, "in_size": 256, "dtype": "float16", "y_dtype": "float32"},
        {"adds": False},
        {"slots": (-1, 1), "rank": 16, "slices": (64, 128), "dtype": "bfloat16", "adds": False},
        {"slots": (0,) * 70 + (-1,) * 65, "num_slots": 1, "slices": (128, 256), "dtype": "bfloat16", "adds": False},
        {"slots": (-1, -1), "adds": False},
        {"slices": (12, 12), "activation": "silu"},
        {"slices": (12, 7, 9, 5, 1, 3), "dtype": "bfloat16"},
        {"heads": (3, 1), "slices": (24,)},
        {"slots": (2, -1, 0, 2, 2, -1, -1, -1, 1), "rows_of_input": 3, "dtype": "bfloat16", "adds": False},
        {"heads": (1, 3), "in_size": 300, "slices": (40,), "dtype": "bfloat16", "adds": False},
        {
            "slots": (0,) * 70 + (-1,) * 65,
            "num_slots": 1,
            "slices": (128, 128),
            "dtype": "bfloat16",
            "activation": "silu",
        },
    ],
    ids=str,
)
def test_rows_get_their_slots_products(options, seed):
    call = lora_call(seed, **options)
    (exact,) = reference.add_lora_linear(call).values()
    given = call.map(torch.clone)
    y = {"out": given.y, **run_triton(given)}["out"]
    assert (y.double() - exact).abs().max() <= allowed_error(call, exact)


@pytest.mark.parametrize(
    "options",
    [
        {"slices": (12, 7, 9)},
        {"slots": (0,) * 21 + (-1, 1), "num_slots": 2, "rank": 20, "slices": (270,)},
        {"slots": (-1, 1), "slices": (64, 128), "adds": False},
        {"slots": (-1, -1), "adds": False},
        {"slots": (2,), "in_size": 300},
        {"heads": (3, 1), "slices": (24,)},
    ],
    ids=str,
)
def test_a_table_of_tiles_changes_no_bit(options, seed):
    call = lora_call(seed, **{"dtype": "bfloat16", **options})
    order, starts = call.token_indices_sorted_by_lora_ids.numpy(), call.lora_token_start_loc.numpy()
    given = replace(call, lora_tiles=torch.from_numpy(row_tiles(order, starts, np)))
    given, call = given.map(torch.clone), call.map(torch.clone)
    with_table, without = ({"out": each.y, **run_triton(each)}["out"] for each in (given, call))
    assert torch.equal(with_table, without)


def test_the_last_range_of_columns_may_end_sooner(seed):
    call = lora_call(seed, slices=(320,), dtype="bfloat16").map(torch.clone)
    (exact,) = reference.add_lora_linear(call).values()
    allowed = allowed_error(call, exact)
    plan = plan_call(call.map(array_spec), DeviceLimits(arch=89, num_sms=2))
    assert dict(plan.launches[1].constexprs)["COLUMNS"] == 128
    run_interpreted_operation(plan, call.arrays())
    assert (call.y.double() - exact).abs().max() <= allowed


def test_rows_without_an_adapter_keep_their_bits(seed):
    call = lora_call(seed, (-1, 0, -1), dtype="bfloat16")
    given = call.map(torch.clone)
    run_triton(given)
    assert torch.equal(given.y[[0, 2]], call.y[[0, 2]])


def test_a_rows_bits_do_not_depend_on_the_other_rows_adapters(seed):
    slots = (0, 1, 2, 1, 0)
    call = lora_call(seed, slots, num_slots=3, slices=(12, 7))
    given = call.map(torch.clone)
    run_triton(given)
    alone = lora_call(seed, (-1, 1, -1, -1, -1), num_slots=3, slices=(12, 7)).with_arrays(
        {name: getattr(call, name).clone() for name in ("x", "y", "lora_a", "lora_b")}
    )
    run_triton(alone)
    assert torch.equal(alone.y[1], given.y[1])
