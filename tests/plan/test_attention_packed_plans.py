"""Short queries on the Hopper prefill kernel: which calls pack heads, how many, and what the copy engine sees."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.attention_plans import dense_plan, paged_plan
from torch_core.attention.hopper_prefill import hopper_pack
from torch_core.base.specs import ArraySpec, AttentionSpec
from torch_core.launch.compile import compile_variant, kernel_variant
from torch_core.launch.plan import Descriptor, DeviceLimits, LaunchPlan, OperationPlan


def _short(group: int = 4, head_size: int = 128, **changes: Any) -> OperationPlan:
    """Four sequences with up to 100 new tokens, two key/value heads, tables of 8192 tokens, taken whole."""
    query = ArraySpec((400, 2 * group, head_size), "bfloat16")
    arguments: dict[str, Any] = {
        "max_query_len": 100, "head_size": head_size, "query": query, "kv_chunk_size": 1024, **changes,
    }  # fmt: skip
    return paged_plan(kv_cache=ArraySpec((64, 2, 16, 2, head_size), "bfloat16"), **arguments)


def _pack(plan: OperationPlan) -> int:
    """Heads side by side; 0 on the portable kernel."""
    launch = plan.launches[0]
    return dict(launch.constexprs)["PACK"] if launch.name == "hopper_prefill_kernel" else 0


def _query(launch: LaunchPlan) -> Descriptor:
    descriptor = dict(launch.arguments)["query"]
    assert isinstance(descriptor, Descriptor)
    return descriptor


@pytest.mark.parametrize(
    ("group", "max_query_len", "pack"),
    [
        (1, 100, 0), (2, 100, 2), (2, 32, 0), (2, 33, 2), (4, 100, 4), (4, 17, 4), (8, 9, 8), (8, 127, 8), (16, 5, 16),
        (32, 100, 16), (3, 100, 0), (6, 100, 0), (12, 100, 0), (4, 128, 1), (6, 128, 1), (16, 4096, 1),
    ],
)  # fmt: skip
def test_groups_of_a_power_of_two_are_packed_when_they_fill_half_a_tile(group, max_query_len, pack):
    assert _pack(_short(group, max_query_len=max_query_len)) == pack


def test_few_keys_and_many_sequences_stay_on_the_portable_kernel():
    facts = {"group": 4, "max_query_len": 64, "num_seqs": 64, "keys": 2048}
    assert hopper_pack(**facts) == 4
    assert hopper_pack(**{**facts, "keys": 511}) == hopper_pack(**{**facts, "num_seqs": 257}) == 0
    assert hopper_pack(**{**facts, "keys": 16, "num_seqs": 1000, "max_query_len": 128}) == 1
    assert _pack(_short(block_tables=ArraySpec((4, 31), "int32"))) == 0
    assert _pack(_short(block_tables=ArraySpec((4, 32), "int32"))) == 4


def test_dense_keys_count_by_their_mean():
    assert _pack(dense_plan(max_query_len=100)) == 0
    keys = ArraySpec((1024, 2, 128), "bfloat16")
    assert _pack(dense_plan(max_query_len=100, key=keys, value=keys)) == 4


def test_a_mixed_batch_keeps_its_shortest_queries_on_the_split_kernel():
    plan = _short()
    assert [launch.name for launch in plan.launches[1:]] == ["attention_split_kernel", "attention_combine_kernel"]
    assert dict(plan.launches[0].constexprs)["MIN_QUERY"] == 16 // 4 + 1


@pytest.mark.parametrize(("tokens", "launches"), [(4 * 512, 1), (4 * 512 - 1, 3)])
def test_where_every_query_may_be_the_longest_one_nobody_looks_for_short_ones(tokens, launches):
    query = ArraySpec((tokens, 64, 128), "bfloat16")
    plan = _short(32, query=query, max_query_len=512, kv_chunk_size=None)
    assert len(plan.launches) == launches
    assert dict(plan.launches[0].constexprs)["MIN_QUERY"] == (1 if launches == 1 else 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": DeviceLimits(arch=80)},
        {"spec": AttentionSpec(scale=0.1, logits_soft_cap=30.0)},
        {"query": ArraySpec((400, 8, 128), "bfloat16", (8 * 128 + 8, 128, 1))},
        {"query": ArraySpec((400, 8, 128), "bfloat16", aligned=False)},
    ],
)
def test_what_the_copy_engine_or_the_kernel_cannot_follow_stays_portable(changes):
    assert _pack(_short(**changes)) == 0


@pytest.mark.parametrize(("group", "head_size"), [(2, 128), (4, 64), (8, 256), (16, 128)])
def test_the_query_is_seen_as_tokens_heads_and_elements(group, head_size):
    query = _query(_short(group, head_size).launches[0])
    assert query.shape == (400, 2 * group, head_size)
    assert query.strides == (2 * group * head_size, head_size, 1)
    assert query.box == (64 // group, group, head_size)
    assert query.layout.rank == 3


def test_heads_inside_a_wider_array_keep_their_strides():
    wide = ArraySpec((400, 8, 128), "bfloat16", (3 * 8 * 256, 256, 1))
    assert _query(_short(query=wide).launches[0]).strides == (3 * 8 * 256, 256, 1)


def test_programs_are_no_more_than_tiles_of_packed_tokens_times_head_groups():
    few = _short(num_seqs=1, query=ArraySpec((70, 8, 128), "bfloat16"))
    assert few.launches[0].grid == ((70 // 32 + 2) * 2,)
    assert _short(query=ArraySpec((40000, 8, 128), "bfloat16")).launches[0].grid == (132,)


def test_the_compiled_copies_put_packed_rows_where_the_products_read_them():
    """64 rows of 128 bytes side by side for every 64 elements of a head: the tile of a warpgroup, swizzled alike."""
    plan = _short()
    compiled = compile_variant(kernel_variant(plan.launches[0], plan.specs), 90)
    assert tuple(compiled.metadata.tensordesc_meta[0]["block_size"]) == (16, 4, 64)
    ptx = compiled.asm["ptx"]
    copies = re.findall(r"cp\.async\.bulk\.tensor\.3d\S* \[(%\w+)\], \[%\w+, \{(%\w+), (%\w+), (%\w+)\}\]", ptx)
    (start, zero, head, token), (half, column, *_), (second, _, _, later), (second_half, *_) = copies
    offsets = dict(re.findall(rf"add\.s32 \s*(%\w+), {start}, (\d+);", ptx))
    assert [offsets[target] for target in (half, second, second_half)] == ["8192", "16384", "24576"]
    assert re.search(rf"mov\.b32 \s*{zero}, 0;", ptx)
    assert re.search(rf"mov\.b32 \s*{column}, 64;", ptx)
    assert re.search(rf"add\.s32 \s*{later}, {token}, 16;", ptx)
    assert [copy[1:] for copy in copies[1:]] == [(column, head, token), (zero, head, later), (column, head, later)]
