"""Which calls the Hopper prefill kernel gets, and how its descriptors see their arrays."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.attention_plans import dense_plan, paged_plan
from torch_core.attention.kernels.hopper.plan import hopper_tile
from torch_core.base.specs import ArraySpec, AttentionSpec
from torch_core.launch.plan import Descriptor, DeviceLimits, LaunchPlan, OperationPlan

_ROWS = "attention_rows_kernel"
_HOPPER = "hopper_prefill_kernel"


def _cache(block_size: int = 16, head_size: int = 128, dtype: str = "bfloat16", **more: Any) -> ArraySpec:
    return ArraySpec((64, 2, block_size, 2, head_size), dtype, **more)


def _rows(size: int, padding: int = 0) -> ArraySpec:
    """One of a pair of caches, with rows of padding behind each block."""
    return ArraySpec((9, 16, 2, size), "bfloat16", ((16 + padding) * 2 * size, 2 * size, size, 1))


def _paged(**changes: Any) -> OperationPlan:
    return paged_plan(**{"num_tokens": 1000, "max_query_len": 256, "kv_chunk_size": 1024, **changes})


def _first(plan: OperationPlan) -> LaunchPlan:
    return plan.launches[0]


def _descriptors(plan: OperationPlan) -> dict[str, Descriptor]:
    return {name: value for name, value in _first(plan).arguments if isinstance(value, Descriptor)}


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 48, 64, 128, 192, 256])
def test_long_queries_over_pages_run_the_hopper_kernel(head_size, block_size):
    plan = _paged(head_size=head_size, kv_cache=_cache(block_size, head_size))
    assert _first(plan).name == _HOPPER
    assert plan.launches[1].name == "attention_split_kernel"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"spec": AttentionSpec(scale=0.1, causal=False)},
        {"spec": AttentionSpec(scale=0.1, window_left=100, window_right=3)},
        {"sinks": ArraySpec((8,), "float32")},
        {"with_lse": True},
        {"k_scale": 0.5, "v_scale": 2.0},
        {"kv_cache": (ArraySpec((9, 16, 2, 128), "bfloat16"),) * 2},
        {"query": ArraySpec((1000, 8, 128), "bfloat16", (8 * 128 * 3, 128, 1))},
        {"out": ArraySpec((1000, 8, 128), "bfloat16", (2048, 256, 1))},
        {"query": ArraySpec((1000, 8, 128), "float16"), "kv_cache": _cache(dtype="float16")},
    ],
)
def test_the_hopper_kernel_serves(changes):
    assert _first(_paged(**changes)).name == _HOPPER


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": DeviceLimits(arch=80)},
        {"limits": DeviceLimits(arch=100)},
        {"max_query_len": 100, "query": ArraySpec((1000, 2, 128), "bfloat16")},
        {"spec": AttentionSpec(scale=-0.1)},
        {"spec": AttentionSpec(scale=0.1, logits_soft_cap=30.0)},
        {"spec": AttentionSpec(scale=0.1, attention_chunk=64)},
        {"alibi_slopes": ArraySpec((8,), "float32")},
        {"seq_causal": ArraySpec((4,), "bool")},
        {"mm_prefix_range": ArraySpec((4, 1, 2), "int32")},
        {"k_scale": ArraySpec((1,), "float32")},
        {"kv_cache": _cache(dtype="float8_e4m3fn")},
        {"out_dtype": "float32"},
        {"kv_cache": _cache(block_size=4)},
        {"kv_cache": _cache(block_size=20)},
        {"kv_cache": _cache(aligned=False)},
        {"kv_cache": _cache(strides=(2 * 16 * 2 * 129, 16 * 2 * 129, 2 * 129, 129, 1))},
        {"kv_cache": _cache(strides=(2 * 16 * 2 * 128, 16 * 2 * 128, 128, 16 * 128, 1))},
        {"kv_cache": (ArraySpec((9, 16, 2, 128), "bfloat16"), ArraySpec((9, 16, 2, 64), "bfloat16"))},
        {"query": ArraySpec((1000, 8, 128), "bfloat16", aligned=False)},
        {"out": ArraySpec((1000, 8, 128), "bfloat16", (2047, 128, 1))},
        {"head_size": 96},
        {"kv_cache": (_rows(128), _rows(128, padding=16))},
        {"query": ArraySpec((1000, 8, 192), "bfloat16"), "kv_cache": (_rows(192), _rows(192))},
        {
            "query": ArraySpec((1000, 8, 192), "bfloat16"),
            "kv_cache": (_rows(192), _rows(128)),
            "max_query_len": 100,
        },
        {"kv_cache": ArraySpec((2**27, 2, 16, 2, 128), "bfloat16")},
    ],
)  # fmt: skip
def test_the_portable_kernel_keeps(changes):
    assert _first(_paged(**changes)).name == _ROWS


@pytest.mark.parametrize(("max_query_len", "warpgroups"), [(256, 2), (8192, 3)])
def test_keys_of_192_elements_are_copied_in_two_parts_beside_values_of_128(max_query_len, warpgroups):
    query = ArraySpec((1000, 8, 192), "bfloat16")
    for plan in (
        _paged(query=query, kv_cache=(_rows(192), _rows(128)), max_query_len=max_query_len),
        dense_plan(query=query, key=query, value=ArraySpec((1000, 8, 128), "bfloat16"), max_query_len=max_query_len),
    ):
        constexprs = dict(_first(plan).constexprs)
        assert _first(plan).name == _HOPPER
        assert (constexprs["HEAD_SIZE"], constexprs["REST_SIZE"], constexprs["WARPGROUPS"]) == (128, 64, warpgroups)
        boxes = {name: descriptor.box[1] for name, descriptor in _descriptors(plan).items()}
        assert boxes == {"query": 128, "key_cache": 128, "value_cache": 128, "query_rest": 64, "key_rest": 64}


def test_dense_keys_run_the_hopper_kernel_but_an_empty_array_of_them_does_not():
    assert _first(dense_plan()).name == _HOPPER
    empty = ArraySpec((0, 2, 128), "bfloat16")
    assert _first(dense_plan(key=empty, value=empty)).name == _ROWS


@pytest.mark.parametrize(
    ("head_size", "max_query_len", "warpgroups"),
    [(64, 256, 2), (64, 2047, 2), (64, 2048, 3), (64, 8192, 3), (128, 2047, 2), (128, 8192, 3), (256, 8192, 2)],
)
def test_three_warpgroups_share_a_tile_of_long_queries_with_heads_up_to_128(head_size, max_query_len, warpgroups):
    plan = _paged(head_size=head_size, max_query_len=max_query_len)
    assert dict(_first(plan).constexprs)["WARPGROUPS"] == warpgroups


@pytest.mark.parametrize(("width", "warpgroups"), [(40, 2), (127, 2), (128, 3)])
def test_queries_are_no_longer_than_a_table_is_wide(width, warpgroups):
    # A step of 8,192 tokens may hold one prompt of as many, unless the model's length forbids it.
    plan = _paged(head_size=128, max_query_len=8192, block_tables=ArraySpec((4, width), "int32"))
    assert dict(_first(plan).constexprs)["WARPGROUPS"] == warpgroups


@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
@pytest.mark.parametrize("max_query_len", [256, 8192])
def test_the_registers_of_a_tile_fit_a_multiprocessor(head_size, max_query_len):
    tile = hopper_tile(head_size=head_size, max_query_len=max_query_len)
    assert tile is not None
    # The two warps that load are padded to a warpgroup; the first multiplying one may get what the others leave.
    warpgroups = tile.warpgroups * tile.consumer_registers + tile.producer_registers
    assert warpgroups * 128 <= 65536
    assert tile.consumer_registers % 8 == tile.producer_registers % 8 == 0


@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
def test_all_tiles_of_a_head_size_have_keys_in_the_same_steps(head_size):
    """So a row has the same bits in all of them."""
    tiles = [hopper_tile(head_size=head_size, max_query_len=length) for length in (128, 2048, 1 << 20)]
    assert len({tile.block_n for tile in tiles if tile is not None}) == 1


@pytest.mark.parametrize(("num_kv_heads", "heads"), [(8, 8), (7, 4), (1, 4), (6, 8)])
def test_heads_worked_on_side_by_side_divide_all_of_them(num_kv_heads, heads):
    cache = ArraySpec((64, 2, 16, num_kv_heads, 128), "bfloat16")
    query = ArraySpec((1000, 4 * num_kv_heads, 128), "bfloat16")
    assert dict(_first(_paged(kv_cache=cache, query=query)).constexprs)["HEADS_TOGETHER"] == heads


def test_keys_and_values_of_a_cache_are_rows_of_one_matrix():
    plan = _paged()
    descriptors = _descriptors(plan)
    constexprs = dict(_first(plan).constexprs)
    assert descriptors["key_cache"] == descriptors["value_cache"]
    # Eights of rows, parts of 64 columns, and these: a block is one box.
    assert descriptors["key_cache"].shape == (64 * 2 * 2, 2 * 2, 8, 64)
    assert descriptors["key_cache"].strides == (8 * 256, 64, 256, 1)
    assert descriptors["key_cache"].box == (2, 2, 8, 64)
    assert (constexprs["BLOCK_ROWS"], constexprs["VALUE_ROW"]) == (32, 16)


def test_heads_that_are_not_whole_parts_apart_keep_a_matrix_of_rows():
    head, token = 136, 2 * 136
    wide = ArraySpec((64, 2, 16, 2, 128), "bfloat16", (32 * token, 16 * token, token, head, 1))
    assert _descriptors(_paged(kv_cache=wide))["key_cache"].box == (16, 128)


def test_a_pair_of_caches_has_a_matrix_each():
    plan = _paged(kv_cache=(ArraySpec((9, 256, 2, 128), "bfloat16"),) * 2)
    descriptors = _descriptors(plan)
    constexprs = dict(_first(plan).constexprs)
    assert [descriptors[name].buffer for name in ("key_cache", "value_cache")] == ["key_cache", "value_cache"]
    assert descriptors["key_cache"].shape == (9 * 32, 2 * 2, 8, 64)
    assert descriptors["key_cache"].box[0] < 32
    assert (constexprs["BLOCK_ROWS"], constexprs["VALUE_ROW"]) == (256, 0)


def test_one_program_runs_on_each_multiprocessor_and_no_more_than_there_is_work():
    assert _first(_paged(limits=DeviceLimits(num_sms=78))).grid == (78,)
    tall = _paged(head_size=64, num_tokens=400, num_seqs=1, max_query_len=2048)
    assert _first(tall).grid == ((400 // 192 + 2) * 8,)
    assert _first(dense_plan(query=ArraySpec((130, 2, 128), "bfloat16"), query_start_loc=ArraySpec((2,), "int32"),
                         key_start_loc=ArraySpec((2,), "int32"))).grid == (6,)  # fmt: skip
