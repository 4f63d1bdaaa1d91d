"""Latent attention, writes of latents, and scores and slots of chosen keys on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.cpu.attention import paged_attention
from torch_core.attention.cpu.gather import raw_array
from torch_core.cache_writes.cpu import rotate, write_kv_cache
from torch_core.latent.call import LatentCall, LatentWriteCall, as_paged, as_write
from torch_core.latent.packed import pack_latents, unpack_latents
from torch_core.latent.sparse_call import ChoiceCall, IndexerCall


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


def indexer_logits(call: IndexerCall[Tensor]) -> dict[str, Tensor]:
    """Scores every key that a query sees, in float32; sequence by sequence, on the blocks that it has."""
    logits = torch.full((call.num_tokens, call.table_tokens), float("-inf"))
    starts = call.query_start_loc.tolist()
    scale = call.scale * float(1.0 if call.k_scale is None else call.k_scale)
    for seq, seq_len in enumerate(call.seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        count = rows.stop - rows.start
        if count <= 0 or seq_len == 0:
            continue
        blocks = call.block_tables[seq, : -(-seq_len // call.block_size)].long()
        keys = call.key_cache[blocks].flatten(0, 1)[:seq_len].float()
        scores = torch.einsum("thd,kd->htk", call.query[rows].float(), keys).mul_(scale).relu_()
        found = torch.einsum("htk,th->tk", scores, call.weights[rows])
        last = torch.arange(seq_len - count, seq_len)
        logits[rows, :seq_len] = found.masked_fill_(torch.arange(seq_len) > last[:, None], float("-inf"))
    return {"logits": logits}


def chosen_slots(call: ChoiceCall[Tensor]) -> dict[str, Tensor]:
    """Looks up the slots of each query's keys."""
    num_tokens = call.topk_indices.shape[0]
    starts = torch.arange(num_tokens + 1, dtype=torch.int32)
    seqs = (starts[:-1, None] >= call.query_start_loc[1:]).sum(1)
    real = seqs < call.block_tables.shape[0]
    named = (call.topk_indices >= 0) & real[:, None]
    positions = torch.where(named, call.topk_indices, 0)
    blocks = call.block_tables[torch.where(real, seqs, 0)[:, None], positions // call.block_size]
    slots = torch.where(named, blocks * call.block_size + positions % call.block_size, 0)
    # Entries that are no key go after the keys, whose order stays.
    order = (~named).int().argsort(stable=True, dim=1)
    return {"slots": slots.gather(1, order).int(), "counts": named.sum(1, dtype=torch.int32), "starts": starts}
