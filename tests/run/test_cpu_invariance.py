"""A sequence's result on the CPU is the same, bit for bit, whoever shares its batch and wherever its blocks lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import AttentionCase, paged_case, to_torch
from torch_core import ops
from torch_core.base.specs import AttentionSpec

SEQ_LENS = [1, 63, 64, 65, 130, 300, 17, 1100, 90, 90]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"spec": AttentionSpec(scale=0.2, window_left=50)},
    "chunk": {"spec": AttentionSpec(scale=0.2, attention_chunk=40)},
    "soft cap": {"spec": AttentionSpec(scale=0.2, logits_soft_cap=4.0)},
    "alibi and sinks": {"alibi_slopes": np.linspace(0.1, 1, 6, dtype=np.float32), "sinks": np.ones(6, np.float32)},
    "one key head": {"num_kv_heads": 1},
    "one head": {"num_kv_heads": 1, "num_heads": 1},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8 cache": {"cache_dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 2.0},
    "a head of 5": {"head_size": 5},
    "odd sizes": {"head_size": 6, "block_size": 5, "num_heads": 3, "num_kv_heads": 3},
    "large": {"num_heads": 16, "num_kv_heads": 8, "head_size": 128},
}


@pytest.fixture(params=[1, 2, 8], ids=["one thread", "two threads", "eight threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test with this many torch threads and restores the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def part(case: AttentionCase, seqs: list[int]) -> dict[str, Any]:
    """The operands of the same problem with only these sequences, in this order."""
    tensors = case.tensors()
    starts = case.operands["query_start_loc"].tolist()
    lens = [starts[seq + 1] - starts[seq] for seq in seqs]
    return {
        "query": torch.cat([tensors["query"][starts[seq] : starts[seq + 1]] for seq in seqs]),
        "block_tables": tensors["block_tables"][seqs],
        "seq_lens": tensors["seq_lens"][seqs],
        "query_start_loc": torch.tensor([0, *lens]).cumsum(0).int(),
        "kv_cache": tensors["kv_cache"],
    }


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_rows_do_not_depend_on_the_batch(variant):
    case = paged_case(1, seq_lens=SEQ_LENS, query_lens=[1] * len(SEQ_LENS), **VARIANTS[variant])
    output, lse = case.run(ops.paged_attention_with_lse)
    for seqs in ([0], [3], [7], [9], [5, 2], [8, 9], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]):
        part_output, part_lse = case.run(ops.paged_attention_with_lse, **part(case, seqs))
        assert torch.equal(part_output, output[seqs])
        assert torch.equal(part_lse, lse[seqs])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_a_mixed_batch_do_not_depend_on_the_batch(variant):
    query_lens = [1, 63, 5, 1, 2, 40, 17, 1, 1, 8]
    case = paged_case(2, seq_lens=SEQ_LENS, query_lens=query_lens, padding_tokens=2, **VARIANTS[variant])
    output, lse = case.run(ops.paged_attention_with_lse)
    starts = case.operands["query_start_loc"].tolist()
    for seq in range(len(SEQ_LENS)):
        rows = slice(starts[seq], starts[seq + 1])
        part_output, part_lse = case.run(ops.paged_attention_with_lse, **part(case, [seq]))
        assert torch.equal(part_output, output[rows])
        assert torch.equal(part_lse, lse[rows])


@pytest.mark.parametrize("query_len", [1, 6])
def test_the_order_of_blocks_in_the_cache_does_not_matter(query_len):
    case = paged_case(3, seq_lens=[100, 33, 64], query_lens=[query_len] * 3)
    cache, tables = case.operands["kv_cache"], case.operands["block_tables"]
    order = np.random.default_rng(0).permutation(len(cache) - 1) + 1
    moved = cache.copy()
    moved[order] = cache[1:]
    used = np.arange(tables.shape[1]) < -(-case.operands["seq_lens"] // 16)[:, None]
    moved_tables = np.where(used, order[np.where(used, tables, 1) - 1], -5).astype(np.int32)
    output = case.run(ops.paged_attention, kv_cache=to_torch(moved), block_tables=to_torch(moved_tables))
    assert torch.equal(output, case.run(ops.paged_attention))


@pytest.mark.parametrize("query_len", [1, 6])
def test_a_larger_cache_and_wider_tables_do_not_matter(query_len):
    case = paged_case(3, seq_lens=[100, 33, 64], query_lens=[query_len] * 3)
    tensors = case.tensors()
    cache = torch.cat([tensors["kv_cache"], torch.full((20, 2, 16, 2, 32), torch.inf)])
    tables = torch.cat([tensors["block_tables"], torch.full((3, 9), 2**31 - 1, dtype=torch.int32)], dim=1)
    output = case.run(ops.paged_attention, kv_cache=cache, block_tables=tables)
    assert torch.equal(output, case.run(ops.paged_attention))


def test_a_second_run_gives_the_same_bits():
    case = paged_case(4, seq_lens=SEQ_LENS, query_lens=[1, 63, 5, 1, 2, 40, 17, 1, 1, 8])
    assert torch.equal(case.run(ops.paged_attention), case.run(ops.paged_attention))


def test_asking_for_the_lse_does_not_change_the_output():
    case = paged_case(4, seq_lens=SEQ_LENS, query_lens=[1, 63, 5, 1, 2, 40, 17, 1, 1, 8])
    assert torch.equal(case.run(ops.paged_attention), case.run(ops.paged_attention_with_lse)[0])


def test_groups_that_exceed_the_bound_on_memory_are_split_without_a_trace(monkeypatch):
    case = paged_case(5, seq_lens=[90] * 7, query_lens=[1] * 7)
    expected = case.run(ops.paged_attention)
    monkeypatch.setattr("torch_core.attention.cpu.attention._MAX_GROUP_ELEMENTS", 128 * 2 * 32 * 3)
    assert torch.equal(case.run(ops.paged_attention), expected)
