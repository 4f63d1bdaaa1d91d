"""Reading blocks of a paged cache into contiguous float32 keys and values, with everything unused set to zero.

Numpy does the copying: on a few hundred rows its calls cost a third of torch's, and a decode step makes many of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["CachePair", "gather_blocks", "raw_array", "scale_value"]

#: One cache array with keys and values, or a key cache and a value cache.
CachePair = Tensor | tuple[Tensor, Tensor]

_RAW_DTYPES = {1: torch.uint8, 2: torch.int16}
#: Above this many bytes torch's own gather, which uses all threads, is faster than numpy's.
_MAX_NUMPY_BYTES = 4 << 20


def raw_array(tensor: Tensor) -> np.ndarray:
    """Returns a tensor's memory as a numpy array of the same shape; dtypes that numpy lacks come as their bits."""
    if tensor.dtype is torch.float32 or tensor.dtype is torch.float16:
        return tensor.numpy()
    return tensor.view(_RAW_DTYPES[tensor.dtype.itemsize]).numpy()


def gather_blocks(
    kv_cache: CachePair,
    blocks: np.ndarray,
    live: list[tuple[int, int]],
    scale_caches: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns float32 keys and values of several sequences, padded to one length.

    Args:
        kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_size]`, or a pair
            `[num_blocks, block_size, num_kv_heads, size]`.
        blocks: int64 `[num_seqs, blocks_per_seq]`, valid block ids; which one stands in unused places is irrelevant.
        live: for each sequence the first and last-plus-one row that is used; all others become zero, because
            0 x NaN is NaN.
        scale_caches: scales per token and head for keys and values, `[num_blocks, block_size, num_kv_heads]`.

    Returns:
        Two tensors `[num_seqs, num_kv_heads, blocks_per_seq * block_size, size]`, strided views of rows that are
        contiguous by token.
    """
    if isinstance(kv_cache, Tensor) and kv_cache.is_contiguous():
        shape = kv_cache.shape
        index = np.empty((2, *blocks.shape), np.int64)
        np.multiply(blocks, 2, out=index[0])
        np.add(index[0], 1, out=index[1])
        flat = raw_array(kv_cache).reshape(shape[0] * 2, *shape[2:])
        both = _take(flat, index.ravel()).reshape(2, blocks.shape[0], -1, *shape[3:])
        _zero_unused(both, live)
        key, value = _as_float32(both[0], kv_cache.dtype), _as_float32(both[1], kv_cache.dtype)
    else:
        caches = kv_cache.unbind(1) if isinstance(kv_cache, Tensor) else kv_cache
        key, value = (_gather_rows(cache, blocks, live) for cache in caches)
    if scale_caches is not None:
        key = key * _gather_rows(scale_caches[0][..., None], blocks, live)
        value = value * _gather_rows(scale_caches[1][..., None], blocks, live)
    return key, value


def scale_value(scale: Tensor | float | None) -> float:
    """Returns a per-tensor scale as a Python float; None is 1."""
    if scale is None:
        return 1.0
    return scale.item() if isinstance(scale, Tensor) else float(scale)


def _gather_rows(cache: Tensor, blocks: np.ndarray, live: list[tuple[int, int]]) -> Tensor:
    rows = _take(raw_array(cache), blocks.ravel()).reshape(1, blocks.shape[0], -1, *cache.shape[2:])
    _zero_unused(rows, live)
    return _as_float32(rows[0], cache.dtype)


def _take(rows: np.ndarray, index: np.ndarray) -> np.ndarray:
    if index.size * rows[0].nbytes > _MAX_NUMPY_BYTES:
        return torch.from_numpy(rows).index_select(0, torch.from_numpy(index)).numpy()
    # take would first copy the whole array when it is a strided view.
    return rows.take(index, axis=0) if rows.flags.c_contiguous else rows[index]


def _zero_unused(rows: np.ndarray, live: list[tuple[int, int]]) -> None:
    length = rows.shape[2]
    for seq, (first, end) in enumerate(live):
        if first:
            rows[:, seq, :first] = 0
        if end < length:
            rows[:, seq, end:] = 0


def _as_float32(rows: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Returns `[num_seqs, tokens, heads, size]` raw rows as `[num_seqs, heads, tokens, size]` float32."""
    tensor = torch.from_numpy(rows.transpose(0, 2, 1, 3))
    if dtype is torch.float32:
        return tensor
    return (tensor if dtype is torch.float16 else tensor.view(dtype)).float()
