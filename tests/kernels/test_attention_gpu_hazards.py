"""Cases that broke other paged-attention kernels, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from tests.support import reference
from tests.support.attention_cases import assert_as_exact, assert_matches_reference, paged_case
from tests.support.triton_ops import paged_attention, paged_attention_with_lse, write_kv_cache
from torch_core import ops
from torch_core.base.specs import AttentionSpec
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("query_len", [1, 40, 200])
def test_blocks_at_the_top_of_a_pool_beyond_two_to_the_31_elements_are_found(query_len, seed):
    """int32 products of block id and stride wrap there: sequences end up reading other blocks."""
    block_elements = 2 * 256 * 8 * 128
    num_blocks = 2**31 // block_elements + 40
    cache = torch.full((num_blocks, 2, 256, 8, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    top = torch.arange(num_blocks - 8, num_blocks, device="cuda")
    cache[top] = torch.randn(8, 2, 256, 8, 128, device="cuda", generator=generator).bfloat16()
    query = torch.randn(query_len + 1, 32, 128, device="cuda", generator=generator).bfloat16()
    arrays = {
        "query": query,
        "block_tables": top.reshape(2, 4).int(),
        "seq_lens": torch.tensor([1024, 700], dtype=torch.int32, device="cuda"),
        "query_start_loc": torch.tensor([0, query_len, query_len + 1], dtype=torch.int32, device="cuda"),
    }
    spec = AttentionSpec(scale=128**-0.5)
    out = paged_attention(**arrays, kv_cache=cache, spec=spec, max_query_len=query_len)
    local = {**arrays, "block_tables": torch.arange(8, device="cuda").reshape(2, 4).int()}
    exact, _ = reference.paged_attention_with_lse(**local, kv_cache=cache[top], spec=spec, compute_dtype=torch.float64)
    same, _ = reference.paged_attention_with_lse(**local, kv_cache=cache[top], spec=spec, compute_dtype=torch.bfloat16)
    assert_as_exact(out, exact, same, torch.bfloat16)


def test_scratch_beyond_two_to_the_31_elements_is_addressed(seed):
    """4,100 rows x 64 chunks x 64 heads x 128 elements: the partial rows of the last sequences lie past 2^31."""
    num_seqs, block_size, max_blocks = 4100, 256, 64
    cache = torch.randn(300, 2, block_size, 1, 128, device="cuda", generator=_generator(seed)).bfloat16()
    tables = torch.randint(0, 300, (num_seqs, max_blocks), device="cuda", generator=_generator(seed)).int()
    seq_lens = torch.zeros(num_seqs, dtype=torch.int32, device="cuda")
    seq_lens[-2:] = torch.tensor([16384, 9000])
    query = torch.randn(num_seqs, 64, 128, device="cuda", generator=_generator(seed)).bfloat16()
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
    spec = AttentionSpec(scale=128**-0.5)
    out = _with_small_chunks(query, cache, tables, seq_lens, starts, spec)
    last = {"block_tables": tables[-2:], "seq_lens": seq_lens[-2:], "query_start_loc": starts[:3]}
    exact, _ = reference.paged_attention_with_lse(query[-2:], cache, **last, spec=spec, compute_dtype=torch.float64)
    same, _ = reference.paged_attention_with_lse(query[-2:], cache, **last, spec=spec, compute_dtype=torch.bfloat16)
    assert_as_exact(out[-2:], exact, same, torch.bfloat16)
    assert not out[:-2].any()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def _with_small_chunks(query, cache, tables, seq_lens, starts, spec) -> torch.Tensor:
    arrays = (query, cache, tables, seq_lens, starts)
    call = ops.paged_call(*arrays, spec=spec, max_query_len=1, kv_chunk_size=256)
    assert max(scratch.size for _, scratch in plan_call(call.map(array_spec)).scratch) > 2**31
    return ops.run(call)["out"]


@pytest.mark.parametrize("query_lens", [[1, 1], [30, 200]])
def test_a_window_that_leaves_whole_tiles_and_chunks_empty(query_lens, seed):
    spec = AttentionSpec(scale=0.1, window_left=3)
    case = paged_case(
        seed, seq_lens=[5000, 201], query_lens=query_lens, head_size=64, dtype="bfloat16", spec=spec, block_size=16
    )
    out, lse = case.run(paged_attention_with_lse, device="cuda")
    assert_matches_reference(case, out, lse)


@pytest.mark.parametrize("value", [-1e3, 1e4])
def test_extreme_logits_after_a_fully_masked_tile(value, seed):
    """A finite sentinel instead of -inf would win against logits of -1000."""
    spec = AttentionSpec(scale=1.0, window_left=10)
    case = paged_case(seed, seq_lens=[400, 130], query_lens=[200, 1], num_heads=2, head_size=64, dtype="float32",
                      spec=spec)  # fmt: skip
    case.operands["query"][:] = 0
    case.operands["query"][:, :, 0] = value
    case.operands["kv_cache"][..., 0] = 1
    out, lse = case.run(paged_attention_with_lse, device="cuda")
    assert_matches_reference(case, out, lse)


def test_values_of_one_average_to_exactly_one(seed):
    for cache_dtype in ("bfloat16", "float8_e4m3fn"):
        case = paged_case(
            seed, seq_lens=[1000, 77], query_lens=[1, 60], head_size=128, dtype="bfloat16", cache_dtype=cache_dtype
        )
        case.operands["kv_cache"][:, 1] = 1
        out = case.run(paged_attention, device="cuda")
        assert ((out - 1).abs() <= torch.finfo(torch.bfloat16).eps).all()


def test_strides_that_are_no_multiple_of_16_are_honoured(seed):
    case = paged_case(seed, seq_lens=[100, 5], query_lens=[1, 5], head_size=40, dtype="bfloat16")
    cache = case.tensors("cuda")["kv_cache"]
    wide = torch.full((*cache.shape[:-1], 43), float("nan"), dtype=cache.dtype, device="cuda")
    wide[..., :40] = cache
    out, lse = case.run(paged_attention_with_lse, device="cuda", kv_cache=wide[..., :40])
    assert_matches_reference(case, out, lse)


def test_a_cache_whose_heads_lie_before_its_tokens_is_read_as_it_is(seed):
    case = paged_case(seed, seq_lens=[100, 5, 300], query_lens=[1, 5, 150], head_size=64, dtype="bfloat16")
    cache = case.tensors("cuda")["kv_cache"]
    swapped = cache.transpose(2, 3).contiguous().transpose(2, 3)
    out, lse = case.run(paged_attention_with_lse, device="cuda", kv_cache=swapped)
    assert_matches_reference(case, out, lse)


def test_sequences_longer_than_their_table_row_read_nothing_outside(seed):
    """A dummy batch may state more tokens than its table holds; what is there is attended to, nothing else is read."""
    case = paged_case(seed, seq_lens=[64, 64], query_lens=[1, 1], head_size=64, dtype="bfloat16")
    tables = case.tensors("cuda")["block_tables"][:, :4].contiguous()
    expected = case.run(paged_attention, device="cuda", block_tables=tables)
    longer = torch.full((2,), 5000, dtype=torch.int32, device="cuda")
    found = case.run(paged_attention, device="cuda", block_tables=tables, seq_lens=longer)
    assert torch.equal(found, expected)


def test_a_launch_that_begins_early_reads_what_the_launches_in_front_wrote(seed):
    """Lengths, a key and the attention to it, step by step: the same bits if the host waits between them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    cache = torch.randn(64, 2, 16, 8, 128, device="cuda", generator=generator).bfloat16()
    rows = torch.randn(100, 3, 1, 32, 128, device="cuda", generator=generator).bfloat16()
    starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    order = torch.randperm(64, device="cuda", generator=generator).int()[None]
    slots = (order[0, :, None] * 16 + torch.arange(16, device="cuda", dtype=torch.int32)).flatten()

    def steps(wait: bool) -> list[torch.Tensor]:
        own, lens, results = cache.clone(), torch.full((1,), 900, dtype=torch.int32, device="cuda"), []
        torch.cuda.synchronize()
        for step, (query, key, value) in enumerate(rows):
            write_kv_cache(key[:, :8], value[:, :8], own, slots[900 + step : 901 + step])
            if wait:
                torch.cuda.synchronize()
            lens.add_(1)
            arrays = {
                "query": query,
                "kv_cache": own,
                "block_tables": order,
                "seq_lens": lens,
                "query_start_loc": starts,
            }
            results.append(paged_attention(**arrays, spec=AttentionSpec(scale=128**-0.5), max_query_len=1))
            write_kv_cache(value[:, :8], key[:, :8], own, slots[step : step + 1])
            results.append(paged_attention(**arrays, spec=AttentionSpec(scale=128**-0.5), max_query_len=1))
            if wait:
                torch.cuda.synchronize()
        return results

    steps(wait=True)
    for found, expected in zip(steps(wait=False), steps(wait=True), strict=True):
        assert torch.equal(found, expected)
