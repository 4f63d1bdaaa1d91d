"""Multi-head latent attention on torch tensors by keywords: attention to cached latents, and their write."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from torch_core.attention.options import LatentSpecOptions
from torch_core.attention.torch import output, output_and_lse
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.launch.public import documented, operation
from torch_core.launch.run import run


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

    Raises:
        InvalidInput: ranks, shapes, dtypes, devices or, on the CPU, slots that do not fit.
        Unsupported: a device without an implementation.

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
