"""DeepSeek's sparse attention on CPU tensors, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.attention_cases import assert_matches_reference
from tests.support.sparse_cases import indexer_call, sparse_case
from torch_core import ops, reference
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import AttentionSpec

BATCH: dict[str, Any] = {"seq_lens": [40, 0, 7, 19], "query_lens": [3, 0, 7, 1]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True])
def test_chosen_latents_are_attended_to_and_no_others(dtype, packed, seed):
    case = sparse_case(
        seed, **BATCH, topk=9, num_heads=3, kv_lora_rank=128, rope_dim=8, dtype=dtype, packed=packed, padding_tokens=2,
        block_size=4,
    )  # fmt: skip
    assert_matches_reference(case, *case.run(ops.sparse_mla_attention_with_lse))


def test_all_keys_chosen_is_the_whole_attention(seed):
    case = sparse_case(seed, seq_lens=[20], query_lens=[1], topk=20, num_heads=2)
    given: dict[str, Any] = {**case.tensors(), **case.limits, "spec": case.spec}
    del given["topk_indices"]
    chosen = ops.sparse_mla_attention(topk_indices=torch.randperm(20).int()[None], **given)
    torch.testing.assert_close(chosen, ops.mla_attention(**given))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [("float32", None), ("bfloat16", None), ("float16", "float8_e4m3fn")]
)
def test_an_indexer_scores_what_a_query_sees(dtype, cache_dtype, seed):
    call = indexer_call(seed, **BATCH, dtype=dtype, cache_dtype=cache_dtype)
    assert torch.equal(ops.run(call)["logits"].double(), reference.indexer_logits(call))


def test_the_highest_scores_are_chosen_first_and_absent_keys_never(seed):
    call = indexer_call(seed, **BATCH)
    options = {name: getattr(call, name) for name in ("scale", "max_query_len", "k_scale")}
    found = ops.indexer_topk(**call.arrays(), **options, topk=12)
    logits = reference.indexer_logits(call)
    for token, row in enumerate(found.tolist()):
        visible = int((logits[token] > -torch.inf).sum())
        chosen = row[: min(12, visible)]
        assert min(chosen, default=0) >= 0
        assert row[len(chosen) :] == [-1] * (12 - len(chosen))
        assert torch.equal(logits[token, chosen], logits[token].topk(len(chosen)).values)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk_indices": torch.zeros(3, 4).int()}, InvalidInput, r"topk_indices is int32 of shape .3, 4.; .*1, topk"),
        ({"topk_indices": torch.zeros(1, 0).int()}, InvalidInput, r"topk_indices is int32 of shape .1, 0."),
        ({"topk_indices": torch.zeros(1, 4)}, InvalidInput, "topk_indices is float32"),
        ({"topk_indices": torch.tensor([[3, 9, -1]]).int()}, InvalidInput, r"indices\[0, 1\] is 9; .* has 9 tokens"),
        ({"spec": AttentionSpec(scale=1.0, window_left=3)}, Unsupported, "a window or attention_chunk is given"),
        ({"latent_cache": torch.zeros(9, 8, 48)[:, ::2]}, Unsupported, "latent_cache has gaps"),
        ({"seq_lens": torch.tensor([300]).int()}, InvalidInput, r"seq_lens\[0\] is 300"),
    ],
)  # fmt: skip
def test_a_choice_that_does_not_fit_is_refused(change, error, message):
    case = sparse_case(1, seq_lens=[9], query_lens=[1], topk=4, num_heads=2, block_size=4)
    with pytest.raises(error, match=message):
        case.run(ops.sparse_mla_attention, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.zeros(4, 3)}, "weights has shape .4, 3.; it must be .* num_tokens = 13, that of query"),
        ({"key_cache": torch.zeros(9, 4, 8)}, "key_cache has shape .* index_head_size = 16, that of query"),
        ({"key_cache": torch.zeros(9, 4, 16).half()}, "query is float32 and key_cache float16; give a query"),
        ({"scale": -1.0}, "scale is -1.0; it must be positive and finite"),
        ({"max_query_len": 2}, r"sequence 0 has 3 rows in query_start_loc; the stated maximum is 2"),
    ],
)
def test_a_bad_indexer_is_refused(change, message):
    with pytest.raises(InvalidInput, match=message):
        ops.run(replace(indexer_call(1, **BATCH), **change))
