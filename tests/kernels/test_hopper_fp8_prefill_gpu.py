"""The fp8 Hopper prefill kernel on a CUDA device: the float64 reference, poison, windows, empty rows, bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import AttentionCase, assert_as_exact, paged_case
from tests.support.fp8_cases import assert_matches_fp8_weights, random_fp8_case
from tests.support.triton_ops import paged_attention, paged_attention_with_lse
from torch_core.base.specs import AttentionSpec
from torch_core.launch.launcher import device_limits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

pytestmark = pytest.mark.gpu
_SCALES = ("q_scale", "k_scale", "v_scale")
_SIZES = {"num_heads": 4, "num_kv_heads": 1, "dtype": "float8_e4m3fn", "q_scale": 0.5, "k_scale": 2.5, "v_scale": 0.25}


def _run(case: AttentionCase, warpgroups: int = 2, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    plan = plan_call(case.call("cuda", **changes).map(array_spec), device_limits(torch.device("cuda", 0)))
    assert plan.launches[0].name == "hopper_fp8_prefill_kernel"
    assert dict(plan.launches[0].constexprs)["WARPGROUPS"] == warpgroups
    return case.run(paged_attention_with_lse, device="cuda", **changes)


def _check(case: AttentionCase) -> None:
    assert_matches_fp8_weights(case, *_run(case))


def _assert_same(first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(first[0].view(torch.int16), second[0].view(torch.int16))
    assert torch.equal(first[1].view(torch.int32), second[1].view(torch.int32))


@pytest.mark.parametrize("seed", range(24))
def test_a_random_problem_is_as_exact_as_torch_with_e4m3_weights(seed):
    _check(random_fp8_case(seed))


@pytest.mark.parametrize("seed", range(24))
def test_the_taller_tile_of_long_queries_has_the_same_bits(seed):
    case = random_fp8_case(seed, head_size=64)
    # A size that is given keeps keys whole, which a planner may cut in one of the two calls alone.
    _assert_same(_run(case, kv_chunk_size=2048), _run(case.with_longest_query(2048), 3, kv_chunk_size=2048))


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_lengths_around_multiples_of_the_tile(tiles, edge, head_size, seed):
    n = 128 * tiles + edge
    _check(paged_case(seed, seq_lens=[n, n + 64, 300], query_lens=[n, 128 + edge, 130], head_size=head_size, **_SIZES))


def test_more_sequences_than_are_looked_at_together(seed):
    lens = [130, 0, 64, 200, 90] * 14
    _check(paged_case(seed, seq_lens=lens, query_lens=lens, head_size=128, **_SIZES))


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_a_query_of_zeros_gives_the_mean_of_the_values(head_size, seed):
    """All weights are the same power of two, exact in e4m3: only the output is rounded."""
    case = paged_case(seed, seq_lens=[700, 130], query_lens=[300, 130], head_size=head_size, **_SIZES)
    case.operands["query"][:] = 0
    out, _ = _run(case)
    exact, _ = case.expected()
    assert_as_exact(out, exact, exact.bfloat16(), torch.bfloat16)


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_a_row_that_sees_one_key_gives_its_value(head_size, seed):
    """One weight, a power of two, for each row, at every place of a tile: a key out of place would show."""
    spec = AttentionSpec(scale=1.0, window_left=0)
    case = paged_case(seed, seq_lens=[600], query_lens=[600], head_size=head_size, spec=spec, **_SIZES)
    out, _ = _run(case)
    exact, _ = case.expected()
    assert torch.equal(out.cpu(), exact.bfloat16())


@pytest.mark.parametrize("arrays", [_SCALES, ("k_scale",), ("q_scale", "v_scale")])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_scales_that_are_arrays_give_the_bits_of_equal_numbers(head_size, arrays, seed):
    """Powers of two: it does not matter whether the plan multiplies by them or the kernel."""
    sizes: dict[str, Any] = {
        **_SIZES,
        "seq_lens": [500, 200],
        "query_lens": [300, 200],
        "head_size": head_size,
        "k_scale": 2.0,
    }
    numbers = _run(paged_case(seed, **sizes))
    sizes |= {name: np.full(1, sizes[name], "f4") for name in arrays}
    _assert_same(numbers, _run(paged_case(seed, **sizes)))


def test_the_output_may_be_float16(seed):
    case = paged_case(seed, seq_lens=[500, 200], query_lens=[300, 200], head_size=128, **_SIZES)
    out = torch.full(case.operands["query"].shape, 7.0, dtype=torch.float16, device="cuda")
    case.run(paged_attention, device="cuda", out=out)
    assert_matches_fp8_weights(case, out)


def test_a_query_inside_a_wider_array_and_an_output_with_strides(seed):
    case = paged_case(seed, seq_lens=[300], query_lens=[200], head_size=128, **_SIZES)
    query = case.tensors("cuda")["query"]
    wide = torch.full((*query.shape[:2], 256), 0x7F, dtype=torch.uint8, device="cuda").view(query.dtype)
    wide[..., :128].view(torch.uint8).copy_(query.view(torch.uint8))
    out = torch.full((200, 4, 256), 7.0, dtype=torch.bfloat16, device="cuda")
    case.run(paged_attention, device="cuda", query=wide[..., :128], out=out[..., 128:])
    assert_matches_fp8_weights(case, out[..., 128:].contiguous())
    assert (out[..., :128] == 7).all()


def test_keys_and_values_in_two_caches(seed):
    case = paged_case(seed, seq_lens=[300, 150], query_lens=[200, 150], head_size=128, **_SIZES)
    caches = tuple(cache.contiguous() for cache in case.tensors("cuda")["kv_cache"].unbind(1))
    assert_matches_fp8_weights(case, *_run(case, kv_cache=caches))


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_a_second_run_and_other_neighbours_give_the_same_bits(head_size, seed):
    lens = {"seq_lens": [700, 300, 129], "query_lens": [520, 300, 129]}
    case = paged_case(seed, head_size=head_size, **lens, **_SIZES)
    full = _run(case)
    _assert_same(full, _run(case))
    tensors = case.tensors("cuda")
    starts, seq_lens = tensors["query_start_loc"].clone(), tensors["seq_lens"].clone()
    starts[-1] = starts[-2]
    seq_lens[-1] = 0
    alone = _run(case, query_start_loc=starts, seq_lens=seq_lens)
    kept = int(starts[-1])
    _assert_same((full[0][:kept], full[1][:kept]), (alone[0][:kept], alone[1][:kept]))
    assert not alone[0][kept:].any()
    assert (alone[1][kept:] == -torch.inf).all()


def test_blocks_may_lie_anywhere(seed):
    case = paged_case(seed, seq_lens=[700, 129], query_lens=[520, 129], head_size=128, **_SIZES)
    tensors = case.tensors("cuda")
    cache, tables = tensors["kv_cache"].view(torch.uint8), tensors["block_tables"].long()
    order = torch.randperm(cache.shape[0], generator=torch.Generator().manual_seed(seed)).cuda()
    moved = torch.empty_like(cache)
    moved[order] = cache
    inside = (tables >= 0) & (tables < cache.shape[0])
    tables[inside] = order[tables[inside]]
    _assert_same(_run(case), _run(case, kv_cache=moved.view(torch.float8_e4m3fn), block_tables=tables.int()))


@pytest.mark.parametrize("spec", [{}, {"window_left": 100}, {"causal": False}])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_what_lies_in_unused_slots_does_not_matter(head_size, spec, seed):
    sizes = {"seq_lens": [700, 333, 129], "query_lens": [520, 200, 129], "head_size": head_size}
    spec = AttentionSpec(scale=head_size**-0.5, **spec)
    results = [_run(paged_case(seed, spec=spec, poison=poison, **sizes, **_SIZES)) for poison in (0.0, float("nan"))]
    assert results[0][0].isfinite().all()
    _assert_same(*results)


def test_a_captured_graph_follows_new_lengths_and_tables(seed):
    case = paged_case(seed, seq_lens=[700, 264, 0], query_lens=[500, 140, 0], head_size=128, **_SIZES)
    live = case.tensors("cuda")
    static = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in live.items()}
    for name in ("block_tables", "seq_lens", "query_start_loc"):
        static[name].zero_()
    out = torch.empty(static["query"].shape, dtype=torch.bfloat16, device="cuda")
    arguments = {**static, "spec": case.spec, "max_query_len": 500, "out": out}
    paged_attention(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(**arguments)
    for name in ("block_tables", "seq_lens", "query_start_loc"):
        static[name].copy_(live[name])
    graph.replay()
    torch.cuda.synchronize()
    assert_matches_fp8_weights(case, out)
