"""Problems of fp8 prefill, and what it may lose: its own rounding in plain torch, and tolerances made from it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tests.support.attention_cases import AttentionCase, assert_as_exact, paged_case
from torch_core.attention.reference.masks import visible_keys
from torch_core.base.specs import AttentionSpec

__all__ = ["assert_matches_fp8_weights", "random_fp8_case", "random_fp8_chunk_case", "with_e4m3_weights"]

# As the kernel has them: keys of a tile, where weights begin, and the sums of 16 weights that move a reference.
_TILE, _TOP, _FEW_TOP, _FEW_KEYS, _LIMIT = 128, 4.0, 0.0, 32, 448.0
_SCALES = ("q_scale", "k_scale", "v_scale")


def with_e4m3_weights(case: AttentionCase) -> torch.Tensor:
    """Returns a paged case's output, bfloat16, with weights rounded to e4m3 as the fp8 prefill kernel rounds them.

    A row takes tiles of keys from the last to the first; its weights are relative to a reference, which moves where
    they grow too large. The sum of a row is that of the weights before they are rounded. All else is float32. Masks,
    windows and sinks are served, no other option but the scales.
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
        factor = case.spec.scale * tensors.get("q_scale", 1.0) * tensors.get("k_scale", 1.0) * math.log2(math.e)
        scores = factor * torch.einsum("ihd,jhd->hij", query[rows], key)
        sums, total, shift = _sum_tiles(scores.masked_fill(~visible, -torch.inf), value)
        if "sinks" in tensors:
            total = total + torch.exp2(tensors["sinks"][:, None] * math.log2(math.e) - shift)
        mean = (sums / total.masked_fill(total == 0, 1)[..., None]).permute(1, 0, 2)
        # A row that sees nothing is empty, with a sink too.
        output[rows] = tensors.get("v_scale", 1.0) * mean.masked_fill(~visible.any(dim=1)[:, None, None], 0)
    return output.to(torch.bfloat16)


