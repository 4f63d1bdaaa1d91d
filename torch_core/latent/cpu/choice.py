"""Slots of chosen keys on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.latent.sparse_call import ChoiceCall


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
