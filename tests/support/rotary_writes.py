"""Seeded calls that rotate queries and keys and write keys and values."""

from __future__ import annotations

import torch

from torch_core.cache_writes.rotary_call import RotaryWriteCall

__all__ = ["quarter_turns"]


def quarter_turns(
    seed: int,
    cache_dtype: torch.dtype = torch.bfloat16,
    *,
    is_neox_style: bool = True,
    heads: tuple[int, int] = (5, 2),
    head_size: int = 12,
    rotated_dim: int = 8,
    tokens: int = 5,
    k_scale: float | None = None,
    scaled: bool = False,
    behind: int | None = None,
    out_dtype: str | None = None,
) -> RotaryWriteCall[torch.Tensor]:
    """Makes a call with a token without a slot and one behind the last slot, whose keys and values are poison.

    Angles are quarter turns and elements integers, so that results are exact in any order of sums. Scales are powers of
    two; there are more rows than tokens then. `behind` heads of poison follow those of values.
    """
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    qkv = torch.randint(-8, 9, (tokens, num_heads + 2 * num_kv_heads, head_size), generator=generator).bfloat16()
    qkv[[1, -1], num_heads:] = float("nan")
    slots = torch.randperm(4 * tokens, generator=generator)[: tokens - 1].int()
    slots[1] = -1
    turns = torch.randint(0, 4, (tokens, rotated_dim // 2), generator=generator)
    quarters = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    scales = {}
    if scaled:
        qkv = torch.cat([qkv, torch.full_like(qkv[:3], torch.nan)])
        sizes = {"row_scale": tokens, "column_scale": qkv[0].numel()}
        scales = {name: 2.0 ** torch.randint(-2, 7, (size,), generator=generator) for name, size in sizes.items()}
    if behind is not None:
        qkv = torch.cat([qkv, torch.full_like(qkv[:, :1], torch.nan).repeat(1, behind, 1)], dim=1)
    return RotaryWriteCall(
        qkv=qkv,
        num_query_heads=None if behind is None else num_heads,
        **scales,
        out_dtype=out_dtype,
        cos_sin=quarters[turns].transpose(1, 2).flatten(1),
        slot_mapping=slots,
        kv_cache=torch.zeros(tokens, 2, 4, num_kv_heads, head_size).to(cache_dtype),
        k_scale=k_scale,
        is_neox_style=is_neox_style,
    )
