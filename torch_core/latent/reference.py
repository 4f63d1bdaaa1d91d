"""The specification of latent attention and of chosen latents in plain torch: paged operations on one shared head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from torch_core.attention.reference.attention import paged_attention
from torch_core.attention.reference.sequence import on_the_host
from torch_core.base.specs import PACKED_GROUP
from torch_core.cache_writes.reference import largest_code, rotated_pairs, write_kv_cache
from torch_core.latent.call import LatentCall, LatentWriteCall, as_paged, as_write
from torch_core.latent.sparse_call import IndexerCall


def mla_attention(call: LatentCall[Tensor], *, compute_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Attends to cached latents: a token's row is the key of every head, its first `kv_lora_rank` elements the value.

    Args:
        call: the call.
        compute_dtype: as in `torch_core.reference.paged_attention`, whose mask, scales and errors hold here too.

    Returns:
        The output `[num_tokens, num_heads, kv_lora_rank]` and the lse.

    Example:
        >>> from torch_core.base.specs import AttentionSpec
        >>> latents = torch.tensor([[[0.0, 0.0, 0.0]] * 2, [[1.0, 2.0, 9.0], [3.0, 4.0, 9.0]]])
        >>> indices = dict(block_tables=torch.tensor([[1]]), seq_lens=torch.tensor([2]),
        ...                query_start_loc=torch.tensor([0, 1]))
        >>> call = LatentCall(query=torch.zeros(1, 1, 3), latent_cache=latents, kv_lora_rank=2, **indices,
        ...                   spec=AttentionSpec(scale=1.0), max_query_len=1)
        >>> mla_attention(call)[0].tolist()
        [[[2.0, 3.0]]]
    """
    if call.is_packed:
        # An fp8 query is multiplied in bfloat16.
        dtype = call.query.dtype if call.query.dtype.itemsize > 1 else torch.bfloat16
        call = replace(call, latent_cache=_unpacked(call.latent_cache, call.kv_lora_rank).to(dtype))
    return paged_attention(as_paged(call), compute_dtype=compute_dtype)


def write_latent_cache(call: LatentWriteCall[Tensor]) -> None:
    """Stores latents and rotary keys side by side, in place, as `torch_core.reference.write_kv_cache` stores keys.

    With a `cos_sin_cache` the rotary keys are rotated first; the rows of a uint8 cache are packed.

    Raises:
        InvalidInput: the call is inconsistent, or a slot is beyond the cache.

    Example:
        >>> latents = torch.zeros(2, 1, 3)
        >>> write_latent_cache(LatentWriteCall(kv_c=torch.ones(1, 2), k_pe=torch.ones(1, 1) * 5,
        ...                                    slot_mapping=torch.tensor([1]), latent_cache=latents))
        >>> latents[1].tolist()
        [[1.0, 1.0, 5.0]]
    """
    call = on_the_host(call)
    call.check()
    call.check_values()
    call = call.rotated_by(partial(_rotated, call))
    if not call.is_packed:
        write_kv_cache(as_write(call))
        return
    for token, slot in enumerate(call.slot_mapping.tolist()):
        if slot >= 0:
            row = _packed_row(call.kv_c[token], call.k_pe[token])
            call.latent_cache[divmod(slot, call.latent_cache.shape[1])] = row


def _rotated(call: LatentWriteCall[Tensor], cos_sin_cache: Tensor, positions: Tensor) -> Tensor:
    rotated = call.k_pe.clone()
    for token, slot in enumerate(call.slot_mapping.tolist()):
        if slot >= 0:
            angles = cos_sin_cache[int(positions[token])]
            rotated[token] = rotated_pairs(call.k_pe[token], angles, call.is_neox_style)
    return rotated


def _packed_row(latent: Tensor, rotary: Tensor) -> Tensor:
    groups = latent.float().view(-1, PACKED_GROUP)
    scales = (groups.abs().amax(dim=1) / largest_code(torch.float8_e4m3fn)).clamp(min=2.0**-126)
    codes = (groups / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    parts = (codes.flatten(), scales, rotary.bfloat16())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def _unpacked(rows: Tensor, rank: int) -> Tensor:
    """Returns the dequantised values of packed rows, in float32."""
    groups = rank // PACKED_GROUP
    codes = rows[..., :rank].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[..., rank : rank + 4 * groups].contiguous().view(torch.float32)
    latents = codes * scales.repeat_interleave(PACKED_GROUP, dim=-1)
    rotary = rows[..., rank + 4 * groups :].contiguous().view(torch.bfloat16).float()
    return torch.cat([latents, rotary], dim=-1)


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
