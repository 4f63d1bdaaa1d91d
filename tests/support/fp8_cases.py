"""What fp8 prefill may lose: its own rounding of the weights in plain torch, and tolerances made from it."""

from __future__ import annotations

import torch

from tests.support.attention_cases import AttentionCase, assert_as_exact
from torch_core.reference.masks import visible_keys

__all__ = ["assert_matches_fp8_weights", "with_e4m3_weights"]

_WEIGHT_SCALE = 2.0**8


def with_e4m3_weights(case: AttentionCase) -> torch.Tensor:
    """Returns a paged case's output, bfloat16, with weights rounded to e4m3 as the fp8 prefill kernel rounds them.

    A weight is 2**8 * exp(score - the row's maximum); the sum of a row is that of the weights before they are rounded.
    All else is float32. Masks, windows and sinks are served, no other option but the scales.
    """
    tensors = case.tensors()
    query, cache = tensors["query"].float(), tensors["kv_cache"].float()
    group = query.shape[1] // cache.shape[3]
    starts = tensors["query_start_loc"].tolist()
    output = torch.zeros(query.shape)
    for seq, seq_len in enumerate(tensors["seq_lens"].tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        if seq_len == 0 or rows.start == rows.stop:
            continue
        blocks = tensors["block_tables"][seq, : -(-seq_len // cache.shape[2])].long()
        key, value = (cache[blocks, which].flatten(0, 1)[:seq_len] for which in range(2))
        visible = visible_keys(rows.stop - rows.start, seq_len, spec=case.spec)
        hidden = ~visible.any(dim=0)[:, None, None]
        key, value = (x.masked_fill(hidden, 0).repeat_interleave(group, dim=1) for x in (key, value))
        factor = case.spec.scale * tensors.get("q_scale", 1.0) * tensors.get("k_scale", 1.0)
        scores = factor * torch.einsum("ihd,jhd->hij", query[rows], key)
        scores = scores.masked_fill(~visible, -torch.inf)
        shift = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        weights = _WEIGHT_SCALE * torch.exp(scores - shift)
        total = weights.sum(dim=-1, keepdim=True)
        if "sinks" in tensors:
            total = total + _WEIGHT_SCALE * torch.exp(tensors["sinks"][:, None, None] - shift)
        weights = weights.to(torch.float8_e4m3fn).float()
        mean = torch.einsum("hij,jhd->ihd", weights, value) / total.masked_fill(total == 0, 1).permute(1, 0, 2)
        # A row that sees nothing is empty, with a sink too.
        output[rows] = tensors.get("v_scale", 1.0) * mean.masked_fill(~visible.any(dim=1)[:, None, None], 0)
    return output.to(torch.bfloat16)


def assert_matches_fp8_weights(case: AttentionCase, output: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """Fails unless fp8 prefill's result is as exact as `assert_as_exact` demands, next to `with_e4m3_weights`.

    Hopper's matrix units keep about 14 bits of the sums of 8-bit products: scores and so the log-sum-exp are held to
    float16, not to float32.
    """
    exact, exact_lse = case.expected()
    assert_as_exact(output, exact, with_e4m3_weights(case), torch.bfloat16, f"output of case {case.seed}")
    if lse is not None:
        _, same_lse = case.expected(torch.float32)
        assert_as_exact(lse, exact_lse, same_lse, torch.float16, f"lse of case {case.seed}")
