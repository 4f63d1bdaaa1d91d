"""Multi-head latent attention in the absorbed form, and the write of latents: paged operations on one shared head."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.calls import LatentCall, LatentWriteCall, as_paged, as_write
from torch_core.reference.attention import paged_attention
from torch_core.reference.cache import write_kv_cache

__all__ = ["mla_attention", "write_latent_cache"]


def mla_attention(call: LatentCall[Tensor], *, compute_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Attends to cached latents: a token's row is the key of every head, its first `kv_lora_rank` elements the value.

    Args:
        call: the call.
        compute_dtype: as in `torch_core.reference.paged_attention`, whose mask, scales and errors hold here too.

    Returns:
        The output `[num_tokens, num_heads, kv_lora_rank]` and the lse.

    Example:
        >>> from torch_core.specs import AttentionSpec
        >>> latents = torch.tensor([[[0.0, 0.0, 0.0]] * 2, [[1.0, 2.0, 9.0], [3.0, 4.0, 9.0]]])
        >>> indices = dict(block_tables=torch.tensor([[1]]), seq_lens=torch.tensor([2]),
        ...                query_start_loc=torch.tensor([0, 1]))
        >>> call = LatentCall(query=torch.zeros(1, 1, 3), latent_cache=latents, kv_lora_rank=2, **indices,
        ...                   spec=AttentionSpec(scale=1.0), max_query_len=1)
        >>> mla_attention(call)[0].tolist()
        [[[2.0, 3.0]]]
    """
    return paged_attention(as_paged(call), compute_dtype=compute_dtype)


def write_latent_cache(call: LatentWriteCall[Tensor]) -> None:
    """Stores latents and rotary keys side by side, in place, as `torch_core.reference.write_kv_cache` stores keys.

    Raises:
        InvalidInput: the call does not hold together, or a slot lies beyond the cache.

    Example:
        >>> latents = torch.zeros(2, 1, 3)
        >>> write_latent_cache(LatentWriteCall(kv_c=torch.ones(1, 2), k_pe=torch.ones(1, 1) * 5,
        ...                                    slot_mapping=torch.tensor([1]), latent_cache=latents))
        >>> latents[1].tolist()
        [[1.0, 1.0, 5.0]]
    """
    write_kv_cache(as_write(call))
