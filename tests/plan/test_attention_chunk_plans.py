"""Few query tiles over many keys on Hopper: which calls are cut into chunks, into how many, and what that needs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.attention_plans import paged_plan
from torch_core.attention.hopper_prefill import hopper_chunk
from torch_core.base.specs import ArraySpec, AttentionSpec
from torch_core.launch.plan import DeviceLimits, OperationPlan, Scalar

_IN_CHUNKS = ["hopper_prefill_kernel", "attention_combine_kernel"]


def _chunk(seqs: int, new: int, tokens: int = 8192, **changes: Any) -> OperationPlan:
    """Plans 32 query and 8 key/value heads over tables of so many tokens."""
    arguments: dict[str, Any] = {
        "num_seqs": seqs,
        "query": ArraySpec((seqs * new, 32, 128), "bfloat16"),
        "kv_cache": ArraySpec((64, 2, 16, 8, 128), "bfloat16"),
        "block_tables": ArraySpec((seqs, tokens // 16), "int32"),
        "max_query_len": new,
        **changes,
    }
    return paged_plan(**arguments)


def _e4m3(
    seqs: int, new: int, *, num_heads: int = 32, num_tokens: int | None = None, tokens: int = 8192, **changes: Any
) -> OperationPlan:
    query = ArraySpec((num_tokens or seqs * new, num_heads, 128), "float8_e4m3fn")
    return _chunk(seqs, new, tokens, query=query, kv_cache=ArraySpec((64, 2, 16, 8, 128), query.dtype), **changes)


def _names(plan: OperationPlan) -> list[str]:
    return [launch.name for launch in plan.launches]


def _size(plan: OperationPlan) -> int:
    """Keys of a chunk; 0 where rows are taken whole."""
    size = dict(plan.launches[0].arguments).get("chunk")
    return int(size.value) if isinstance(size, Scalar) else 0


@pytest.mark.parametrize(
    ("seqs", "new", "tokens", "size"),
    [(1, 64, 8192, 1024), (1, 128, 8192, 2048), (4, 32, 8192, 2048), (1, 300, 8192, 2048), (1, 64, 2048, 256)],
)  # fmt: skip
def test_few_tiles_are_cut_so_that_chunks_fill_the_device(seqs, new, tokens, size):
    plan = _chunk(seqs, new, tokens)
    assert _names(plan) == _IN_CHUNKS
    assert _size(plan) == size
    assert plan.launches[0].grid == (132,)


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize(("seqs", "new", "pack"), [(1, 64, 4), (1, 128, 1), (4, 32, 4), (1, 300, 1)])
def test_few_tiles_of_e4m3_are_cut_as_those_of_16_bits(seqs, new, pack, head_size):
    dtypes = {"bfloat16": "hopper_prefill_kernel", "float8_e4m3fn": "hopper_fp8_prefill_kernel"}
    plans = [
        _chunk(
            seqs, new,
            query=ArraySpec((seqs * new, 32, head_size), dtype),
            kv_cache=ArraySpec((64, 2, 16, 8, head_size), dtype),
        )
        for dtype in dtypes
    ]  # fmt: skip
    assert [_names(plan) for plan in plans] == [[name, "attention_combine_kernel"] for name in dtypes.values()]
    assert _size(plans[0]) == _size(plans[1]) > 0
    assert plans[0].scratch == plans[1].scratch
    assert [dict(plan.launches[0].constexprs)["PACK"] for plan in plans] == [pack, pack]


@pytest.mark.parametrize(
    ("seqs", "new", "pack"), [(8, 128, 1), (16, 64, 4), (32, 32, 4), (64, 16, 4), (128, 8, 4), (64, 8, 4), (16, 16, 4)]
)
def test_tiles_of_e4m3_that_fill_the_device_are_taken_whole(seqs, new, pack):
    plan = _e4m3(seqs, new)
    assert _names(plan) == ["hopper_fp8_prefill_kernel"]
    assert dict(plan.launches[0].constexprs)["PACK"] == pack


@pytest.mark.parametrize(("seqs", "new"), [(8, 16), (4, 16), (1, 8)])
def test_few_short_queries_of_e4m3_are_packed_and_cut(seqs, new):
    plan = _e4m3(seqs, new)
    assert _names(plan) == ["hopper_fp8_prefill_kernel", "attention_combine_kernel"]
    assert dict(plan.launches[0].constexprs)["PACK"] == 4


@pytest.mark.parametrize(
    ("seqs", "new", "changes"),
    [
        (64, 4, {}),
        (64, 1, {}),
        (64, 16, {"kv_chunk_size": 1024}),
        (64, 16, {"limits": DeviceLimits(arch=100)}),
        (64, 16, {"tokens": 256}),
        (64, 8, {"num_heads": 6 * 8}),
        (64, 2, {"num_heads": 32 * 8}),
    ],
)
def test_other_short_queries_of_e4m3_stay_on_the_split_kernel(seqs, new, changes):
    assert _names(_e4m3(seqs, new, **changes))[0] == "attention_split_kernel"


def test_the_short_queries_beside_long_ones_of_e4m3_stay_on_the_split_kernel():
    names = _names(_e4m3(64, 200, num_tokens=1000))
    assert names[:2] == ["hopper_fp8_prefill_kernel", "attention_split_kernel"]


@pytest.mark.parametrize(("seqs", "new"), [(8, 128), (16, 64), (32, 32), (8, 512), (1, 8192)])
def test_tiles_that_fill_the_device_are_taken_whole(seqs, new):
    assert _size(_chunk(seqs, new)) == 0


@pytest.mark.parametrize("changes", [{"kv_chunk_size": 1024}, {"limits": DeviceLimits(arch=80)}, {"tokens": 496}])
def test_a_fixed_chunk_another_device_or_a_short_table_keep_rows_whole(changes):
    assert "attention_combine_kernel" not in _names(_chunk(1, 128, **changes))


def test_what_the_hopper_kernel_does_not_serve_is_not_cut():
    assert _names(_chunk(1, 128, spec=AttentionSpec(scale=0.1, logits_soft_cap=30.0))) == ["attention_rows_kernel"]


@pytest.mark.parametrize(("seqs", "new"), [(1, 16), (8, 16), (40, 16), (64, 8)])
def test_short_queries_stay_on_the_split_kernel(seqs, new):
    assert _names(_chunk(seqs, new))[0] == "attention_split_kernel"


@pytest.mark.parametrize("changes", [{"kv_chunk_size": 1024}, {"tokens": 2048}, {"tokens": 16384}])
def test_tall_tiles_of_many_short_queries_are_taken_whole_where_they_would_be_cut(changes):
    assert _names(_chunk(64, 16)) == ["attention_rows_kernel"]
    assert _names(_chunk(64, 16, **changes))[0] == "attention_split_kernel"


def test_chunks_are_no_more_than_64_mib_hold():
    plan = _chunk(1, 640, 131072)
    assert dict(plan.scratch)["partial_out"] == ArraySpec((1024, 4, 32, 128), "float32")
    assert _names(_chunk(1, 4096, 131072)) == ["hopper_prefill_kernel"]


def test_a_window_is_cut_by_what_rows_see_and_not_by_the_table():
    plan = _chunk(1, 128, 65536, spec=AttentionSpec(scale=0.1, window_left=2047))
    assert _size(plan) == _size(_chunk(1, 128, 2048 + 127))
    assert dict(plan.scratch)["partial_max"].shape == (128, 5, 32)


def test_partials_have_a_row_for_each_query_chunk_and_head_up_to_a_power_of_two_of_queries():
    plan = _chunk(1, 100)
    assert dict(plan.scratch) == {
        "partial_out": ArraySpec((128, 4, 32, 128), "float32"),
        "partial_max": ArraySpec((128, 4, 32), "float32"),
        "partial_sum": ArraySpec((128, 4, 32), "float32"),
    }
    combine = plan.launches[1]
    assert combine.grid == (128, 32)
    assert dict(combine.constexprs)["MIN_CHUNKS"] == 1


def test_a_chunk_is_whole_tiles_and_cuts_no_further_than_it_gains():
    for tiles in range(1, 200, 7):
        for keys in range(128, 40000, 977):
            size = hopper_chunk(tiles=tiles, keys=keys, num_sms=132, max_chunks=9)
            assert size % 128 == 0
            assert size == 0 or (256 <= size < keys <= 9 * size)
