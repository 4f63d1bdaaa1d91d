"""Attention over keys and values that lie in blocks of a cache, found through block tables."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.errors import InvalidInput
from torch_core.reference.sequence import attend_sequence, empty_results, start_offsets, store_output
from torch_core.specs import AttentionSpec

__all__ = ["paged_attention", "paged_attention_with_lse"]


def paged_attention(query: Tensor, kv_cache: Tensor | tuple[Tensor, Tensor], *args, **kwargs) -> Tensor:
    """Returns only the output of `paged_attention_with_lse`, whose arguments it takes."""
    return paged_attention_with_lse(query, kv_cache, *args, **kwargs)[0]


def paged_attention_with_lse(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int | None = None,
    out: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | float | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    mm_prefix_range: Tensor | None = None,
    qq_bias: Tensor | None = None,
    seq_causal: Tensor | None = None,
    out_scale: Tensor | float | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends any mix of prefill, chunked prefill, speculative and decode rows over a paged cache.

    The last `q` of the `seq_lens[s]` tokens of sequence `s` are its query rows,
    `query_start_loc[s]:query_start_loc[s + 1]`; their keys and values are in the cache already. Token `j` of the
    sequence lies in block `block_tables[s, j // block_size]` at offset `j % block_size`.

    Only the first `ceil(seq_lens[s] / block_size)` entries of a table row are used; what stands after them is never
    looked at. A used entry may be any block, the null block 0 for instance, as long as every token in it is hidden
    from every query row, by a sliding window say: what a block holds at hidden places never reaches a result.

    Args:
        query: `[num_tokens, num_heads, head_size]`; rows at and after `query_start_loc[-1]` are padding. An fp8 query
            is allowed; the output is then bfloat16.
        kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_size]`, or a pair of a key cache
            `[num_blocks, block_size, num_kv_heads, head_size]` and a value cache whose head size may differ.
        block_tables: int `[num_seqs, max_blocks]`.
        seq_lens: int `[num_seqs]`, tokens in the cache, the new ones included. 0 for a padding row.
        query_start_loc: int `[num_seqs + 1]`.
        spec: the static options.
        max_query_len: checked against the query lengths when given; it never changes a result.
        out: `[num_tokens, num_heads, value_head_size]`, written in place and returned; None makes one.
        k_scale: stored key * k_scale = real key; None for 1.
        v_scale: the same for values.
        alibi_slopes: float `[num_heads]`.
        sinks: float `[num_heads]`: a logit without a value in every softmax.
        q_scale: the same for an fp8 query.
        k_scale_cache: float32 `[num_blocks, block_size, num_kv_heads]`: one key scale per token and head, multiplied
            with `k_scale` when both are given.
        v_scale_cache: the same for values.
        mm_prefix_range: int `[num_seqs, ranges, 2]`; see `visible_keys`.
        qq_bias: float `[rows, rows]`; see `score_bias`.
        seq_causal: bool `[num_seqs]`, overrides `spec.causal` sequence by sequence.
        out_scale: for an fp8 `out`, which then holds `result / out_scale`, saturated.
        compute_dtype: the dtype of the arithmetic and of the output. None computes in float32 (float64 for a float64
            query) and returns the query's dtype.

    Returns:
        The output and the lse; padding rows give zeros and -inf. See `attend_sequence`.

    Raises:
        InvalidInput: offsets that fall or exceed the query, a sequence longer than its table row, a block id in use
            that the cache does not have.

    Example:
        >>> cache = torch.zeros(2, 2, 4, 1, 2)
        >>> cache[1, 1, :3] = 5.0
        >>> out = paged_attention(torch.ones(1, 1, 2), cache, torch.tensor([[1, 99]]), torch.tensor([3]),
        ...                       torch.tensor([0, 1]), spec=AttentionSpec(scale=1.0))
        >>> out.round(decimals=4).tolist()
        [[[5.0, 5.0]]]
    """
    key_cache, value_cache = kv_cache.unbind(1) if isinstance(kv_cache, Tensor) else kv_cache
    starts = start_offsets("query_start_loc", query_start_loc, query.shape[0], max_query_len)
    if seq_lens.shape[0] != len(starts) - 1:
        raise InvalidInput(
            f"seq_lens has {seq_lens.shape[0]} entries and query_start_loc {len(starts)}; they need num_seqs and "
            "num_seqs + 1."
        )
    output, lse, compute_dtype = empty_results(query, value_cache.shape[-1], compute_dtype)
    for seq, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        blocks = _blocks_in_use(seq, seq_len, block_tables, key_cache.shape[0], key_cache.shape[1])
        output[rows], lse[rows] = attend_sequence(
            _scaled(query[rows].cpu().to(compute_dtype), q_scale),
            _gather(key_cache, blocks, seq_len, k_scale, k_scale_cache, compute_dtype),
            _gather(value_cache, blocks, seq_len, v_scale, v_scale_cache, compute_dtype),
            spec=spec,
            causal=None if seq_causal is None else bool(seq_causal[seq]),
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            mm_prefix_range=None if mm_prefix_range is None else mm_prefix_range[seq],
            qq_bias=qq_bias,
        )
    return store_output(output, out, out_scale, query.device), lse.to(query.device)


def _blocks_in_use(seq: int, seq_len: int, block_tables: Tensor, num_blocks: int, block_size: int) -> Tensor:
    used = -(-seq_len // block_size)
    if seq_len < 0 or used > block_tables.shape[1]:
        raise InvalidInput(
            f"seq_lens[{seq}] is {seq_len}; a row of block_tables holds at most "
            f"{block_tables.shape[1]} x {block_size} = {block_tables.shape[1] * block_size} tokens."
        )
    blocks = block_tables[seq, :used].cpu().long()
    outside = ((blocks < 0) | (blocks >= num_blocks)).nonzero()
    if outside.numel():
        first = int(outside[0])
        raise InvalidInput(
            f"block_tables[{seq}, {first}] is {int(blocks[first])}; the cache has blocks 0 to {num_blocks - 1}."
        )
    return blocks


def _gather(
    cache: Tensor,
    blocks: Tensor,
    seq_len: int,
    scale: Tensor | float | None,
    scale_cache: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the first `seq_len` rows of a sequence, `[seq_len, num_kv_heads, head_size]`, with scales applied."""
    blocks = blocks.to(cache.device)
    rows = cache[blocks].cpu().to(dtype).flatten(0, 1)[:seq_len]
    if scale_cache is not None:
        rows = rows * scale_cache[blocks].cpu().to(dtype).flatten(0, 1)[:seq_len, :, None]
    return _scaled(rows, scale)


def _scaled(tensor: Tensor, scale: Tensor | float | None) -> Tensor:
    if scale is None:
        return tensor
    return tensor * torch.as_tensor(scale).cpu().reshape(()).to(tensor.dtype)
