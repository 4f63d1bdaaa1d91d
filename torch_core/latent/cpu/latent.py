"""Multi-head latent attention and the write of latents for CPU tensors: paged operations on one shared head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.cpu.gather import raw_array
from torch_core.attention.cpu.paged import paged_attention
from torch_core.cache_writes.cpu.blocks import write_kv_cache
from torch_core.cache_writes.cpu.rotary import rotate
from torch_core.latent.call import LatentCall, LatentWriteCall, as_paged, as_write
from torch_core.latent.packed import pack_latents, unpack_latents


def mla_attention(call: LatentCall[Tensor]) -> dict[str, Tensor]:
    """Attends to cached latents; of packed ones, the blocks that sequences reach are unpacked first."""
    return paged_attention(as_paged(_unpacked(call) if call.is_packed else call))


def write_latent_cache(call: LatentWriteCall[Tensor]) -> None:
    """Stores new latents and rotary keys, in place. Nothing is checked but that blocks exist."""
    call = call.rotated_by(partial(_rotated, call))
    if not call.is_packed:
        write_kv_cache(as_write(call))
        return
    slots = call.slot_mapping.numpy()
    live = np.flatnonzero(slots >= 0)
    if len(live):
        places = np.divmod(slots[live], call.latent_cache.shape[1])
        raw_array(call.latent_cache)[places] = pack_latents(call.kv_c[live], call.k_pe[live]).numpy()


def _unpacked(call: LatentCall[Tensor]) -> LatentCall[Tensor]:
    tables, seq_lens = call.block_tables, call.seq_lens
    live = torch.arange(tables.shape[1]) * call.block_size < seq_lens[:, None]
    # Values past a sequence's end are undefined; the null block replaces them.
    blocks = torch.where(live, tables, 0).flatten().long()
    dtype = call.query.dtype if call.query.dtype.itemsize > 1 else torch.bfloat16
    rows = unpack_latents(call.latent_cache[blocks], call.kv_lora_rank, dtype)
    own = torch.arange(tables.numel(), dtype=torch.int32).view(tables.shape)
    return replace(call, latent_cache=rows, block_tables=own)


def _rotated(call: LatentWriteCall[Tensor], cos_sin_cache: Tensor, positions: Tensor) -> Tensor:
    """Returns the rotary keys of all slots, rotated; keys without a slot are rotated by position 0."""
    count = call.slot_mapping.shape[0]
    positions = torch.where(call.slot_mapping >= 0, positions[:count], 0)
    return rotate(call.k_pe[:count], cos_sin_cache[positions.long()], is_neox_style=call.is_neox_style)
