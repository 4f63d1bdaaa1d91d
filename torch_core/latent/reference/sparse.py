"""DeepSeek's sparse attention: an indexer's scores, and attention to chosen latents, query by query."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torch_core.latent.call import LatentCall
from torch_core.latent.reference.latent import mla_attention
from torch_core.latent.sparse_call import IndexerCall


def indexer_logits(call: IndexerCall[Tensor], *, compute_dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns `[num_tokens, table_tokens]`: the score of every key that a query sees, -inf for the others.

    Example:
        >>> call = IndexerCall(query=torch.tensor([[[1.0], [-1.0]]]), weights=torch.tensor([[1.0, 10.0]]),
        ...                    key_cache=torch.tensor([[[0.0]] * 2, [[2.0], [-3.0]]]),
        ...                    block_tables=torch.tensor([[1, 0]]), seq_lens=torch.tensor([2]),
        ...                    query_start_loc=torch.tensor([0, 1]), scale=1.0, max_query_len=1)
        >>> indexer_logits(call).tolist()
        [[2.0, 30.0, -inf, -inf]]
    """
    logits = torch.full((call.num_tokens, call.table_tokens), float("-inf"), dtype=compute_dtype)
    starts, scale = call.query_start_loc.tolist(), float(1.0 if call.k_scale is None else call.k_scale)
    for seq, seq_len in enumerate(call.seq_lens.tolist()):
        for token in range(starts[seq], starts[seq + 1]):
            for key in range(seq_len - (starts[seq + 1] - token) + 1):
                block = call.block_tables[seq, key // call.block_size]
                row = call.key_cache[block, key % call.block_size].to(compute_dtype) * scale
                scores = call.scale * (call.query[token].to(compute_dtype) @ row)
                logits[token, key] = call.weights[token].to(compute_dtype) @ scores.relu()
    return logits


def sparse_mla_attention(
    call: LatentCall[Tensor], topk_indices: Tensor, *, compute_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attends to chosen latents: query `t` sees the keys at the positions `topk_indices[t]` and no others.

    Negative indices are skipped.

    Returns:
        The output and the lse, as `mla_attention` does.
    """
    results = []
    for token in range(call.num_tokens):
        seq = int((call.query_start_loc[1:] <= token).sum())
        chosen = [index for index in topk_indices[token].tolist() if index >= 0]
        if seq == call.num_seqs:
            chosen = []
        rows = [
            call.latent_cache[call.block_tables[seq, index // call.block_size], index % call.block_size]
            for index in chosen
        ]
        block = torch.stack([*rows, torch.zeros_like(call.latent_cache[0, 0])])[None]
        results.append(
            mla_attention(
                replace(
                    call,
                    query=call.query[token : token + 1],
                    latent_cache=block,
                    block_tables=torch.zeros(1, 1, dtype=torch.int32),
                    seq_lens=torch.tensor([len(rows)], dtype=torch.int32),
                    query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
                    spec=replace(call.spec, causal=False),
                    max_query_len=1,
                ),
                compute_dtype=compute_dtype,
            )
        )
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    return out, lse
