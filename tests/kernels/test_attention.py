"""The attention kernels in Triton's interpreter, against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import assert_matches_reference, dense_case, paged_case
from tests.support.interpret import run_interpreted_operation
from tests.support.kernel_cases import interpreter_case
from tests.support.triton_ops import attention_with_lse, paged_attention, paged_attention_with_lse
from torch_core.attention import partials
from torch_core.attention.kernels.split import plan as split
from torch_core.base.specs import AttentionSpec
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(40, 60))]
)
def test_a_random_problem_is_as_exact_as_torch_in_its_dtype(seed):
    case = interpreter_case(seed)
    out, lse = case.run(paged_attention_with_lse if case.paged else attention_with_lse)
    assert_matches_reference(case, out, lse)


@pytest.mark.parametrize("spec", [AttentionSpec(scale=0.25, window_left=150)])
def test_a_long_query_walks_edge_and_body_tiles(spec, seed):
    case = paged_case(seed, seq_lens=[300], query_lens=[140], num_heads=1, num_kv_heads=1, head_size=16, spec=spec)
    out, lse = case.run(paged_attention_with_lse)
    assert_matches_reference(case, out, lse)


def test_a_sequence_of_several_chunks_is_merged(seed):
    case = paged_case(seed, seq_lens=[300, 128, 129], query_lens=[1, 1, 1], num_heads=2, num_kv_heads=1, head_size=16)
    out, lse = case.run(paged_attention_with_lse)
    assert_matches_reference(case, out, lse)


def test_chunks_are_merged_in_several_turns_and_read_behind_the_lengths(seed, monkeypatch):
    monkeypatch.setattr(partials, "_COMBINE_CHUNKS", 2)
    monkeypatch.setattr(partials, "_READ_AHEAD_BYTES", 0)
    case = paged_case(seed, seq_lens=[300, 128, 129], query_lens=[1, 1, 1], num_heads=2, num_kv_heads=1, head_size=16)
    plan = plan_call(case.call().map(array_spec), DeviceLimits(arch=89))
    constants = dict(plan.launches[1].constexprs)
    assert not constants["AHEAD"]
    assert constants["BLOCK_CHUNKS"] == 2
    assert_matches_reference(case, run_interpreted_operation(plan, case.call().arrays())["out"])


@pytest.mark.parametrize(("seq_len", "columns", "number"), [(1420, 0, 3), (700, 89, 3), (390, 89, 2), (3, 89, 1)])
def test_chunks_of_one_sequence_follow_from_its_length(seq_len, columns, number, seed, monkeypatch):
    """One that fills its table has the expected chunks, a shorter one has smaller ones in the same table."""
    for name, value in (("_WIDE_WORK", 0), ("_SMALL_TARGET", 3)):
        monkeypatch.setattr(split, name, value)
    case = paged_case(seed, seq_lens=[seq_len], query_lens=[2], num_heads=2, num_kv_heads=1, head_size=16)
    tables = case.tensors("cpu")["block_tables"]
    if columns:
        tables = torch.cat([tables, torch.full((1, columns - tables.shape[1]), 1 << 20, dtype=torch.int32)], 1)
    call = case.call(block_tables=tables)
    plan = plan_call(call.map(array_spec), DeviceLimits(arch=89))
    assert [dict(launch.constexprs)["LEAST"] for launch in plan.launches] == [128, 128]
    scratch = {name: torch.full(spec.shape, torch.nan) for name, spec in plan.scratch}
    assert_matches_reference(case, run_interpreted_operation(plan, {**call.arrays(), **scratch})["out"])
    assert int((~scratch["partial_max"][0, :, 0].isnan()).sum()) == (number if number > 1 else 0)


@pytest.mark.parametrize("query_lens", [(1, 2, 1, 1, 0), (1, 40, 2, 1, 0)])
def test_sequences_that_are_shorter_than_the_table_have_smaller_chunks(query_lens, seed, monkeypatch):
    for name, value in (("_SMALL_WORK", {4: 0}), ("_TARGET_PROGRAMS", 12), ("_SHORTER", {2: {64: (128, 15, 64)}})):
        monkeypatch.setattr(split, name, value)
    lens = [700, 390, 130, 5, 0]
    case = paged_case(
        seed, seq_lens=lens, query_lens=query_lens, num_heads=2, num_kv_heads=1, head_size=16, padding_tokens=3
    )
    plan = plan_call.__wrapped__(case.call().map(array_spec), DeviceLimits(arch=89))
    assert [dict(launch.constexprs)["LEAST"] for launch in plan.launches[-2:]] == [128, 128]
    # Chunks of 256, 256 and 188 keys; of 256, 134 and none; of 128 and 2.
    assert dict(plan.scratch)["partial_max"].shape[1] == 3
    assert_matches_reference(case, run_interpreted_operation(plan, case.call().arrays())["out"])


def test_scratch_of_chunks_that_a_sequence_has_not_may_hold_anything(seed):
    case = paged_case(seed, seq_lens=[300, 128, 10], query_lens=[1, 1, 1], num_heads=2, num_kv_heads=1, head_size=16)
    call = case.call()
    plan = plan_call(call.map(array_spec), DeviceLimits(arch=89))
    poison = {name: torch.full(spec.shape, torch.nan) for name, spec in plan.scratch}
    assert dict(plan.launches[1].constexprs)["AHEAD"]
    results = run_interpreted_operation(plan, {**call.arrays(), **poison})
    assert_matches_reference(case, results["out"])


@pytest.mark.parametrize("query_lens", [(1, 1, 1, 1), (1, 40, 4, 1)])
def test_programs_that_merge_several_heads_give_the_same_bits(query_lens, seed, monkeypatch):
    lens = [300, 129, 260, 1]
    case = paged_case(seed, seq_lens=lens, query_lens=query_lens, num_heads=4, num_kv_heads=2, head_size=16)
    results = []
    for merges, heads in ((1 << 20, 1), (1, 4)):
        monkeypatch.setattr(partials, "_MERGES", merges)
        plan = plan_call.__wrapped__(case.call().map(array_spec), DeviceLimits(arch=89))
        assert dict(plan.launches[-1].constexprs)["HEADS"] == heads
        results.append(run_interpreted_operation(plan, case.call().arrays())["out"])

    assert_matches_reference(case, results[1])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_mixed_batch_sends_short_and_long_queries_to_their_kernels(seed):
    case = paged_case(
        seed, seq_lens=[40, 90, 33, 0], query_lens=[40, 1, 4, 0], num_heads=4, num_kv_heads=1, padding_tokens=3
    )
    out, lse = case.run(paged_attention_with_lse)
    assert_matches_reference(case, out, lse)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [("bfloat16", None), ("float32", None), ("bfloat16", "float8_e4m3fn"), ("float16", "int8")],
)
def test_heads_of_512_are_as_exact_as_smaller_ones(dtype, cache_dtype, seed):
    scales: dict[str, Any] = {} if cache_dtype is None else {"k_scale": 0.02, "v_scale": 0.03}
    case = paged_case(
        seed, seq_lens=[40, 150, 3], query_lens=[17, 1, 3], num_heads=4, num_kv_heads=1, head_size=512, dtype=dtype,
        cache_dtype=cache_dtype, **scales,
    )  # fmt: skip
    out, lse = case.run(paged_attention_with_lse)
    assert_matches_reference(case, out, lse)


def test_padded_tokens_get_zeros_and_an_lse_of_minus_infinity(seed):
    case = paged_case(seed, seq_lens=[5, 0], query_lens=[1, 0], padding_tokens=4)
    out, lse = case.run(paged_attention_with_lse)
    assert not out[1:].any()
    assert (lse[1:] == -torch.inf).all()


def test_padding_alone_gets_zeros_with_ranges_of_a_prefix(seed):
    ranges = np.zeros((1, 2, 2), np.int32)
    case = paged_case(seed, seq_lens=[0], query_lens=[0], padding_tokens=2, mm_prefix_range=ranges)
    out, lse = case.run(paged_attention_with_lse)
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_an_output_with_strides_is_written_in_place(seed):
    case = paged_case(seed, seq_lens=[9], query_lens=[2])
    wide = torch.full((2, 6, 64), 7.0)
    result = case.run(paged_attention, out=wide[:, :, :32])
    assert torch.equal(result, case.run(paged_attention))
    assert result.data_ptr() == wide.data_ptr()
    assert (wide[:, :, 32:] == 7).all()


def test_caches_of_unequal_head_sizes_come_as_a_pair(seed):
    case = paged_case(seed, seq_lens=[20, 3], query_lens=[5, 1])
    keys, values = case.tensors()["kv_cache"].unbind(1)
    pair = (keys, values[..., :24].contiguous())
    out = case.run(paged_attention, kv_cache=pair)
    assert torch.equal(out, case.run(paged_attention)[..., :24])


def test_an_fp8_output_is_scaled_and_saturated(seed):
    case = dense_case(seed, key_lens=[12], query_lens=[12])
    exact = case.run(attention_with_lse)[0]
    out = torch.empty(exact.shape, dtype=torch.float8_e4m3fn)
    case.run(attention_with_lse, out=out, out_scale=0.001)
    expected = (exact / 0.001).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert (out.float() - expected.float()).abs().max() <= 32  # one unit in the last place of the largest values


def test_an_fp8_query_is_multiplied_by_its_scale(seed):
    case = paged_case(seed, seq_lens=[20], query_lens=[3], dtype="float8_e4m3fn", q_scale=0.5, k_scale=0.7)
    out, lse = case.run(paged_attention_with_lse)
    assert out.dtype == torch.bfloat16
    assert_matches_reference(case, out, lse)


@pytest.mark.parametrize("function", [paged_attention, paged_attention_with_lse])
def test_an_empty_batch_launches_nothing(function):
    case = paged_case(0, seq_lens=[], query_lens=[])
    result = case.run(function, query_start_loc=torch.zeros(1, dtype=torch.int32))
    out = result[0] if isinstance(result, tuple) else result
    assert out.shape == (0, 6, 32)


def test_dense_keys_without_sequences_launch_nothing():
    case = dense_case(0, key_lens=[], query_lens=[], padding_tokens=2)
    out, lse = case.run(attention_with_lse)
    assert not out.any()
    assert (lse == -torch.inf).all()
