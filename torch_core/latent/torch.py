"""Latent attention on torch tensors by keywords, to all cached latents or to chosen ones, and their write."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from torch_core.attention.options import LatentSpecOptions
from torch_core.attention.torch import output, output_and_lse
from torch_core.base.checks import check_int
from torch_core.base.errors import Unsupported
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.latent.sparse_call import IndexerCall, check_chosen_values, choice_of, chosen_latents
from torch_core.launch.public import documented, operation
from torch_core.launch.run import run
from torch_core.launch.tensors import array_spec


@documented(LatentCall, "Tensor")
def mla_call(
    query: Tensor,
    latent_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    kv_lora_rank: int,
    max_query_len: int,
    out: Tensor | None = None,
    out_dtype: str | None = None,
    **options: Unpack[LatentSpecOptions[Tensor]],
) -> LatentCall[Tensor]:
    """Attends to cached latents in the absorbed form of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    The exact semantics are those of `torch_core.reference.mla_attention`. Everything that `paged_attention` promises of
    tables, padding and neighbours holds here.

    Returns:
        The output `[num_tokens, num_heads, kv_lora_rank]` in the query's dtype (bfloat16 for fp8); the function with
        "lse" in its name also returns the natural log-sum-exp, float32 `[num_tokens, num_heads]`. Rows that see nothing
        give zeros and -inf.

    Raises:
        InvalidInput: as `paged_attention`.
        Unsupported: as `paged_attention`.

    Example:
        >>> import torch
        >>> latents = torch.zeros(2, 4, 3)
        >>> latents[1, :3] = 5.0
        >>> block_tables, seq_lens, query_start_loc = (
        ...     torch.tensor(x, dtype=torch.int32) for x in ([[1]], [3], [0, 1]))
        >>> mla_attention(torch.ones(1, 1, 3), latents, block_tables, seq_lens, query_start_loc, kv_lora_rank=2,
        ...               scale=1.0, max_query_len=1).round(decimals=4).tolist()
        [[[5.0, 5.0]]]
    """
    return LatentCall(
        query=query,
        latent_cache=latent_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        kv_lora_rank=kv_lora_rank,
        max_query_len=max_query_len,
        out=out,
        out_dtype=out_dtype,
        **options,
    )


@documented(LatentWriteCall, "Tensor")
def write_latent_cache(
    kv_c: Tensor,
    k_pe: Tensor,
    latent_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    cos_sin_cache: Tensor | None = None,
    positions: Tensor | None = None,
    is_neox_style: bool = False,
) -> None:
    """Stores new latents and rotary keys in the cache, in place (vLLM: concat_and_cache_mla).

    Example:
        >>> import torch
        >>> latents = torch.zeros(2, 1, 3)
        >>> write_latent_cache(torch.ones(2, 2), torch.ones(2, 1) * 5, latents, torch.tensor([1, -1]).int())
        >>> latents.tolist()
        [[[0.0, 0.0, 0.0]], [[1.0, 1.0, 5.0]]]
    """
    run(
        LatentWriteCall(
            kv_c=kv_c,
            k_pe=k_pe,
            latent_cache=latent_cache,
            slot_mapping=slot_mapping,
            k_scale=k_scale,
            cos_sin_cache=cos_sin_cache,
            positions=positions,
            is_neox_style=is_neox_style,
        )
    )


mla_attention = operation(mla_call, output, "mla_attention", returns="Tensor")
mla_attention_with_lse = operation(mla_call, output_and_lse, "mla_attention_with_lse", returns="tuple[Tensor, Tensor]")


@documented(IndexerCall, "Tensor")
def indexer_topk(
    query: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    topk: int,
    scale: float,
    max_query_len: int,
    k_scale: Tensor | float | None = None,
) -> Tensor:
    """Returns the positions of the keys that an indexer scores highest, for each query (DeepSeek-V3.2).

    A score is `sum over heads of weight * relu(scale * query @ key)`, of the keys up to the query's own.

    Args:
        topk: number of keys.

    Returns:
        int32 `[num_tokens, topk]`, the highest first; -1 after the last one if there are fewer.

    Example:
        >>> keys = torch.tensor([[[0.0]] * 2, [[2.0], [3.0]]])
        >>> tables, lens, starts = (torch.tensor(x).int() for x in ([[1]], [2], [0, 1]))
        >>> indexer_topk(torch.ones(1, 1, 1), torch.ones(1, 1), keys, tables, lens, starts, topk=3, scale=1.0,
        ...              max_query_len=1)
        tensor([[ 1,  0, -1]], dtype=torch.int32)
    """
    check_int("topk", topk, 1)
    call = IndexerCall(
        query=query,
        weights=weights,
        key_cache=key_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        k_scale=k_scale,
        scale=scale,
        max_query_len=max_query_len,
    )
    logits = run(call)["logits"]
    scores, found = logits.topk(min(topk, logits.shape[1]), dim=1)
    found = torch.where(scores == float("-inf"), -1, found).int()
    return torch.nn.functional.pad(found, (0, topk - found.shape[1]), value=-1)


@documented(LatentCall, "Tensor")
def sparse_mla_call(
    query: Tensor,
    latent_cache: Tensor,
    topk_indices: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    kv_lora_rank: int,
    max_query_len: int,
    out: Tensor | None = None,
    out_dtype: str | None = None,
    **options: Unpack[LatentSpecOptions[Tensor]],
) -> LatentCall[Tensor]:
    """Attends to chosen latents: query `t` sees the keys at the positions `topk_indices[t]` and no others.

    In prefill and in decode every query gathers its own latents. The exact semantics are those of
    `torch_core.reference.sparse_mla_attention`.

    Args:
        topk_indices: int32[num_tokens, topk]; positions in the query's own sequence, each once, in any order; negative
            ones are skipped. `indexer_topk` computes them; no other mask is applied, and causal is ignored.

    Returns:
        As `mla_attention`.

    Raises:
        InvalidInput: as `mla_attention`; indices of another shape or dtype.
        Unsupported: as `mla_attention`; a window, or blocks with gaps between them.
    """
    call = mla_call(
        query,
        latent_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        kv_lora_rank=kv_lora_rank,
        max_query_len=max_query_len,
        out=out,
        out_dtype=out_dtype,
        **options,
    )
    call.map(array_spec).check()
    if not latent_cache.is_contiguous():
        raise Unsupported("latent_cache has gaps between its blocks or rows; chosen latents are read from a whole one.")
    if query.device.type == "cpu":
        call.check_values()
        check_chosen_values(call, topk_indices)
    return chosen_latents(call, run(choice_of(call, topk_indices)))


sparse_mla_attention = operation(sparse_mla_call, output, "sparse_mla_attention", returns="Tensor")
sparse_mla_attention_with_lse = operation(
    sparse_mla_call, output_and_lse, "sparse_mla_attention_with_lse", returns="tuple[Tensor, Tensor]"
)
