"""Multi-head latent attention in the absorbed form, and the write of latents: paged operations on one shared head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from torch_core.attention.reference.attention import paged_attention
from torch_core.attention.reference.sequence import on_the_host
from torch_core.base.specs import PACKED_GROUP
from torch_core.cache_writes.reference.cache import largest_code, write_kv_cache
from torch_core.cache_writes.reference.rotary import rotated_pairs
from torch_core.latent.call import LatentCall, LatentWriteCall, as_paged, as_write


def mla_attention(call: LatentCall[Tensor], *, compute_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Attends to cached latents: a token's row is the key of every head, its first `kv_lora_rank` elements the value.

    Args:
        call: the call.
        compute_dtype: as in `torch_core.reference.paged_attention`, whose mask, scales and errors hold here too.

    Returns:
        The output `[num_tokens, num_heads, kv_lora_rank]` and the lse.

    Example:
        >>> from torch_core.base.specs import AttentionSpec
        >>> latents = torch.tensor([[[0.0, 0.0, 0.0]] * 2, [[1.0, 2.0, 9.0], [3.0, 4.0, 9.0]]])
        >>> indices = dict(block_tables=torch.tensor([[1]]), seq_lens=torch.tensor([2]),
        ...                query_start_loc=torch.tensor([0, 1]))
        >>> call = LatentCall(query=torch.zeros(1, 1, 3), latent_cache=latents, kv_lora_rank=2, **indices,
        ...                   spec=AttentionSpec(scale=1.0), max_query_len=1)
        >>> mla_attention(call)[0].tolist()
        [[[2.0, 3.0]]]
    """
    if call.is_packed:
        # An fp8 query is multiplied in bfloat16.
        dtype = call.query.dtype if call.query.dtype.itemsize > 1 else torch.bfloat16
        call = replace(call, latent_cache=_unpacked(call.latent_cache, call.kv_lora_rank).to(dtype))
    return paged_attention(as_paged(call), compute_dtype=compute_dtype)


def write_latent_cache(call: LatentWriteCall[Tensor]) -> None:
    """Stores latents and rotary keys side by side, in place, as `torch_core.reference.write_kv_cache` stores keys.

    With a `cos_sin_cache` the rotary keys are rotated first; the rows of a uint8 cache are packed.

    Raises:
        InvalidInput: the call is inconsistent, or a slot is beyond the cache.

    Example:
        >>> latents = torch.zeros(2, 1, 3)
        >>> write_latent_cache(LatentWriteCall(kv_c=torch.ones(1, 2), k_pe=torch.ones(1, 1) * 5,
        ...                                    slot_mapping=torch.tensor([1]), latent_cache=latents))
        >>> latents[1].tolist()
        [[1.0, 1.0, 5.0]]
    """
    call = on_the_host(call)
    call.check()
    call.check_values()
    call = call.rotated_by(partial(_rotated, call))
    if not call.is_packed:
        write_kv_cache(as_write(call))
        return
    for token, slot in enumerate(call.slot_mapping.tolist()):
        if slot >= 0:
            row = _packed_row(call.kv_c[token], call.k_pe[token])
            call.latent_cache[divmod(slot, call.latent_cache.shape[1])] = row


def _rotated(call: LatentWriteCall[Tensor], cos_sin_cache: Tensor, positions: Tensor) -> Tensor:
    rotated = call.k_pe.clone()
    for token, slot in enumerate(call.slot_mapping.tolist()):
        if slot >= 0:
            angles = cos_sin_cache[int(positions[token])]
            rotated[token] = rotated_pairs(call.k_pe[token], angles, call.is_neox_style)
    return rotated


def _packed_row(latent: Tensor, rotary: Tensor) -> Tensor:
    groups = latent.float().view(-1, PACKED_GROUP)
    scales = (groups.abs().amax(dim=1) / largest_code(torch.float8_e4m3fn)).clamp(min=2.0**-126)
    codes = (groups / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    parts = (codes.flatten(), scales, rotary.bfloat16())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def _unpacked(rows: Tensor, rank: int) -> Tensor:
    """Returns the dequantised values of packed rows, in float32."""
    groups = rank // PACKED_GROUP
    codes = rows[..., :rank].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[..., rank : rank + 4 * groups].contiguous().view(torch.float32)
    latents = codes * scales.repeat_interleave(PACKED_GROUP, dim=-1)
    rotary = rows[..., rank + 4 * groups :].contiguous().view(torch.bfloat16).float()
    return torch.cat([latents, rotary], dim=-1)
