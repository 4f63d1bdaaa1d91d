"""Which calls the fp8 Hopper prefill kernel gets, and how its descriptors see their arrays."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.attention_plans import paged_plan
from torch_core.attention.kernels.hopper_fp8.plan import hopper_fp8_tile
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec, AttentionSpec
from torch_core.launch.plan import ABSENT, Descriptor, DeviceLimits, LaunchPlan, OperationPlan, Pointer, Scalar

_FP8 = "float8_e4m3fn"
_SCALE = ArraySpec((1,), "float32")
_ROWS = "attention_rows_kernel"
_HOPPER = "hopper_fp8_prefill_kernel"


def _query(head_size: int = 128, dtype: str = _FP8, **more: Any) -> ArraySpec:
    return ArraySpec((1000, 8, head_size), dtype, **more)


def _cache(block_size: int = 16, head_size: int = 128, dtype: str = _FP8, **more: Any) -> ArraySpec:
    return ArraySpec((64, 2, block_size, 2, head_size), dtype, **more)


def _paged(**changes: Any) -> OperationPlan:
    whole = {"query": _query(), "kv_cache": _cache(), "max_query_len": 256, "kv_chunk_size": 1024}
    return paged_plan(**{**whole, **changes})


def _first(plan: OperationPlan) -> LaunchPlan:
    return plan.launches[0]


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_long_fp8_queries_over_fp8_pages_run_the_fp8_kernel(head_size, block_size):
    plan = _paged(query=_query(head_size), kv_cache=_cache(block_size, head_size))
    assert _first(plan).name == _HOPPER
    assert plan.launches[1].name == "attention_split_kernel"


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": AttentionSpec(scale=0.1, causal=False)},
        {"spec": AttentionSpec(scale=0.1, window_left=100, window_right=3)},
        {"sinks": ArraySpec((8,), "float32")},
        {"with_lse": True},
        {"q_scale": 0.5, "k_scale": 0.5, "v_scale": 2.0},
        {"q_scale": _SCALE, "k_scale": _SCALE, "v_scale": _SCALE},
        {"k_scale": _SCALE},
        {"out_dtype": "float16"},
        {"kv_cache": (ArraySpec((9, 16, 2, 128), _FP8),) * 2},
        {"query": _query(strides=(8 * 128 * 3, 128, 1))},
    ],
)
def test_the_fp8_kernel_serves(changes):
    assert _first(_paged(**changes)).name == _HOPPER


def test_scales_that_are_arrays_are_pointers_and_numbers_are_factors():
    arguments = dict(_first(_paged(q_scale=_SCALE, k_scale=0.5, v_scale=_SCALE)).arguments)
    assert [arguments[name] for name in ("q_scale", "k_scale", "v_scale")] == [
        Pointer("q_scale"), ABSENT, Pointer("v_scale"),
    ]  # fmt: skip
    assert arguments["scale"] == Scalar(0.1 * 0.5, "fp32")
    assert arguments["out_factor"] == Scalar(1.0, "fp32")


@pytest.mark.parametrize("scale", [ArraySpec((2,), "float32"), ArraySpec((1,), "bfloat16")])
def test_a_scale_is_one_float32(scale):
    with pytest.raises(InvalidInput, match=r"k_scale (is|has)"):
        _paged(k_scale=scale)


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": DeviceLimits(arch=89)},
        {"limits": DeviceLimits(arch=100)},
        {"max_query_len": 100, "query": ArraySpec((1000, 6, 128), _FP8)},
        {"spec": AttentionSpec(scale=-0.1)},
        {"spec": AttentionSpec(scale=0.1, logits_soft_cap=30.0)},
        {"spec": AttentionSpec(scale=0.1, attention_chunk=64)},
        {"alibi_slopes": ArraySpec((8,), "float32")},
        {"seq_causal": ArraySpec((4,), "bool")},
        {"out_dtype": _FP8, "out_scale": _SCALE},
        {"k_scale_cache": ArraySpec((64, 16, 2), "float32"), "v_scale_cache": ArraySpec((64, 16, 2), "float32")},
        {"query": _query(dtype="float8_e5m2"), "kv_cache": _cache(dtype="float8_e5m2")},
        {"kv_cache": _cache(dtype="float8_e5m2")},
        {"query": _query(dtype="bfloat16")},
        {"out_dtype": "float32"},
        {"out_dtype": _FP8, "out_scale": 0.5},
        {"query": _query(96), "kv_cache": _cache(head_size=96)},
        {"kv_cache": _cache(block_size=4)},
        {"kv_cache": _cache(aligned=False)},
        {"kv_cache": _cache(strides=(2 * 16 * 2 * 136, 16 * 2 * 136, 2 * 136, 136, 1))},
        {"query": _query(aligned=False)},
    ],
)
def test_the_portable_kernel_keeps(changes):
    assert _first(_paged(**changes)).name == _ROWS


def test_keys_and_values_of_a_cache_are_rows_of_one_matrix_of_bytes():
    launch = _first(_paged(query=_query(64), kv_cache=_cache(head_size=64)))
    descriptors = {name: value for name, value in launch.arguments if isinstance(value, Descriptor)}
    constexprs = dict(launch.constexprs)
    assert descriptors["key_cache"] == descriptors["value_cache"]
    assert descriptors["key_cache"].shape == (64 * 2 * 16, 2 * 64)
    assert descriptors["key_cache"].box == (16, 64)
    assert descriptors["query"].layout.swizzle_byte_width == 64
    assert (constexprs["BLOCK_ROWS"], constexprs["VALUE_ROW"]) == (32, 16)


@pytest.mark.parametrize("max_query_len", [512, 8192])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_the_registers_of_a_tile_fit_a_multiprocessor(head_size, max_query_len):
    tile = hopper_fp8_tile(head_size=head_size, max_query_len=max_query_len)
    assert tile is not None
    registers = (tile.consumer_registers, tile.transposer_registers, tile.producer_registers)
    assert all(number % 8 == 0 for number in registers)
    # Warps come in warpgroups, in which the warps that load lie behind those that transpose.
    helpers = registers[1:] if tile.transposer_warps == 4 else [max(registers[1:])]
    warpgroups = tile.warpgroups + len(helpers)
    # What a thread has when the kernel starts, in steps of 8: no more than that can be handed on.
    at_start = 65536 // (128 * warpgroups) // 8 * 8
    assert tile.warpgroups * registers[0] + sum(helpers) <= at_start * warpgroups
