"""Seeded problems of DeepSeek's sparse attention: scores of an indexer, and attention to chosen latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tests.support.attention_cases import DTYPES, to_torch
from tests.support.latent_cases import LatentCase, latent_case
from torch_core import ops, reference
from torch_core.latent.call import LatentCall
from torch_core.latent.sparse_call import IndexerCall

__all__ = ["SparseCase", "indexer_call", "sparse_case"]


@dataclass(frozen=True)
class SparseCase(LatentCase):
    """Attention to chosen latents; see `LatentCase`."""

    def call(self, device: str = "cpu", *, with_lse: bool = False, **changes: Any) -> LatentCall[torch.Tensor]:
        return replace(self.run(ops.sparse_mla_call, device, **changes), with_lse=with_lse)

    def expected(self, compute_dtype: torch.dtype | None = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        fields = {**self.tensors(), "spec": self.spec, **self.limits}
        indices = fields.pop("topk_indices")
        return reference.sparse_mla_attention(LatentCall(**fields), indices, compute_dtype=compute_dtype)


def sparse_case(
    seed: int, *, seq_lens: Sequence[int], query_lens: Sequence[int], topk: int, **options: Any
) -> SparseCase:
    """Makes a problem; each query chooses up to `topk` of the keys that it may see, in random order.

    Between them and behind them stand negative entries; rows of padding are poison: positions beyond any sequence.
    """
    case = latent_case(seed, seq_lens=seq_lens, query_lens=query_lens, **options)
    rng = np.random.default_rng([seed, 32])
    rows = []
    for seq_len, query_len in zip(seq_lens, query_lens, strict=True):
        for position in range(seq_len - query_len, seq_len):
            chosen = rng.permutation(position + 1)[: int(rng.integers(0, topk + 1))]
            row = np.full(topk, -1)
            row[np.sort(rng.permutation(topk)[: len(chosen)])] = chosen
            rows.append(row)
    rows += [np.full(topk, 1 << 20)] * (len(case.operands["query"]) - len(rows))
    operands = {**case.operands, "topk_indices": np.array(rows, np.int32)}
    return SparseCase(case.seed, case.spec, operands, case.limits, paged=True, options=case.options)


def indexer_call(
    seed: int, *, seq_lens: Sequence[int], query_lens: Sequence[int], num_heads: int = 3, head_size: int = 16,
    block_size: int = 4, dtype: str = "float32", cache_dtype: str | None = None, padding_tokens: int = 2,
) -> IndexerCall[torch.Tensor]:  # fmt: skip
    """Makes a problem of small integers, whose scores are exact in any order of sums; poison in what is not in use."""
    rng = np.random.default_rng(seed)
    used = [-(-n // block_size) for n in seq_lens]
    free = (rng.permutation(sum(used)) + 1).tolist()
    keys = np.full((sum(used) + 1, block_size, head_size), np.nan)
    tables = np.full((len(seq_lens), max(used, default=0) + 1), 1 << 20)
    for seq, (seq_len, count) in enumerate(zip(seq_lens, used, strict=True)):
        tables[seq, :count] = [free.pop() for _ in range(count)]
        for token in range(seq_len):
            keys[tables[seq, token // block_size], token % block_size] = rng.integers(-4, 5, head_size)
    num_tokens = sum(query_lens) + padding_tokens
    query = rng.integers(-4, 5, (num_tokens, num_heads, head_size)).astype(float)
    query[num_tokens - padding_tokens :] = np.nan
    weights = rng.integers(-4, 5, (num_tokens, num_heads)).astype(np.float32)
    arrays = {
        "query": query.astype(DTYPES[dtype]),
        "weights": weights,
        "key_cache": keys.astype(DTYPES[cache_dtype or dtype]),
        "block_tables": tables.astype(np.int32),
        "seq_lens": np.array(seq_lens, np.int32),
        "query_start_loc": np.cumsum([0, *query_lens], dtype=np.int32),
    }
    return IndexerCall(
        **{name: to_torch(array) for name, array in arrays.items()},
        k_scale=0.5 if cache_dtype else None,
        scale=0.25,
        max_query_len=max(query_lens, default=0),
    )
