"""Each sequence of `context_attention_fwd` stands alone: in any order, with gaps, and where sequences overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import reference
from tests.support.triton_ops import run_triton
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec
from torch_core.vllm.ops import context_attention_fwd

TOKENS, HEADS, KV_HEADS, SIZE = 11, 4, 2, 16
STARTS_AND_LENS = {
    "falling": ([5, 0], [4, 5]),
    "one begins with another": ([0, 0], [3, 6]),
    "one inside another": ([0, 2, 9], [8, 3, 2]),
    "any order with gaps, an empty one": ([8, 3, 0, 1], [3, 2, 0, 1]),
    "each overlaps the next": ([6, 0, 3], [5, 4, 4]),
}
MASKS = {
    "causal": ({}, AttentionSpec(scale=SIZE**-0.5)),
    "a window to both sides": (
        {"is_causal": False, "sliding_window_q": 2, "sliding_window_k": 1},
        AttentionSpec(scale=SIZE**-0.5, causal=False, window_left=2, window_right=1),
    ),
}


def arrays(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(TOKENS, heads, SIZE, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int], lens: list[int], **options: Any):
    """Each sequence by itself; the one that begins first has the rows that several cover, others are 0."""
    out = torch.zeros_like(q)
    in_order = sorted(zip(starts, lens, strict=True), key=lambda pair: pair[0])
    for start, length in in_order[::-1]:
        rows, ends = slice(start, start + length), torch.tensor([0, length], dtype=torch.int32)
        bounds = {"max_query_len": length, "max_key_len": length, "compute_dtype": torch.float64}
        if length:
            out[rows] = reference.attention(q[rows], k[rows], v[rows], ends, ends, **bounds, **options).float()
    return out


def run_as_on_cuda(monkeypatch: pytest.MonkeyPatch, max_len: int) -> None:
    """Lets the kernels run, interpreted, on the keys as they lie, and with the caller's bound."""
    operations = "torch_core.vllm.ops.attention"
    monkeypatch.setattr(f"{operations}._packed_keys", lambda *arrays: arrays)
    monkeypatch.setattr(
        f"{operations}.run", lambda call: run_triton(replace(call, max_query_len=max_len, max_key_len=max_len))
    )


@pytest.mark.parametrize("name", STARTS_AND_LENS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernels", [False, True])
def test_each_sequence_stands_alone(name, mask, kernels, seed, monkeypatch):
    (q, k, v), (starts, lens), (options, spec) = arrays(seed), STARTS_AND_LENS[name], MASKS[mask]
    wanted, out = alone(q, k, v, starts, lens, spec=spec), torch.full_like(q, torch.nan)
    if kernels:
        run_as_on_cuda(monkeypatch, max(lens))
    context_attention_fwd(q, k, v, out, torch.tensor(starts), torch.tensor(lens), max(lens), **options)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("starts", "lens", "argument"),
    [([0, 9], [2, 3], "b_start_loc[1]"), ([-1], [2], "b_start_loc[0]"), ([0, 1], [2, 6], "b_seq_len[1]")],
)
def test_a_sequence_that_no_rows_hold_is_refused(starts, lens, argument, seed):
    q, k, v = arrays(seed)
    with pytest.raises(InvalidInput) as error:
        context_attention_fwd(q, k, v, torch.zeros_like(q), torch.tensor(starts), torch.tensor(lens), 5)
    assert error.value.argument == argument
