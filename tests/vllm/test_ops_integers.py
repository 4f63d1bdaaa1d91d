"""Integers of other widths and flags that are none, given to vLLM's operations by their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torch_core.base.errors import InvalidInput
from torch_core.vllm import ops as vllm_ops

BLOCK, HEADS, SIZE = 4, 2, 8


@pytest.fixture
def caches(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randn(2, 3, BLOCK, HEADS, SIZE, generator=torch.Generator().manual_seed(seed))
    return made[0], made[1]


def _write(caches: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor) -> None:
    rows = torch.ones(len(slots), HEADS, SIZE)
    vllm_ops.triton_reshape_and_cache_flash(rows, rows, *caches, slots, "auto", None, None)


@pytest.mark.parametrize("slot", [2**32 + 1, 2**31, 2**40])
def test_a_slot_beyond_an_int32_is_refused_and_not_cut_to_another(caches, slot):
    before = [cache.clone() for cache in caches]
    with pytest.raises(InvalidInput, match=rf"^slot_mapping\[1\] is {slot}; it must fit an int32\.$"):
        _write(caches, torch.tensor([5, slot]))
    assert all(torch.equal(one, other) for one, other in zip(before, caches, strict=True))


def test_a_negative_slot_of_any_size_writes_nothing(caches):
    before = [cache.clone() for cache in caches]
    _write(caches, torch.tensor([-1, -(2**32) + 5, -(2**63)]))
    assert all(torch.equal(one, other) for one, other in zip(before, caches, strict=True))


def test_slots_that_are_no_integers_are_refused(caches):
    with pytest.raises(InvalidInput, match=r"^slot_mapping is torch\.float32; it must hold integers\.$"):
        _write(caches, torch.tensor([5.5]))


@pytest.mark.parametrize("name", ["req_to_token", "b_seq_len"])
def test_decode_refuses_what_does_not_fit_an_int32(caches, name):
    query = torch.ones(1, HEADS, SIZE)
    given: dict[str, Any] = {"req_to_token": torch.tensor([[1, 2]]), "b_seq_len": torch.tensor([5])}
    given[name] = given[name] + 2**32
    with pytest.raises(InvalidInput, match=rf"^{name}\[0(, 0)?\] is (4294967297|4294967301); it must fit"):
        vllm_ops.decode_attention_fwd(
            q=query, k_buffer=caches[0], v_buffer=caches[1], o=torch.empty_like(query), lse=torch.empty(1, HEADS),
            **given, attn_logits=None, num_kv_splits=1, sm_scale=1.0, page_size=BLOCK,
        )  # fmt: skip


@pytest.mark.parametrize("causal", [0, 1, None, np.False_])
def test_a_causal_flag_that_is_none_is_refused_and_not_taken_for_true(caches, causal):
    query = torch.ones(2, HEADS, SIZE)
    starts, lens, tables = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [5], [[1, 2]]))
    with pytest.raises(InvalidInput, match=r"^causal is .*; it must be True or False\.$"):
        vllm_ops.unified_attention(
            q=query, k=caches[0], v=caches[1], out=torch.empty_like(query), cu_seqlens_q=starts, max_seqlen_q=2,
            seqused_k=lens, max_seqlen_k=5, softmax_scale=1.0, causal=causal, window_size=(-1, -1), block_table=tables,
            softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
        )  # fmt: skip
