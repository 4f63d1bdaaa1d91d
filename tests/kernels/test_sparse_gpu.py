"""DeepSeek's sparse attention on a CUDA device, against the reference; in a captured graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.attention_cases import assert_matches_reference
from tests.support.sparse_cases import indexer_call, sparse_case
from torch_core import ops, reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [3, 16, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_chosen_latents_of_deepseeks_sizes_are_as_exact_as_torch(heads, packed, seed):
    case = sparse_case(
        seed, seq_lens=[900, 0, 33], query_lens=[2, 0, 1], topk=300, num_heads=heads, kv_lora_rank=512, rope_dim=64,
        block_size=64, dtype="bfloat16", packed=packed, padding_tokens=2,
    )  # fmt: skip
    assert_matches_reference(case, *case.run(ops.sparse_mla_attention_with_lse, device="cuda"))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [("float32", None), ("bfloat16", None), ("bfloat16", "float8_e4m3fn")]
)
def test_an_indexer_scores_what_a_query_sees(dtype, cache_dtype, seed):
    call = indexer_call(
        seed, seq_lens=[700, 0, 5], query_lens=[4, 0, 5], num_heads=64, head_size=128, block_size=64, dtype=dtype,
        cache_dtype=cache_dtype,
    )  # fmt: skip
    found = ops.run(call.map(torch.Tensor.cuda))["logits"]
    assert torch.equal(found.cpu().double(), reference.indexer_logits(call))


def test_choice_and_attention_are_captured(seed):
    call = indexer_call(seed, seq_lens=[700, 90], query_lens=[1, 1], num_heads=64, head_size=128, block_size=64,
                        dtype="bfloat16", padding_tokens=0).map(torch.Tensor.cuda)  # fmt: skip
    case = sparse_case(seed, seq_lens=[700, 90], query_lens=[1, 1], topk=64, num_heads=16, kv_lora_rank=512,
                       rope_dim=64, block_size=64, dtype="bfloat16")  # fmt: skip
    options = {name: getattr(call, name) for name in ("scale", "max_query_len", "k_scale")}

    given: dict[str, Any] = {**case.tensors("cuda"), **case.limits, "spec": case.spec}

    def step() -> torch.Tensor:
        given["topk_indices"] = ops.indexer_topk(**call.arrays(), **options, topk=64)
        return ops.sparse_mla_attention(**given)

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
