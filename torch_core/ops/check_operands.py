"""The checks that several operations share: one operand, the options, offsets, block tables."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_core.errors import InvalidInput, Unsupported

__all__ = [
    "CACHE_DTYPES",
    "FLOAT8",
    "FLOATS",
    "INDEX",
    "check_cache",
    "check_heads",
    "check_options",
    "check_out",
    "check_query",
    "check_scale",
    "check_scale_caches",
    "check_starts",
    "check_tables",
    "check_tensor",
    "dtype_name",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CACHE_DTYPES = (*FLOATS, *FLOAT8, torch.int8)
INDEX = (torch.int32,)
_OUT_DTYPES = (*FLOATS, *FLOAT8)


def check_tensor(name: str, tensor: Tensor, rank: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Checks rank, dtype, device and that no gradient is expected.

    Raises:
        InvalidInput: not a tensor, or its rank, dtype or device is wrong.
        Unsupported: it requires a gradient while gradients are recorded.
    """
    if not isinstance(tensor, Tensor):
        raise InvalidInput(f"{name} is a {type(tensor).__name__}; it must be a torch tensor.")
    if tensor.ndim != rank:
        raise InvalidInput(f"{name} has shape {list(tensor.shape)}; it must have {rank} axes.")
    if tensor.dtype not in dtypes:
        raise InvalidInput(f"{name} is {dtype_name(tensor.dtype)}; it must be {' or '.join(map(dtype_name, dtypes))}.")
    if tensor.device != device:
        raise InvalidInput(f"{name} is on {tensor.device} and the other tensors on {device}; move it there.")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            f"{name} requires a gradient, which this operation cannot give; call it under torch.no_grad() or pass "
            f"{name}.detach()."
        )


