"""Seeded writes of latents whose rotary keys are rotated on the way."""

from __future__ import annotations

import torch

from torch_core.base.specs import packed_latent_bytes
from torch_core.latent.call import LatentWriteCall

__all__ = ["rotary_write"]


def rotary_write(
    seed: int, dtype: torch.dtype, *, is_neox_style: bool = False, rank: int = 256, rope_dim: int = 8, tokens: int = 5
) -> LatentWriteCall[torch.Tensor]:
    """Makes a write with a token without a slot, whose position and key are poison.

    Positions are powers of i for the angles, and keys integers, so that rotated keys are exact in any order of sums.
    """
    generator = torch.Generator().manual_seed(seed)
    quarters = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    slots = torch.randperm(4 * tokens, generator=generator)[:tokens].int()
    slots[1] = -1
    positions = torch.randint(0, 4, (tokens,), generator=generator).int()
    positions[1] = 10**6
    kv_c = torch.randn(tokens, rank, generator=generator)
    kv_c[2, :128] = 0.0
    k_pe = torch.randint(-8, 9, (tokens, rope_dim), generator=generator).float()
    k_pe[1] = float("nan")
    width = packed_latent_bytes(rank, rope_dim) if dtype == torch.uint8 else rank + rope_dim
    return LatentWriteCall(
        kv_c=kv_c.bfloat16(),
        k_pe=k_pe.bfloat16(),
        slot_mapping=slots,
        latent_cache=torch.zeros(tokens, 4, width).to(dtype),
        cos_sin_cache=quarters.repeat_interleave(rope_dim // 2, dim=1),
        positions=positions,
        is_neox_style=is_neox_style,
    )
