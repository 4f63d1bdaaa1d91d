"""Which backward calls the Hopper kernel gets, and what it sees."""

from __future__ import annotations

import pytest

from tests.support.attention_plans import backward_plan
from torch_core.base.specs import ArraySpec, AttentionSpec
from torch_core.launch.plan import Descriptor, DeviceLimits, OperationPlan

_HOPPER = ["prepare_backward_kernel", "hopper_backward_kernel"]


def _names(**changes) -> list[str]:
    return [launch.name for launch in _plan(**changes).launches]


def _plan(**changes) -> OperationPlan:
    return backward_plan(**{"max_query_len": 256, **changes})


def _rows(heads: int, head_size: int, dtype: str = "bfloat16", **more) -> ArraySpec:
    return ArraySpec((300, heads, head_size), dtype, **more)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"with_d_lse": True},
        {"spec": AttentionSpec(scale=0.1, causal=False)},
        {"spec": AttentionSpec(scale=0.1, causal=False, window_left=200, window_right=56)},
        {"query": _rows(8, 64), "key": _rows(2, 64), "value": _rows(2, 64)},
        {name: _rows(8 if name == "query" else 2, 128, "float16") for name in ("query", "key", "value")},
        {"key": ArraySpec((300, 2, 128), "bfloat16", (8 * 128 * 3, 128, 1))},
        {"query": _rows(8, 256), "key": _rows(2, 256), "value": _rows(2, 256)},
        {"query": _rows(8, 192), "key": _rows(2, 192)},
    ],
)
def test_the_hopper_kernel_serves(changes):
    assert _names(**changes) == _HOPPER


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": DeviceLimits(arch=80)},
        {"limits": DeviceLimits(arch=100)},
        {"max_query_len": 255},
        {"spec": AttentionSpec(scale=0.1, window_left=255)},
        {"spec": AttentionSpec(scale=-0.1)},
        {"spec": AttentionSpec(scale=0.1, logits_soft_cap=30.0)},
        {"spec": AttentionSpec(scale=0.1, attention_chunk=64)},
        {"alibi_slopes": ArraySpec((8,), "float32")},
        {"seq_causal": ArraySpec((2,), "bool")},
        {"mm_prefix_range": ArraySpec((2, 1, 2), "int32")},
        {"out_dtype": "float32"},
        {"query": _rows(8, 256), "key": _rows(2, 256)},
        {"query": _rows(8, 192), "key": _rows(2, 192), "value": _rows(2, 192)},
        {"value": _rows(2, 64)},
        {"key": _rows(2, 128, aligned=False)},
        {"key": ArraySpec((300, 2, 128), "bfloat16", (259, 128, 1))},
    ],
)
def test_the_portable_kernels_serve(changes):
    assert "hopper_backward_kernel" not in _names(**changes)


def test_sinks_need_their_shares_summed_and_nothing_else():
    plan = _plan(sinks=ArraySpec((8,), "bfloat16"))
    assert [launch.name for launch in plan.launches] == [*_HOPPER, "sum_parts_kernel"]
    tiles = plan.launches[0].grid[0]
    assert dict(plan.scratch)["sink_parts"] == ArraySpec((8, tiles), "float32")
    assert dict(plan.outputs)["d_sinks"] == ArraySpec((8,), "bfloat16")


def test_gradients_of_128_are_added_in_order_though_they_need_not_be():
    assert _plan(deterministic=False) == _plan()
    heads = {name: _rows(heads, 64) for name, heads in (("query", 8), ("key", 2), ("value", 2))}
    assert _plan(**heads, deterministic=False) != _plan(**heads)


def test_there_is_a_program_without_a_tile_for_padding_whatever_the_lengths():
    # 129 keys of one sequence are two tiles of a head.
    plan = _plan(
        key=ArraySpec((129, 2, 128), "bfloat16"),
        value=ArraySpec((129, 2, 128), "bfloat16"),
        query_start_loc=ArraySpec((2,), "int32"),
        key_start_loc=ArraySpec((2,), "int32"),
    )
    assert plan.launches[1].grid == (3 * 2,)


def test_score_statistics_are_copied_tile_by_tile():
    plan = _plan()
    stats = dict(plan.launches[1].arguments)["row_stats"]
    assert isinstance(stats, Descriptor)
    assert stats.shape == (8 * (300 // 64 + 2 + 1) * 2 * 64,)
    assert stats.box == (128,)
