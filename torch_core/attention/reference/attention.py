"""Attention of whole batches, over the blocks of a cache and over packed keys and values, and its derivative."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torch_core.attention.backward_call import DenseBackwardCall, forward_of
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.reference.sequence import attend, empty_results, on_the_host, store_output
from torch_core.base.errors import InvalidInput


def paged_attention(call: PagedCall[Tensor], *, compute_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Attends any mix of prefill, chunked prefill, speculative and decode rows over a paged cache.

    The last `q` of the `seq_lens[s]` tokens of sequence `s` are its query rows,
    `query_start_loc[s]:query_start_loc[s + 1]`; their keys and values are in the cache already. Token `j` of the
    sequence is in block `block_tables[s, j // block_size]` at offset `j % block_size`.

    Only the first `ceil(seq_lens[s] / block_size)` entries of a table row are used; later entries are never read. A
    used entry may be any block, the null block 0 for instance, as long as every token in it is hidden from every query
    row, by a sliding window for example: the content of hidden positions never reaches a result.

    Args:
        call: the call; a scale per token and head is multiplied with one per tensor when both are given.
        compute_dtype: the dtype of the arithmetic and of the output. None computes in float32 (float64 for a float64
            query) and returns the query's dtype, bfloat16 for an fp8 query.

    Returns:
        The output and the lse; padding rows give zeros and -inf. See `torch_core.attention.reference.sequence`.

    Raises:
        InvalidInput: offsets that fall or exceed the query, a sequence longer than its table row, a block id in use
            that the cache does not have.

    Example:
        >>> from torch_core.base.specs import AttentionSpec
        >>> cache = torch.zeros(2, 2, 4, 1, 2)
        >>> cache[1, 1, :3] = 5.0
        >>> call = PagedCall(query=torch.ones(1, 1, 2), kv_cache=cache, block_tables=torch.tensor([[1, 99]]),
        ...                  seq_lens=torch.tensor([3]), query_start_loc=torch.tensor([0, 1]),
        ...                  spec=AttentionSpec(scale=1.0), max_query_len=1)
        >>> paged_attention(call)[0].round(decimals=4).tolist()
        [[[5.0, 5.0]]]
    """
    call = on_the_host(call)
    if call.seq_lens.shape[0] != call.num_seqs:
        problem = f"has {call.seq_lens.shape[0]} entries and query_start_loc {call.num_seqs + 1}"
        raise InvalidInput("seq_lens", problem, "they need num_seqs and num_seqs + 1")
    # The specification defines the result of more queries than keys under a causal mask; the operations refuse them.
    call.of({**call.__dict__, "spec": replace(call.spec, causal=False)}).check_values()
    key_cache, value_cache = call.kv_cache.unbind(1) if call.kv_cache is not None else call.caches
    starts = call.query_start_loc.tolist()
    output, lse, compute_dtype = empty_results(call, compute_dtype)
    for seq, seq_len in enumerate(call.seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        blocks = call.block_tables[seq, : -(-seq_len // call.block_size)]
        output[rows], lse[rows] = attend(
            call,
            seq,
            _scaled(call.query[rows].cpu().to(compute_dtype), call.q_scale),
            _gather(key_cache, blocks, seq_len, call.k_scale, call.k_scale_cache, compute_dtype),
            _gather(value_cache, blocks, seq_len, call.v_scale, call.v_scale_cache, compute_dtype),
        )
    return store_output(call, output), lse.to(call.query.device)


def attention(call: DenseCall[Tensor], *, compute_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Attends sequences of unequal length that are packed one after the other.

    Sequence `s` owns query rows `query_start_loc[s]:query_start_loc[s + 1]` and key rows
    `key_start_loc[s]:key_start_loc[s + 1]`. The two lengths may differ (cross attention, a query against a longer
    past); the mask is aligned bottom-right, as in `AttentionSpec`. With segment ids, each segment of a sequence attends
    to its own keys, as a sequence of its own; padding gives zeros and -inf.

    Args:
        call: the call.
        compute_dtype: as in `paged_attention`.

    Returns:
        The output and the lse; padding rows give zeros and -inf. See `torch_core.attention.reference.sequence`.

    Raises:
        InvalidInput: offsets that fall, that do not start at 0, or that exceed their tensor or the stated maximum;
            segments that are not one run of tokens.

    Example:
        >>> from torch_core.base.specs import AttentionSpec
        >>> x, starts = torch.ones(3, 1, 2), torch.tensor([0, 3])
        >>> call = DenseCall(query=x, key=x, value=x, query_start_loc=starts, key_start_loc=starts,
        ...                  spec=AttentionSpec(scale=0.5), max_query_len=3)
        >>> attention(call)[0].round(decimals=4).flatten().tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    call = on_the_host(call)
    call.check_values()
    query_starts, key_starts = call.query_start_loc.tolist(), call.key_start_loc.tolist()
    if len(query_starts) != len(key_starts):
        problem = f"has {len(key_starts)} entries and query_start_loc {len(query_starts)}"
        raise InvalidInput("key_start_loc", problem, "both need num_seqs + 1")
    output, lse, compute_dtype = empty_results(call, compute_dtype)
    for seq in range(call.num_seqs):
        every_row, every_key = (torch.arange(*starts[seq : seq + 2]) for starts in (query_starts, key_starts))
        for rows, keys in _segments(call, every_row, every_key):
            query, key, value = (
                x.cpu().to(compute_dtype) for x in (call.query[rows], call.key[keys], call.value[keys])
            )
            found, sums = attend(call, seq, query, key, value)
            output[rows], lse[rows] = found.to(output.dtype), sums.to(lse.dtype)
    return store_output(call, output), lse.to(call.query.device)


def attention_backward(
    call: DenseBackwardCall[Tensor], *, compute_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Returns the gradients by name (`DenseBackwardCall.outputs`), in `compute_dtype` (the query's when None).

    The forward pass is computed again: `out` and `lse` are not read.

    Raises:
        InvalidInput: as `attention`.
    """
    compute_dtype = compute_dtype or call.query.dtype
    names = [name.removeprefix("d_") for name in call.outputs()]
    leaves = {name: getattr(call, name).detach().cpu().to(compute_dtype, copy=True).requires_grad_() for name in names}
    real = torch.arange(call.num_tokens) < call.query_start_loc[-1].item()
    d_out = call.d_out.cpu().to(compute_dtype).masked_fill(~real[:, None, None], 0)
    with torch.enable_grad():
        out, lse = attention(forward_of(call).with_arrays(leaves), compute_dtype=compute_dtype)
        loss = (out * d_out).sum()
        if call.d_lse is not None:
            seen = lse > -torch.inf
            loss = loss + (lse.masked_fill(~seen, 0) * call.d_lse.cpu().to(lse.dtype).masked_fill(~seen, 0)).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {f"d_{name}": gradient for name, gradient in zip(names, found, strict=True)}


def _segments(call: DenseCall[Tensor], rows: Tensor, keys: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns the rows and keys of each segment of a sequence; all of them without segment ids."""
    if call.segment_ids is None:
        return [(rows, keys)]
    ids, key_ids = (
        call.segment_ids[rows],
        (call.segment_ids if call.key_segment_ids is None else call.key_segment_ids)[keys],
    )
    return [(rows[ids == segment], keys[key_ids == segment]) for segment in ids[ids > 0].unique()]


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
