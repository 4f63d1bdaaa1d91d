"""Packed rows of latents on torch tensors; `torch_core.base.specs.LatentCacheSpec` describes their bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.base.specs import LARGEST_CODE, PACKED_GROUP

_LARGEST = LARGEST_CODE["float8_e4m3fn"]
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def pack_latents(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Returns the rows of latents and rotary keys.

    Args:
        kv_c: `[tokens, kv_lora_rank]`.
        k_pe: `[tokens, rope_dim]`, rotated.

    Returns:
        uint8 `[tokens, bytes]`; a scale is `max(absmax / 448, 2**-126)` of its elements.
    """
    groups = kv_c.float().unflatten(-1, (-1, PACKED_GROUP))
    scales = (groups.abs().amax(-1) / _LARGEST).clamp_(min=_SMALLEST_SCALE)
    codes = (groups / scales[..., None]).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).flatten(-2)
    return torch.cat([part.view(torch.uint8) for part in (codes, scales, k_pe.bfloat16().contiguous())], dim=-1)


def unpack_latents(rows: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> Tensor:
    """Returns the dequantised values of packed rows.

    Args:
        rows: uint8 `[..., bytes]`.
        kv_lora_rank: elements of a latent.
        dtype: dtype of the result, to which it is rounded.

    Returns:
        `[..., kv_lora_rank + rope_dim]`, on the device of the rows.

    Example:
        >>> rows = pack_latents(torch.full((1, 128), 2.0), torch.tensor([[3.0, 4.0]]))
        >>> unpack_latents(rows, 128, torch.float32)[0, 126:].tolist()
        [2.0, 2.0, 3.0, 4.0]
    """
    groups = kv_lora_rank // PACKED_GROUP
    codes, scales, rotary = rows.split([kv_lora_rank, 4 * groups, rows.shape[-1] - kv_lora_rank - 4 * groups], dim=-1)
    latents = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (groups, PACKED_GROUP))
    latents = latents * scales.contiguous().view(torch.float32)[..., None]
    return torch.cat([latents.flatten(-2).to(dtype), rotary.contiguous().view(torch.bfloat16).to(dtype)], dim=-1)
