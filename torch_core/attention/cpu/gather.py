"""Reading blocks of a paged cache into contiguous float32 keys and values, with everything unused set to zero.

Numpy does the copying: on a few hundred rows its calls cost a third of torch's, and a decode step makes many of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.call import PagedCall

_RAW_DTYPES = {1: torch.uint8, 2: torch.int16}
#: Above this many bytes torch's own gather, which uses all threads, is faster than numpy's.
_MAX_NUMPY_BYTES = 2 << 20


def raw_array(tensor: Tensor) -> np.ndarray:
    """Returns a tensor's memory as a numpy array of the same shape; dtypes that numpy lacks come as their bits."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.float32 or tensor.dtype is torch.float16:
        return tensor.numpy()
    return tensor.view(_RAW_DTYPES[tensor.dtype.itemsize]).numpy()


def gather_blocks(call: PagedCall[Tensor], blocks: np.ndarray, live: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Returns float32 keys and values of several sequences, padded to one length.

    Args:
        call: has the cache, of any strides, and its scales per token and head.
        blocks: int64 `[num_seqs, blocks_per_seq]`, valid block ids; which one is in unused places is irrelevant.
        live: for each sequence the first and last-plus-one row that is used; all others become zero, because
            0 x NaN is NaN.

    Returns:
        Two tensors `[num_seqs, num_kv_heads, blocks_per_seq * block_size, size]`, strided views of rows that are
        contiguous by token.
    """
    if call.kv_cache is not None:
        both = raw_array(call.kv_cache)
        key, value = (_gather(both[:, index], call.kv_cache.dtype, blocks, live) for index in range(2))
    else:
        key, value = (_gather(raw_array(cache), cache.dtype, blocks, live) for cache in call.caches)
    if call.k_scale_cache is not None and call.v_scale_cache is not None:
        scale_caches = (call.k_scale_cache, call.v_scale_cache)
        scales = (_gather(cache.numpy()[..., None], torch.float32, blocks, live) for cache in scale_caches)
        key, value = (rows * scale for rows, scale in zip((key, value), scales, strict=True))
    return key, value


def scale_value(scale: Tensor | float | None) -> float:
    """Returns a per-tensor scale as a Python float; None is 1."""
    if scale is None:
        return 1.0
    return scale.item() if isinstance(scale, Tensor) else float(scale)


def _gather(cache: np.ndarray, dtype: torch.dtype, blocks: np.ndarray, live: list[tuple[int, int]]) -> Tensor:
    """Returns float32 `[num_seqs, num_kv_heads, tokens, size]` from one raw cache `[num_blocks, block_size, ...]`."""
    num_seqs = len(blocks)
    _, block_size, num_kv_heads, size = cache.shape
    if blocks.size * block_size * num_kv_heads * size * cache.itemsize > _MAX_NUMPY_BYTES:
        rows = torch.from_numpy(cache).index_select(0, torch.from_numpy(blocks.ravel())).numpy()
    else:
        rows = cache[blocks]
    rows = rows.reshape(num_seqs, -1, num_kv_heads, size)
    length = rows.shape[1]
    for seq, (first, end) in enumerate(live):
        if first:
            rows[seq, :first] = 0
        if end < length:
            rows[seq, end:] = 0
    tensor = torch.from_numpy(rows.transpose(0, 2, 1, 3))
    if dtype is torch.float32:
        return tensor
    return (tensor if dtype is torch.float16 else tensor.view(dtype)).float()
