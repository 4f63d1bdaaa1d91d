"""Decode rows of several sequences in one fused call, in groups whose shape depends on each sequence alone."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.call import PagedCall
from torch_core.attention.cpu.core import attend
from torch_core.attention.cpu.gather import gather_blocks
from torch_core.attention.cpu.masks import DistanceBias

_SMALLEST_LENGTH = 64


def padded_blocks(num_keys: int, block_size: int) -> int:
    """Returns how many blocks a decode row is padded to.

    There are few values, because each costs a call of about 100 us at any size: 64, 128, 256 tokens, then two per
    octave; and multiples of four tokens, so that all sequences of a group have equal alignment.

    Example:
        >>> [padded_blocks(keys, 16) * 16 for keys in (1, 65, 129, 257, 513, 1025)]
        [64, 128, 256, 384, 768, 1536]
    """
    octave = 1 << (num_keys - 1).bit_length()
    if num_keys <= 256:
        length = max(_SMALLEST_LENGTH, octave)
    else:
        length = octave if num_keys > octave * 3 // 4 else octave * 3 // 4
    unit = math.lcm(block_size, 4)
    return -(-length // unit) * unit // block_size


def decode_group(
    call: PagedCall[Tensor],
    query: Tensor,
    lengths: list[tuple[int, int, int]],
    num_padded_blocks: int,
    scale: float,
    by_distance: DistanceBias | None,
) -> tuple[Tensor, Tensor]:
    """Attends one query row of each of several sequences.

    Keys and values are padded with zeros to a length that `padded_blocks` takes from the sequence itself, and the
    fused kernel works on one sequence and head at a time, so that a row's result is the same in any group.

    Args:
        call: the call.
        query: float32 `[num_seqs, num_kv_heads, group_size, head_size]`, the rows of the group.
        lengths: for each sequence its row of the block tables, its first visible key, and its number of keys.
        num_padded_blocks: the common padded length.
        scale: factor on the scores, every other scale included.
        by_distance: bias by the distance of the key.

    Returns:
        float32 output `[num_seqs, num_kv_heads, group_size, head_size]` and lse without the last axis.
    """
    block_tables, block_size = call.block_tables.numpy(), call.block_size
    num_seqs, num_kv_heads = query.shape[:2]
    length = num_padded_blocks * block_size
    blocks = np.zeros((num_seqs, num_padded_blocks), np.int64)
    mask = np.zeros((num_seqs, 1, 1, length), np.float32)
    live = []
    for index, (row, first_key, seq_len) in enumerate(lengths):
        first_block = first_key // block_size
        end_block = -(-seq_len // block_size)
        blocks[index, : end_block - first_block] = block_tables[row, first_block:end_block]
        first, end = first_key - first_block * block_size, seq_len - first_block * block_size
        mask[index, 0, 0, end:] = -np.inf
        if first:
            mask[index, 0, 0, :first] = -np.inf
        live.append((first, end))
    key, value = gather_blocks(call, blocks, live)
    if by_distance is not None:
        last = np.array([end - 1 for _, end in live], np.float32)[:, None]
        bias = by_distance.at(np.arange(length, dtype=np.float32) - last)
        mask = mask + bias.swapaxes(0, 1).reshape(num_seqs, num_kv_heads, -1, length)
    return attend(query, key, value, scale=scale, bias=torch.from_numpy(mask))
