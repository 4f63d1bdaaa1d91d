"""Scores of DeepSeek's indexer on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.latent.sparse_call import IndexerCall


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
