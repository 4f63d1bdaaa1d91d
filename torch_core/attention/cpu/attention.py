"""Attention for CPU tensors: over a paged cache, in groups of decode rows and single sequences, and packed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.cpu.core import fused_applies
from torch_core.attention.cpu.decode import decode_group, padded_blocks
from torch_core.attention.cpu.gather import gather_blocks, scale_value
from torch_core.attention.cpu.masks import Extras, first_key
from torch_core.attention.cpu.result import open_results
from torch_core.attention.cpu.rows import attend_rows

#: Keys of all sequences of one decode group, times heads and head size: 512K float32 are 2 MiB for keys alone.
_MAX_GROUP_ELEMENTS = 1 << 19


def paged_attention(call: PagedCall[Tensor]) -> dict[str, Tensor]:
    """Attends any mix of decode, speculative and prefill rows over a paged cache.

    Nothing is checked. The arithmetic is float32 for every dtype. Memory: the keys and values of one sequence, or of
    a bounded group of decode rows, in float32, and masks of at most 16 MiB.
    """
    starts, lens = call.query_start_loc.tolist(), call.seq_lens.tolist()
    extras = Extras.of(call)
    alike = extras.of_sequence(call, 0) is extras and not extras.irregular if call.num_seqs else True
    groupable = alike and fused_applies(call.spec.logits_soft_cap, call.head_size, call.value_head_size)
    groups: dict[int, list[tuple[int, int, int]]] = {}
    single: list[int] = []
    block_size = call.block_size
    for seq, seq_len in enumerate(lens):
        query_len = starts[seq + 1] - starts[seq]
        if query_len <= 0 or seq_len == 0:
            continue
        if query_len == 1 and groupable:
            first = first_key(seq_len - 1, seq_len, call.spec)
            keys = seq_len - first // block_size * block_size
            groups.setdefault(padded_blocks(keys, block_size), []).append((seq, first, seq_len))
        else:
            single.append(seq)

    found, results = open_results(call)
    query = _as_heads(call.query, call.num_kv_heads)
    scale = call.spec.scale * scale_value(call.k_scale) * scale_value(call.q_scale)
    for num_blocks, members in groups.items():
        limit = max(1, _MAX_GROUP_ELEMENTS // (num_blocks * block_size * call.num_kv_heads * call.head_size))
        for at in range(0, len(members), limit):
            part = members[at : at + limit]
            rows = _rows([starts[member[0]] for member in part])
            results.store(rows, *decode_group(call, query[rows], part, num_blocks, scale, extras.by_distance))
    for seq in single:
        rows = slice(starts[seq], starts[seq + 1])
        results.store(rows, *_attend_single(call, query[rows], scale, extras.of_sequence(call, seq), seq))
    return found


def attention(call: DenseCall[Tensor]) -> dict[str, Tensor]:
    """Attends packed sequences one by one in float32. Nothing is checked."""
    query_starts, key_starts = call.query_start_loc.tolist(), call.key_start_loc.tolist()
    seqs = [
        seq
        for seq in range(call.num_seqs)
        if query_starts[seq + 1] > query_starts[seq] and key_starts[seq + 1] > key_starts[seq]
    ]
    found, results = open_results(call)
    query = _as_heads(call.query, call.num_kv_heads)
    key, value = (x.float() if x.stride(2) == 1 else x.float().contiguous() for x in (call.key, call.value))
    all_extras = Extras.of(call)
    for seq in seqs:
        extras = all_extras.of_sequence(call, seq)
        rows = slice(query_starts[seq], query_starts[seq + 1])
        key_len = key_starts[seq + 1] - key_starts[seq]
        first = 0 if extras.mm_ranges is not None else first_key(key_len - rows.stop + rows.start, key_len, call.spec)
        keys = slice(key_starts[seq] + first, key_starts[seq + 1])
        near = (x[keys].transpose(0, 1) for x in (key, value))
        attended = attend_rows(
            query[rows], *near, first_key=first, key_len=key_len, scale=call.spec.scale, spec=call.spec, extras=extras
        )
        results.store(rows, *attended)
    return found


def _attend_single(
    call: PagedCall[Tensor], query: Tensor, scale: float, extras: Extras, seq: int
) -> tuple[Tensor, Tensor]:
    seq_len, block_size = int(call.seq_lens[seq]), call.block_size
    first = 0 if extras.mm_ranges is not None else first_key(seq_len - len(query), seq_len, call.spec)
    first_block = first // block_size
    blocks = call.block_tables.numpy()[seq : seq + 1, first_block : -(-seq_len // block_size)].astype(np.int64)
    live = (first - first_block * block_size, seq_len - first_block * block_size)
    key, value = gather_blocks(call, blocks, [live])
    key, value = (rows[0, :, live[0] : live[1]] for rows in (key, value))
    return attend_rows(query, key, value, first_key=first, key_len=seq_len, scale=scale, spec=call.spec, extras=extras)


def _as_heads(query: Tensor, num_kv_heads: int) -> Tensor:
    """Returns float32 `[num_tokens, num_kv_heads, group_size, head_size]` with a contiguous last axis."""
    num_tokens, num_heads, head_size = query.shape
    if query.dtype is not torch.float32:
        query = query.float()
    if query.stride(2) != 1:
        query = query.contiguous()
    return query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_size)


def _rows(tokens: list[int]) -> slice | Tensor:
    """Returns increasing token indices, as a slice when they are consecutive: no copy then."""
    if tokens[-1] - tokens[0] == len(tokens) - 1:
        return slice(tokens[0], tokens[-1] + 1)
    return torch.tensor(tokens)