def check_query(query: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Checks the query; raises as `check_tensor`."""
    check_tensor("query", query, 3, dtypes, query.device)
    if 0 in query.shape[1:]:
        raise InvalidInput(
            f"query has shape {list(query.shape)}; [num_tokens, num_heads, head_size] needs at least one head and one "
            "element."
        )


def check_heads(query: Tensor, num_kv_heads: int, head_size: int, name: str) -> None:
    """Checks that the heads of queries and keys fit.

    Raises:
        InvalidInput: head sizes differ, or the query heads are no multiple of the key heads.
    """
    _, num_heads, query_head_size = query.shape
    if query_head_size != head_size:
        raise InvalidInput(f"query has head size {query_head_size} and {name} {head_size}; they must be equal.")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise InvalidInput(
            f"query has {num_heads} heads and {name} {num_kv_heads}; the first must be a multiple of the second."
        )


def check_cache(
    kv_cache: Tensor | tuple[Tensor, Tensor], device: torch.device
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Returns the shapes of key and value cache `[num_blocks, block_size, num_kv_heads, size]`, and the key's dtype.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit.
    """
    if isinstance(kv_cache, Tensor):
        check_tensor("kv_cache", kv_cache, 5, CACHE_DTYPES, device)
        num_blocks, two, *rest = kv_cache.shape
        if two != 2:
            raise InvalidInput(
                f"kv_cache has shape {list(kv_cache.shape)}; it must be [num_blocks, 2, block_size, num_kv_heads, "
                "head_size], keys and values on the second axis."
            )
        key_shape = value_shape = (num_blocks, *rest)
        dtype = kv_cache.dtype
    else:
        key_cache, value_cache = kv_cache
        check_tensor("kv_cache[0]", key_cache, 4, CACHE_DTYPES, device)
        check_tensor("kv_cache[1]", value_cache, 4, CACHE_DTYPES, device)
        key_shape, value_shape, dtype = tuple(key_cache.shape), tuple(value_cache.shape), key_cache.dtype
        if key_shape[:3] != value_shape[:3] or dtype != value_cache.dtype:
            raise InvalidInput(
                f"kv_cache is a pair of {dtype_name(dtype)} {list(key_shape)} and {dtype_name(value_cache.dtype)} "
                f"{list(value_shape)}; they may differ in head size only."
            )
    if 0 in key_shape or 0 in value_shape:
        raise InvalidInput(f"kv_cache has keys of shape {list(key_shape)}; no axis may be 0.")
    return key_shape, value_shape, dtype


def check_out(out: Tensor | None, query: Tensor, value_head_size: int, out_scale: object) -> None:
    """Checks the output tensor and that a scale comes with an fp8 one only; raises InvalidInput."""
    if out is None:
        if out_scale is not None:
            raise InvalidInput("out_scale is given without out; pass an fp8 tensor as out.")
        return
    check_tensor("out", out, 3, _OUT_DTYPES, query.device)
    expected = (*query.shape[:2], value_head_size)
    if out.shape != expected:
        raise InvalidInput(f"out has shape {list(out.shape)}; it must be {list(expected)}.")
    if out_scale is not None and out.dtype not in FLOAT8:
        raise InvalidInput(f"out is {dtype_name(out.dtype)} and out_scale is given; out_scale is for an fp8 out.")


def check_options(
    options: dict[str, Any], known: frozenset[str], query: Tensor, num_seqs: int, max_query_len: int
) -> None:
    """Checks the optional arguments of an attention call.

    Raises:
        InvalidInput: an argument that the operation does not have, or one with a wrong shape or dtype.
    """
    if isinstance(max_query_len, bool) or not isinstance(max_query_len, int) or max_query_len < 0:
        raise InvalidInput(f"max_query_len is {max_query_len!r}; it must be an int, 0 or more.")
    if not options.keys() <= known:
        name = next(name for name in options if name not in known)
        raise InvalidInput(f"{name} is not an argument of this operation; it takes {', '.join(sorted(known))}.")
    for name, option in options.items():
        if option is None or name.endswith("scale_cache"):
            continue
        if name.endswith("scale"):
            check_scale(name, option)
        elif name in ("alibi_slopes", "sinks"):
            check_tensor(name, option, 1, FLOATS, query.device)
            _check_shape(name, option, (query.shape[1],))
        elif name == "mm_prefix_range":
            check_tensor(name, option, 3, INDEX, query.device)
            _check_shape(name, option, (num_seqs, option.shape[1], 2))
        elif name == "seq_causal":
            check_tensor(name, option, 1, (torch.bool,), query.device)
            _check_shape(name, option, (num_seqs,))
        elif name == "qq_bias":
            check_tensor(name, option, 2, FLOATS, query.device)
            if min(option.shape) < max_query_len:
                raise InvalidInput(
                    f"qq_bias has shape {list(option.shape)}; both sides must be at least max_query_len = "
                    f"{max_query_len}."
                )


def check_scale(name: str, scale: Tensor | float | None) -> None:
    """Checks that a scale is a number or one float32 element; raises InvalidInput."""
    if isinstance(scale, Tensor) and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise InvalidInput(
            f"{name} is {dtype_name(scale.dtype)} of shape {list(scale.shape)}; it must be a number or one float32 "
            "element."
        )


def check_scale_caches(
    k_scale_cache: Tensor | None, v_scale_cache: Tensor | None, key_shape: tuple[int, ...], device: torch.device
) -> None:
    """Checks the caches of scales per token and head; raises InvalidInput."""
    if k_scale_cache is None and v_scale_cache is None:
        return
    if k_scale_cache is None or v_scale_cache is None:
        raise InvalidInput("k_scale_cache and v_scale_cache go together; give both or none.")
    for name, scales in (("k_scale_cache", k_scale_cache), ("v_scale_cache", v_scale_cache)):
        check_tensor(name, scales, 3, (torch.float32,), device)
        _check_shape(name, scales, key_shape[:3])


def check_starts(name: str, start_loc: Tensor, num_rows: int, divided: str, max_len: int) -> list[int]:
    """Returns the lengths between cumulative offsets.

    Raises:
        InvalidInput: the offsets do not start at 0, fall, exceed `num_rows` of the tensor `divided`, or give a length
            above `max_len`.
    """
    starts = start_loc.tolist()
    if not starts or starts[0] != 0:
        raise InvalidInput(f"{name} starts with {starts[:1]}; it must hold num_seqs + 1 offsets from 0 on.")
    lens = [end - start for start, end in pairwise(starts)]
    if lens and min(lens) < 0:
        first = next(seq for seq, length in enumerate(lens) if length < 0)
        raise InvalidInput(
            f"{name}[{first + 1}] is {starts[first + 1]}, less than {starts[first]} before it; offsets never fall."
        )
    if starts[-1] > num_rows:
        raise InvalidInput(f"{name}[-1] is {starts[-1]}; {divided} has only {num_rows} rows.")
    if lens and max(lens) > max_len:
        first = next(seq for seq, length in enumerate(lens) if length > max_len)
        raise InvalidInput(f"sequence {first} has {lens[first]} rows in {name}; the stated maximum is {max_len}.")
    return lens


def check_tables(
    block_tables: Tensor, seq_lens: Tensor, query_lens: list[int] | None, num_blocks: int, block_size: int
) -> None:
    """Checks lengths against tables and (unless None) queries, and the block ids in use.

    Raises:
        InvalidInput: a length that its table row cannot hold or that is less than its query rows (0 apart, which
            marks a padding row), a block that the cache does not have.
    """
    lens, max_blocks = seq_lens.tolist(), block_tables.shape[1]
    capacity = max_blocks * block_size
    for seq, seq_len in enumerate(lens):
        if not 0 <= seq_len <= capacity:
            raise InvalidInput(
                f"seq_lens[{seq}] is {seq_len}; a row of block_tables holds 0 to {max_blocks} x {block_size} = "
                f"{capacity} tokens."
            )
        if query_lens is not None and query_lens[seq] > seq_len > 0:
            raise InvalidInput(
                f"sequence {seq} has {query_lens[seq]} query rows and seq_lens[{seq}] is {seq_len}; the new tokens are "
                "part of it, so it cannot be less."
            )
    if not lens or max(lens) == 0:
        return
    # As uint32 a negative id is large, so that one comparison finds both kinds of bad ones.
    tables = block_tables.numpy().view(np.uint32)[:, : -(-max(lens) // block_size)]
    bad = tables >= num_blocks
    if not bad.any():
        return
    for seq, seq_len in enumerate(lens):
        for column in np.flatnonzero(bad[seq, : -(-seq_len // block_size)]).tolist():
            raise InvalidInput(
                f"block_tables[{seq}, {column}] is {int(block_tables[seq, column])}; the cache has blocks 0 to "
                f"{num_blocks - 1}."
            )


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without the module.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise InvalidInput(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}.")
