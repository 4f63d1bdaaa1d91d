"""The specification of segments, against attention under a dense mask in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import AttentionCase
from tests.support.segment_cases import padded, segment_case
from torch_core import reference
from torch_core.base.specs import AttentionSpec

ROWS = [[-2, 5, 3, -4], [6, -1, 1, 7]]


def _by_mask(case: AttentionCase) -> np.ndarray:
    """Every query with every key of the batch, in numpy: hidden unless row and id agree, and by position in order."""
    query, key, value = (case.operands[name].astype(np.float64) for name in ("query", "key", "value"))
    ids, starts, spec = case.options["segment_ids"], case.operands["query_start_loc"], case.spec
    rows = np.searchsorted(starts, np.arange(len(ids)), side="right")
    tokens = np.arange(len(ids))
    mask = (ids[:, None] == ids) & (rows[:, None] == rows) & (ids > 0)
    mask &= tokens[:, None] >= tokens if spec.causal else True
    if spec.window_left is not None:
        mask &= tokens[:, None] - tokens <= spec.window_left
    heads = np.arange(query.shape[1]) // (query.shape[1] // key.shape[1])
    scores = spec.scale * np.einsum("ihd,jhd->hij", query, key[:, heads])
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * np.tanh(scores / spec.logits_soft_cap)
    weights = np.where(mask, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    if "sinks" in case.options:
        total = total + np.exp(case.options["sinks"])[:, None, None]
    out = np.einsum("hij,jhd->ihd", weights / np.where(mask.any(-1)[:, None], total, 1), value[:, heads])
    return np.where(ids[:, None, None] > 0, out, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"spec": AttentionSpec(scale=0.3, causal=False)},
        {"spec": AttentionSpec(scale=0.3, window_left=2, logits_soft_cap=1.5)},
        {"sinks": np.linspace(-1, 1, 6).astype(np.float32)},
    ],
    ids=["causal", "both ways", "window and cap", "sinks"],
)
def test_segments_are_a_mask_of_equal_ids(options: dict[str, Any], seed: int) -> None:
    case = segment_case(seed, ROWS, **options)
    out, lse = reference.attention(padded(case).call(), compute_dtype=torch.float64)
    np.testing.assert_allclose(out.numpy(), _by_mask(case), atol=1e-12)
    assert (lse.numpy()[case.options["segment_ids"] <= 0] == -np.inf).all()


def test_segments_are_sequences_of_their_own(seed: int) -> None:
    case = segment_case(seed, [[4, 6]], spec=AttentionSpec(scale=0.3, attention_chunk=4))
    alone = {"query_start_loc": np.array([0, 4, 10], np.int32), "key_start_loc": np.array([0, 4, 10], np.int32)}
    options = {**case.options, "segment_ids": None}
    apart = AttentionCase(seed, case.spec, {**case.operands, **alone}, case.limits, paged=False, options=options)
    assert torch.equal(case.expected()[0], apart.expected()[0])
