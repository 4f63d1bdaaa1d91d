"""Plans of latent attention: which kernel, how many chunks, what the copy engine sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.attention_plans import latent_call
from torch_core.base.specs import ArraySpec
from torch_core.latent.kernels.mla.plan import latent_chunk, latent_tile
from torch_core.launch.plan import Descriptor, DeviceLimits, OperationPlan
from torch_core.launch.planner import plan_call


def _plan(**changes: Any) -> OperationPlan:
    limits = {name: changes.pop(name) for name in ("arch", "shared_memory") if name in changes}
    return plan_call(latent_call(**changes), DeviceLimits(**limits))


def _kernel(**changes: Any) -> str:
    return _plan(**changes).launches[0].name


@pytest.mark.parametrize(
    ("changes", "hopper"),
    [
        ({"num_heads": 16}, False),
        ({"num_heads": 16, "num_seqs": 8}, True),
        ({"num_heads": 3, "num_seqs": 128, "table_tokens": 512}, True),
        ({"num_heads": 16, "num_seqs": 8, "arch": 80}, False),
        ({"num_heads": 16, "num_seqs": 7}, False),
        ({"num_heads": 17}, True),
        ({"num_heads": 128}, True),
        ({"num_heads": 8, "query_len": 4}, True),
        ({"num_heads": 128, "dtype": "float16"}, True),
        ({"num_heads": 128, "dtype": "float32"}, False),
        ({"num_heads": 128, "cache_dtype": "float8_e4m3fn"}, True),
        ({"num_heads": 128, "rank": 256}, False),
        ({"num_heads": 128, "block_size": 16}, True),
        ({"num_heads": 128, "block_size": 4}, False),
        ({"num_heads": 3, "block_size": 1}, True),
        ({"num_heads": 128, "block_size": 1, "query_len": 2}, False),
        ({"block_size": 1, "cache_dtype": "float8_e4m3fn"}, True),
        ({"num_heads": 17, "block_size": 16, "cache_dtype": "float8_e4m3fn", "k_scale": 0.5}, True),
        ({"num_heads": 17, "cache_dtype": "float8_e5m2"}, False),
        ({"block_size": 1, "latent_cache": ArraySpec((9, 1, 576), "bfloat16", (580, 580, 1))}, False),
        ({"block_size": 1, "latent_cache": ArraySpec((9, 1, 576), "bfloat16", aligned=False)}, False),
        ({"block_size": 1, "arch": 100}, False),
        ({"num_heads": 128, "arch": 80}, False),
        ({"num_heads": 128, "arch": 100}, False),
        ({"num_heads": 128, "sinks": ArraySpec((128,), "float32")}, True),
        ({"num_heads": 128, "k_scale": ArraySpec((1,), "float32")}, False),
        ({"num_heads": 128, "query": ArraySpec((4, 128, 576), "bfloat16", (128 * 1152, 1152, 1))}, True),
        ({"num_heads": 128, "query": ArraySpec((4, 128, 576), "bfloat16", (99_992, 576, 1))}, False),
        ({"num_heads": 128, "latent_cache": ArraySpec((9, 64, 576), "bfloat16", (2 * 64 * 576, 576, 1))}, True),
        ({"num_heads": 128, "latent_cache": ArraySpec((9, 64, 576), "bfloat16", (64 * 580, 580, 1))}, False),
        ({"num_heads": 17, "latent_cache": ArraySpec((256, 1, 656), "uint8"), "block_size": 1}, True),
        ({"num_heads": 17, "latent_cache": ArraySpec((9, 64, 656), "uint8", (2 * 64 * 656, 656, 1))}, True),
        ({"num_heads": 17, "latent_cache": ArraySpec((9, 4, 656), "uint8"), "block_size": 4, "query_len": 2}, True),
        ({"num_heads": 17, "latent_cache": ArraySpec((9, 64, 656), "uint8"), "dtype": "float16"}, False),
        ({"num_heads": 17, "latent_cache": ArraySpec((9, 64, 656), "uint8", (64 * 672, 672, 1))}, False),
        ({"num_heads": 17, "latent_cache": ArraySpec((9, 64, 656), "uint8", aligned=False)}, False),
    ],
)
def test_the_hopper_kernel_serves_what_it_can_and_is_worth_it(changes, hopper):
    assert (_kernel(**changes) == "hopper_latent_kernel") is hopper


@pytest.mark.parametrize(
    ("changes", "few"),
    [
        ({"cache_dtype": "float8_e4m3fn"}, True),
        ({"cache_dtype": "float8_e4m3fn", "k_scale": 0.5}, True),
        ({"cache_dtype": "float8_e4m3fn", "num_heads": 3, "query_len": 4}, True),
        ({"cache_dtype": "float8_e4m3fn", "dtype": "float16"}, True),
        ({"latent_cache": ArraySpec((256, 64, 656), "uint8")}, True),
        ({"latent_cache": ArraySpec((256, 64, 656), "uint8", (2 * 64 * 656, 656, 1))}, True),
        ({"latent_cache": ArraySpec((256, 64, 656), "uint8", (64 * 660, 660, 1))}, False),
        ({"latent_cache": ArraySpec((256, 4, 656), "uint8"), "block_size": 4}, False),
        ({"latent_cache": ArraySpec((256, 1, 656), "uint8"), "block_size": 1}, True),
        ({"latent_cache": ArraySpec((256, 1, 656), "uint8"), "block_size": 1, "query_len": 2, "num_heads": 8}, False),
        ({"latent_cache": ArraySpec((256, 1, 656), "uint8", (672, 672, 1)), "block_size": 1}, False),
        ({"cache_dtype": "float8_e4m3fn", "block_size": 1}, False),
        ({"cache_dtype": "float8_e5m2"}, False),
        ({"cache_dtype": "float8_e4m3fn", "num_heads": 17}, False),
        ({"cache_dtype": "float8_e4m3fn", "arch": 100}, False),
        ({"cache_dtype": "float8_e4m3fn", "dtype": "float32"}, False),
    ],
)
def test_few_rows_of_8_bits_have_a_kernel_of_their_own(changes, few):
    assert (_kernel(**changes) == "few_latent_kernel") is few


def test_gathered_rows_are_no_boxes():
    launch = _plan(num_heads=128, block_size=1).launches[0]
    assert [name for name, x in launch.arguments if isinstance(x, Descriptor)] == ["query", "query_rope"]


def test_a_latent_is_seen_twice_and_copied_once():
    launch = _plan(num_heads=128).launches[0]
    boxes = {name: x.box for name, x in launch.arguments if isinstance(x, Descriptor)}
    assert boxes == {"query": (64, 256), "query_rope": (64, 64), "latent_cache": (64, 256), "latent_rope": (64, 64)}
    assert _box(block_size=48) == 16
    assert _box(block_size=128) == 64


def _box(block_size: int) -> int:
    return dict(_plan(num_heads=128, block_size=block_size, table_tokens=48 * 128).launches[0].constexprs)["BOX"]


@pytest.mark.parametrize(
    ("num_seqs", "table_tokens", "row_tiles", "slots", "chunk"),
    [
        (1, 8192, 1, 264, 128),
        (8, 8192, 1, 264, 256),
        (64, 2048, 1, 264, 512),
        (128, 4096, 1, 264, 2048),
        (8, 8192, 2, 132, 1024),
        (64, 2048, 2, 132, 2048),
        (128, 4096, 2, 132, 4096),
        (16, 65536, 2, 132, 4096),
        (1000, 65536, 2, 132, 65536),
        (1, 1, 1, 264, 128),
        (3, 0, 1, 264, 128),
    ],
)
def test_a_batch_is_cut_into_what_runs_at_a_time(num_seqs, table_tokens, row_tiles, slots, chunk):
    found = latent_chunk(num_seqs=num_seqs, table_tokens=table_tokens, row_tiles=row_tiles, slots=slots)
    assert found == chunk


@pytest.mark.parametrize(
    ("num_seqs", "table_tokens", "changes", "few"),
    [
        (8, 131072, {}, 32),
        (1, 131072, {}, 256),
        # Chunks of the least size, a narrow table, one chunk for each sequence, and the caller's.
        (1, 32768, {}, None),
        (8, 16384, {}, None),
        (300, 131072, {}, None),
        (8, 131072, {"kv_chunk_size": 256}, None),
    ],
)
def test_sequences_that_are_shorter_than_the_table_have_as_many_chunks(num_seqs, table_tokens, changes, few):
    launches = _plan(num_seqs=num_seqs, num_heads=16, table_tokens=table_tokens, arch=80, **changes).launches
    for constants in (dict(launch.constexprs) for launch in launches):
        assert (constants["LEAST"], constants["FEW"]) == ((None, 1) if few is None else (128, few))


@pytest.mark.parametrize(
    ("num_seqs", "table_tokens", "num_heads", "changes", "found"),
    [
        # Chunks that run at a time and that fill the memory's time, room for lengths; a chunk, places of a sequence.
        (64, 8192, 16, {}, ((132, 66, 64), 4096, 3)),
        (64, 8192, 128, {}, ((66, 66, 64), 8192, 3)),
        (100, 8192, 128, {}, ((66, 66, 128), 8192, 2)),
        (8, 131072, 128, {}, ((66, 66, 32), 16384, 8)),
        # Short chunks, one chunk, a narrow table, one sequence, too many, the caller's chunks, a kernel without it.
        (8, 8192, 16, {}, (None, 512, 16)),
        (128, 4096, 16, {}, (None, 4096, 1)),
        (64, 2048, 16, {}, (None, 1024, 2)),
        (1, 131072, 16, {}, (None, 1024, 128)),
        (300, 8192, 16, {}, (None, 4096, 2)),
        (64, 8192, 128, {"kv_chunk_size": 1024}, (None, 1024, 8)),
        (64, 8192, 128, {"arch": 80}, (None, 4096, 2)),
    ],
)
def test_an_uneven_batch_may_have_chunks_for_all_sequences(num_seqs, table_tokens, num_heads, changes, found):
    plan = _plan(num_seqs=num_seqs, num_heads=num_heads, table_tokens=table_tokens, **changes)
    places = dict(plan.scratch)["partial_max"].shape[1] if plan.scratch else 1
    for constants in (dict(launch.constexprs) for launch in plan.launches):
        assert (constants.get("SHARED"), constants["CHUNK"], places) == found


def test_chunks_of_a_window_are_those_of_the_table():
    call = latent_call(num_seqs=8, table_tokens=131072)
    call = replace(call, spec=replace(call.spec, window_left=99))
    assert dict(plan_call(call).launches[0].constexprs)["LEAST"] is None


@pytest.mark.parametrize(
    ("rows", "arch", "shared_memory", "tile"),
    [
        (16, 89, 101376, (16, 32)),
        (17, 90, 232448, (32, 32)),
        (128, 80, 166912, (64, 32)),
        (128, 89, 101376, (32, 32)),
        (128, 90, 232448, (64, 64)),
        (128, 100, 232448, (64, 32)),
    ],
)
def test_a_tile_fits_its_device(rows, arch, shared_memory, tile):
    limits = DeviceLimits(arch=arch, shared_memory=shared_memory)
    found = latent_tile(rows=rows, padded=576, query_bytes=2, limits=limits)
    assert (found.block_m, found.block_n) == tile


def test_partial_results_are_planned_and_nothing_else_is_made():
    plan = _plan(num_heads=16, num_seqs=8, arch=80)
    assert [launch.name for launch in plan.launches] == ["latent_attention_kernel", "attention_combine_kernel"]
    assert {name: spec.shape for name, spec in plan.scratch} == {
        "partial_out": (8, 32, 16, 512),
        "partial_max": (8, 32, 16),
        "partial_sum": (8, 32, 16),
    }
    assert _plan(num_heads=16, num_seqs=300, table_tokens=2048).scratch == ()


def test_long_queries_keep_their_sums_to_themselves():
    plan = _plan(num_heads=16, query_len=9)
    assert (len(plan.launches), plan.scratch) == (1, ())


@pytest.mark.parametrize(
    ("changes", "early"),
    [
        ({"num_seqs": 1}, True),
        ({"num_seqs": 1, "num_heads": 128}, False),
        ({"num_seqs": 8, "num_heads": 128}, True),
        ({"num_seqs": 8, "num_heads": 128, "shared_memory": 101376}, False),
        ({"num_seqs": 1, "arch": 80}, False),
        ({"num_seqs": 8}, True),
        ({"num_seqs": 4, "table_tokens": 2048}, True),
    ],
)
def test_a_merge_begins_early_where_the_device_has_room(changes, early):
    launch, merge = _plan(**changes).launches
    assert merge.dependent == early
    assert dict(launch.constexprs)["MERGED"] == early
