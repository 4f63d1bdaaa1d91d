"""The indexer's kernel, and attention to chosen latents, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.support.attention_cases import assert_matches_reference
from tests.support.sparse_cases import indexer_call, sparse_case
from tests.support.triton_ops import run_triton
from torch_core import ops, reference
from torch_core.latent.kernels.indexer import plan
from torch_core.latent.sparse_call import ChoiceCall


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [("float32", None), ("bfloat16", None), ("float16", "float8_e4m3fn")]
)
def test_an_indexer_scores_what_a_query_sees(dtype, cache_dtype, seed):
    call = indexer_call(seed, seq_lens=[70, 0, 5], query_lens=[2, 0, 5], dtype=dtype, cache_dtype=cache_dtype)
    assert torch.equal(run_triton(call)["logits"].double(), reference.indexer_logits(call))


def test_slots_of_long_rows_are_looked_up_step_by_step(monkeypatch):
    monkeypatch.setattr(plan, "_MAX_CHOICE_BLOCK", 16)
    generator = torch.Generator().manual_seed(3)
    call = ChoiceCall(
        topk_indices=torch.randint(-20, 48, (4, 37), generator=generator).int(),
        block_tables=torch.randperm(24, generator=generator).view(2, 12).int(),
        query_start_loc=torch.tensor([0, 1, 3]).int(),
        block_size=4,
    )
    found, expected = run_triton(call), ops.run(call)
    assert expected["counts"].tolist()[:3] == [int((row >= 0).sum()) for row in call.topk_indices[:3]]
    for name, array in expected.items():
        assert torch.equal(found[name], array)


@pytest.mark.parametrize("packed", [False, True])
def test_chosen_latents_are_attended_to_and_no_others(packed, seed):
    case = sparse_case(
        seed, seq_lens=[40, 7], query_lens=[2, 1], topk=9, num_heads=3, kv_lora_rank=128, rope_dim=8, packed=packed,
        padding_tokens=1, block_size=4,
    )  # fmt: skip
    results = run_triton(case.call(with_lse=True))
    assert_matches_reference(case, results["out"], results["lse"])
