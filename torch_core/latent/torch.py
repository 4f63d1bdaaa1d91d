"""Multi-head latent attention on torch tensors by keywords: attention to cached latents, and their write."""

from __future__ import annotations

from torch import Tensor

from torch_core.attention.torch import output_and_lse_of, output_of
from torch_core.base.specs import AttentionSpec
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.launch.run import run


def mla_call(
    query: Tensor,
    latent_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    kv_lora_rank: int,
    spec: AttentionSpec,
    max_query_len: int,
    out: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    q_scale: Tensor | float | None = None,
    out_scale: Tensor | float | None = None,
    sinks: Tensor | None = None,
    kv_chunk_size: int | None = None,
) -> LatentCall[Tensor]:
    """Attends to cached latents in the absorbed form of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    The exact semantics are those of `torch_core.reference.mla_attention`. Everything that `paged_attention` promises of
    tables, padding and neighbours holds here.

    Args:
        query: float32, bfloat16 or float16 `[num_tokens, num_heads, kv_lora_rank + rope_dim]`: the query projected into
            latent space, and its rotary part. fp8 with `q_scale`.
        latent_cache: `[num_blocks, block_size, kv_lora_rank + rope_dim]`, or uint8 of packed rows. Only read.
        block_tables: int32 `[num_seqs, max_blocks]`.
        seq_lens: int32 `[num_seqs]`, tokens in the cache; 0 for a padding row.
        query_start_loc: int32 `[num_seqs + 1]`.
        kv_lora_rank: elements of a latent.
        spec: the static options. The scale is that of the plain form, `(nope_dim + rope_dim) ** -0.5` for most models.
        max_query_len: an upper bound on the query lengths; it never changes a result.
        out: like the result, written in place and returned; None makes one.
        k_scale: stored row * k_scale = real row; a number or a one-element float32 tensor; None for 1.
        q_scale: the same for an fp8 query.
        out_scale: scale of an fp8 `out`, which then holds `result / out_scale`, saturated.
        sinks: float `[num_heads]`, a logit without a value in every softmax; the lse includes it.
        kv_chunk_size: tokens of one chunk of the split kernel; see `LatentCall`.

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
        ...               spec=AttentionSpec(scale=1.0), max_query_len=1).round(decimals=4).tolist()
        [[[5.0, 5.0]]]
    """
    return LatentCall(
        query=query,
        latent_cache=latent_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        kv_lora_rank=kv_lora_rank,
        spec=spec,
        max_query_len=max_query_len,
        out=out,
        k_scale=k_scale,
        q_scale=q_scale,
        out_scale=out_scale,
        sinks=sinks,
        kv_chunk_size=kv_chunk_size,
    )


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

    Args:
        kv_c: `[num_tokens, kv_lora_rank]`, normalised.
        k_pe: `[num_tokens, rope_dim]`, rotated, or with `positions` to be rotated here.
        latent_cache: `[num_blocks, block_size, kv_lora_rank + rope_dim]`, or uint8 of packed rows as
            `LatentCacheSpec(dtype="uint8")` has them (vLLM: fp8_ds_mla); written in place.
        slot_mapping: int32 `[rows]`, `rows <= num_tokens`; a negative slot writes nothing.
        k_scale: an element is stored as `real / scale`; a number or a one-element float32 tensor; None for 1. Packed
            rows have scales of their own.
        cos_sin_cache: `[max_positions, rope_dim]`, for each position all cosines and then all sines.
        positions: int32 `[rows or more]`, of the tokens.
        is_neox_style: element i is rotated with element i + rope_dim / 2; otherwise neighbours are (DeepSeek).

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


mla_attention = output_of(mla_call, "mla_attention")
mla_attention_with_lse = output_and_lse_of(mla_call, "mla_attention_with_lse")
