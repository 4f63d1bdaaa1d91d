"""What must not change a single bit of a result on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.attention_cases import AttentionCase, paged_case
from tests.support.triton_ops import paged_attention_with_lse
from torch_core.base.specs import AttentionSpec
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

pytestmark = pytest.mark.gpu

_SHAPES = {
    "decode": {"seq_lens": [1, 700, 129, 64, 5000, 17], "query_lens": [1] * 6},
    "speculative": {"seq_lens": [9, 700, 129, 64, 3000, 17], "query_lens": [5, 5, 1, 2, 5, 3]},
    "prefill": {"seq_lens": [300, 700, 129, 64], "query_lens": [300, 520, 129, 33]},
    "chunks": {"seq_lens": [2100, 300, 1500, 7], "query_lens": [90, 60, 100, 7]},
    "mixed": {"seq_lens": [300, 700, 129, 64, 2000], "query_lens": [300, 1, 100, 1, 1]},
}


def _case(shape: str, seed: int, **options: Any) -> AttentionCase:
    return paged_case(seed, num_heads=8, num_kv_heads=2, head_size=128, dtype="bfloat16", **_SHAPES[shape], **options)


def _run(case: AttentionCase, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return case.run(paged_attention_with_lse, device="cuda", **changes)


def _assert_same(first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(first[0].view(torch.int16), second[0].view(torch.int16))
    assert torch.equal(first[1].view(torch.int32), second[1].view(torch.int32))


@pytest.fixture(params=list(_SHAPES))
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_second_run_gives_the_same_bits(shape, seed):
    case = _case(shape, seed)
    _assert_same(_run(case), _run(case))


def test_blocks_may_lie_anywhere(shape, seed):
    case = _case(shape, seed)
    tensors = case.tensors("cuda")
    num_blocks = tensors["kv_cache"].shape[0]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).cuda()
    moved = torch.empty_like(tensors["kv_cache"])
    moved[order] = tensors["kv_cache"]
    tables = tensors["block_tables"].long()
    inside = (tables >= 0) & (tables < num_blocks)
    tables[inside] = order[tables[inside]]
    _assert_same(_run(case), _run(case, kv_cache=moved, block_tables=tables.int()))


def test_sequences_may_come_in_any_order(shape, seed):
    case = _case(shape, seed)
    expected = _run(case)
    tensors = case.tensors("cuda")
    starts = tensors["query_start_loc"].tolist()
    order = torch.randperm(len(starts) - 1, generator=torch.Generator().manual_seed(seed)).tolist()
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order]).cuda()
    lens = torch.tensor([0] + [starts[i + 1] - starts[i] for i in order])
    found = _run(
        case,
        query=tensors["query"][rows],
        block_tables=tensors["block_tables"][order],
        seq_lens=tensors["seq_lens"][order],
        query_start_loc=lens.cumsum(0).int().cuda(),
    )
    _assert_same((expected[0][rows], expected[1][rows]), found)


def test_a_row_of_padding_may_become_a_neighbour(shape, seed):
    case = _case(shape, seed)
    tensors = case.tensors("cuda")
    full = _run(case)
    last = len(tensors["seq_lens"]) - 1
    fewer_starts = tensors["query_start_loc"].clone()
    fewer_starts[-1] = fewer_starts[-2]
    fewer_lens = tensors["seq_lens"].clone()
    fewer_lens[last] = 0
    alone = _run(case, query_start_loc=fewer_starts, seq_lens=fewer_lens)
    kept = int(fewer_starts[-1])
    _assert_same((full[0][:kept], full[1][:kept]), (alone[0][:kept], alone[1][:kept]))
    assert not alone[0][kept:].any()
    assert (alone[1][kept:] == -torch.inf).all()


@pytest.mark.parametrize("spec", [{}, {"window_left": 100}, {"causal": False}, {"attention_chunk": 64}])
def test_what_lies_in_unused_slots_does_not_matter(shape, spec, seed):
    spec = AttentionSpec(scale=128**-0.5, **spec)
    results = [_run(_case(shape, seed, spec=spec, poison=poison)) for poison in (0.0, float("nan"), float("inf"))]
    assert results[0][0].isfinite().all()
    _assert_same(results[0], results[1])
    _assert_same(results[0], results[2])


def test_what_lies_in_unused_table_entries_does_not_matter(shape, seed):
    case = _case(shape, seed)
    tables = case.tensors("cuda")["block_tables"]
    used = -(-case.tensors("cuda")["seq_lens"] // 16)
    unused = torch.arange(tables.shape[1], device="cuda")[None, :] >= used[:, None]
    expected = _run(case)
    for garbage in (0, -1, 2**31 - 1, -(2**31)):
        _assert_same(expected, _run(case, block_tables=tables.masked_fill(unused, garbage)))


def test_a_decode_row_has_the_same_bits_in_a_mixed_batch(seed):
    """Long queries go to another kernel; the short ones keep theirs, and their chunks, whose size is given."""
    case = _case("mixed", seed)
    tensors = case.tensors("cuda")
    mixed = _run(case, kv_chunk_size=512)
    starts = tensors["query_start_loc"].tolist()
    decode = [i for i in range(len(starts) - 1) if starts[i + 1] - starts[i] == 1]
    rows = [starts[i] for i in decode]
    seq_lens = torch.zeros_like(tensors["seq_lens"])
    seq_lens[: len(decode)] = tensors["seq_lens"][decode]
    tables = tensors["block_tables"].clone()
    tables[: len(decode)] = tensors["block_tables"][decode]
    alone = _run(
        case,
        query=tensors["query"][rows],
        block_tables=tables,
        seq_lens=seq_lens,
        query_start_loc=torch.arange(len(starts), device="cuda").clamp(max=len(decode)).int(),
        max_query_len=1,
        kv_chunk_size=512,
    )
    _assert_same((mixed[0][rows], mixed[1][rows]), alone)


def test_neighbours_that_change_the_chunks_of_a_run_change_no_bit(seed):
    """Programs take two chunks of eight long sequences at a time, and one of two long ones among short ones."""
    lens = [9000, 2500] * 4
    case = paged_case(
        seed, num_heads=16, num_kv_heads=8, head_size=128, dtype="bfloat16", seq_lens=lens, query_lens=[1] * 8
    )
    # Eight chunks and three of each pair are 44, and among short ones 17.
    assert dict(plan_call(case.call().map(array_spec)).launches[0].constexprs)["RUNS"] == 32
    uneven = case.tensors("cuda")["seq_lens"].clone()
    uneven[2:] = 3
    out, lse = _run(case)
    found, found_lse = _run(case, seq_lens=uneven)
    _assert_same((out[:2], lse[:2]), (found[:2], found_lse[:2]))