def _sum_tiles(scores: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(Weighted values, sums of weights, what was subtracted from scores) of scores [heads, rows, keys] in log 2."""
    heads, rows, keys = scores.shape
    padding = -keys % _TILE
    scores = torch.nn.functional.pad(scores, (0, padding), value=-torch.inf)
    value = torch.nn.functional.pad(value, (0, 0, 0, 0, 0, padding))
    sums, total = torch.zeros(heads, rows, value.shape[-1]), torch.zeros(heads, rows)
    reference = torch.full((heads, rows), -torch.inf)
    for tile, part in zip(reversed(scores.split(_TILE, -1)), reversed(value.split(_TILE)), strict=True):
        # A thread has every fourth pair of columns, and sums even and odd ones apart.
        threads = torch.exp2(tile - reference[..., None]).reshape(heads, rows, 16, 4, 2).sum(2)
        new = reference == -torch.inf
        moves = new | ~(threads.amax((-1, -2)) <= _LIMIT)
        few = new & (tile.isfinite().sum(-1) < _FEW_KEYS)
        moved = torch.where(moves, tile.amax(-1) - torch.where(few, _FEW_TOP, _TOP), reference)
        factor = torch.where(moves & ~new, torch.exp2(reference - moved), 1.0)
        reference = moved
        weights = torch.exp2(tile - reference.masked_fill(reference == -torch.inf, 0)[..., None])
        total = total * factor + weights.sum(-1)
        rounded = weights.to(torch.float8_e4m3fn).float()
        sums = sums * factor[..., None] + torch.einsum("hij,jhd->hid", rounded, part)
    return sums, total, reference.masked_fill(reference == -torch.inf, 0)


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


def random_fp8_case(seed: int, head_size: int | None = None, *, small: bool = False) -> AttentionCase:
    """Draws a problem that the fp8 Hopper prefill kernel serves, of any head size unless `head_size` says it.

    Args:
        seed: of everything.
        head_size: elements of a head.
        small: few sequences and few heads.
    """
    rng = np.random.default_rng([seed, 13])
    head_size = head_size or int(rng.choice([64, 128, 256]))
    group = int(rng.choice([1, 2] if small else [1, 4, 8]))
    num_seqs = int(rng.choice([1, 3] if small else [1, 3, 40]))
    num_kv_heads = 1 if small else 2
    longest = 700 if num_seqs < 9 else 200
    # Short queries of a mixed batch go to another kernel, which rounds weights otherwise; here all are long or empty.
    seq_lens = [int(rng.integers(0, longest)) for _ in range(num_seqs - 1)] + [int(rng.integers(260, 900))]
    query_lens = [min(n, int(rng.choice([0, 100, n]))) for n in seq_lens[:-1]] + [int(rng.integers(130, 260))]
    causal = bool(rng.random() < 0.8)
    spec = AttentionSpec(
        scale=head_size**-0.5,
        causal=causal,
        window_left=int(rng.choice([0, 63, 64, 127, 300])) if rng.random() < 0.35 else None,
        window_right=int(rng.choice([0, 70])) if not causal and rng.random() < 0.5 else None,
    )
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        scales = {name: rng.uniform(0.5, 2, 1).astype(np.float32) for name in _SCALES}
        options |= scales if seed % 2 else {name: float(scale[0]) for name, scale in scales.items()}
    if rng.random() < 0.3:
        options["sinks"] = rng.standard_normal(num_kv_heads * group).astype(np.float32)
    return paged_case(
        seed,
        seq_lens=seq_lens,
        query_lens=query_lens,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=int(rng.choice([8, 16, 16, 32, 64, 128, 256])),
        dtype="float8_e4m3fn",
        spec=spec,
        padding_tokens=int(rng.choice([0, 1, 40])),
        values=str(rng.choice(["gaussian", "sparse"], p=[0.75, 0.25])),
        **options,
    )


def random_fp8_chunk_case(seed: int, *, small: bool = False) -> tuple[AttentionCase, int]:
    """Draws a problem for the fp8 Hopper prefill kernel over chunks of keys, and the keys of a chunk.

    Args:
        seed: of everything.
        small: few sequences, heads and keys.
    """
    rng = np.random.default_rng([seed, 31])
    head_size = int(rng.choice([64, 128, 256]))
    group = int(rng.choice([1, 2, 4] if small else [1, 2, 3, 4, 8]))
    num_seqs = int(rng.choice([1, 2] if small else [1, 3, 40]))
    num_kv_heads, most_keys = (1, 500) if small else (2, 1500)
    longest = int(rng.integers(65, 100 if small else 300))
    seq_lens = [int(rng.integers(0, most_keys // 2)) for _ in range(num_seqs - 1)]
    seq_lens.append(int(rng.integers(max(longest, 300), most_keys)))
    query_lens = [min(n, int(rng.choice([0, 1, 3, longest // 2 + 1, longest]))) for n in seq_lens[:-1]] + [longest]
    causal = bool(rng.random() < 0.8)
    spec = AttentionSpec(
        scale=head_size**-0.5,
        causal=causal,
        window_left=int(rng.choice([0, 15, 63, 64, 127, 300])) if rng.random() < 0.4 else None,
        window_right=int(rng.choice([0, 70])) if not causal and rng.random() < 0.5 else None,
    )
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options |= {name: rng.uniform(0.5, 2, 1).astype(np.float32) for name in _SCALES}
    if rng.random() < 0.4:
        options["sinks"] = rng.standard_normal(num_kv_heads * group).astype(np.float32)
    case = paged_case(
        seed,
        seq_lens=seq_lens,
        query_lens=query_lens,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=int(rng.choice([8, 16, 16, 64, 128, 256])),
        dtype="float8_e4m3fn",
        spec=spec,
        padding_tokens=int(rng.choice([0, 1, 40])),
        **options,
    )
    # One chunk of all keys would be no split.
    width = case.operands["block_tables"].shape[1] * case.operands["kv_cache"].shape[2]
    return case, int(rng.choice([chunk for chunk in (128, 256, 384) if chunk < width]))
