"""Host-side checks of the public operations on CPU tensors, made before anything is computed or written.

On CUDA the launch plans check shapes and dtypes; the values of lengths, tables and slots are checked where metadata
is built. On the CPU those values are at hand, so they are checked here as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_core.errors import InvalidInput, Unsupported

__all__ = [
    "check_attention",
    "check_copy_blocks",
    "check_merge_states",
    "check_paged_attention",
    "check_write_kv_cache",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CACHE_DTYPES = (*_FLOATS, *_FLOAT8, torch.int8)
_QUERY_SHAPE = "[num_tokens, num_heads, head_size]"
_OPTIONS = ("alibi_slopes", "sinks", "mm_prefix_range", "qq_bias", "seq_causal", "out_scale")
_PAGED_OPTIONS = (*_OPTIONS, "k_scale", "v_scale", "q_scale", "k_scale_cache", "v_scale_cache")


def check_paged_attention(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    max_query_len: int,
    out: Tensor | None = None,
    causal: bool = True,
    **options: Any,
) -> None:
    """Checks the arguments of `torch_core.launch.paged_attention`.

    Without the causal mask a sequence may have more query rows than keys: cross attention to a short encoder input.

    Raises:
        InvalidInput: with the argument, its value, the limit, the first bad index and the fix.
        Unsupported: tensors that require a gradient, dtypes that no implementation takes.
    """
    _check_query(query, (*_FLOATS, *_FLOAT8))
    key_cache, value_cache = _check_cache(kv_cache, query.device)
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    _check_heads(query, num_kv_heads, head_size, "kv_cache")
    _check_index("block_tables", block_tables, 2, query.device)
    _check_index("seq_lens", seq_lens, 1, query.device)
    _check_index("query_start_loc", query_start_loc, 1, query.device)
    num_seqs = seq_lens.shape[0]
    if query_start_loc.shape[0] != num_seqs + 1:
        raise InvalidInput(
            f"query_start_loc has {query_start_loc.shape[0]} entries and seq_lens {num_seqs}; "
            f"it must have num_seqs + 1 = {num_seqs + 1}."
        )
    if block_tables.shape[0] != num_seqs:
        raise InvalidInput(
            f"block_tables has {block_tables.shape[0]} rows and seq_lens {num_seqs} entries; give one row per sequence."
        )
    _check_out(out, query, value_cache.shape[-1], options.get("out_scale"))
    _check_options(options, _PAGED_OPTIONS, query, num_seqs, max_query_len)
    for name in ("k_scale_cache", "v_scale_cache"):
        _check_scale_cache(name, options.get(name), key_cache)
    if (options.get("k_scale_cache") is None) != (options.get("v_scale_cache") is None):
        raise InvalidInput("k_scale_cache and v_scale_cache go together; give both or none.")
    query_lens = _check_starts("query_start_loc", query_start_loc, query.shape[0], "query", max_query_len)
    _check_tables(block_tables, seq_lens, query_lens if causal else np.zeros_like(query_lens), num_blocks, block_size)


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    max_query_len: int,
    max_key_len: int,
    out: Tensor | None = None,
    **options: Any,
) -> None:
    """Checks the arguments of `torch_core.launch.attention`; raises as `check_paged_attention`."""
    _check_query(query, _FLOATS)
    for name, tensor in (("key", key), ("value", value)):
        _check_tensor(name, tensor, 3, _FLOATS, query.device)
    if key.shape[:2] != value.shape[:2]:
        raise InvalidInput(
            f"key has shape {list(key.shape)} and value {list(value.shape)}; they may differ in head size only."
        )
    _check_heads(query, key.shape[1], key.shape[2], "key")
    _check_index("query_start_loc", query_start_loc, 1, query.device)
    _check_index("key_start_loc", key_start_loc, 1, query.device)
    if query_start_loc.shape != key_start_loc.shape:
        raise InvalidInput(
            f"query_start_loc has {query_start_loc.shape[0]} entries and key_start_loc {key_start_loc.shape[0]}; "
            "both need num_seqs + 1."
        )
    _check_out(out, query, value.shape[-1], options.get("out_scale"))
    _check_options(options, _OPTIONS, query, query_start_loc.shape[0] - 1, max_query_len)
    _check_starts("query_start_loc", query_start_loc, query.shape[0], "query", max_query_len)
    _check_starts("key_start_loc", key_start_loc, key.shape[0], "key", max_key_len)


def check_write_kv_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    """Checks the arguments of `torch_core.launch.write_kv_cache`; raises as `check_paged_attention`."""
    _check_tensor("key", key, 3, _CACHE_DTYPES, key.device)
    _check_tensor("value", value, 3, _CACHE_DTYPES, key.device)
    key_cache, value_cache = _check_cache(kv_cache, key.device)
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if new.shape[1:] != cache.shape[2:]:
            raise InvalidInput(
                f"{name} has shape {list(new.shape)}; for this cache it must be [num_tokens, {cache.shape[2]}, "
                f"{cache.shape[3]}]."
            )
        if new.dtype.itemsize == 1 and new.dtype != cache.dtype:
            raise InvalidInput(
                f"{name} is {_short(new.dtype)} and the cache {_short(cache.dtype)}; give float32, bfloat16 or "
                "float16, or the dtype of the cache."
            )
    _check_index("slot_mapping", slot_mapping, 1, key.device)
    if slot_mapping.shape[0] > min(key.shape[0], value.shape[0]):
        raise InvalidInput(
            f"slot_mapping has {slot_mapping.shape[0]} entries; key has {key.shape[0]} tokens and value "
            f"{value.shape[0]}; give at most one slot per token."
        )
    _check_scale("k_scale", k_scale)
    _check_scale("v_scale", v_scale)
    _check_scale_cache("k_scale_cache", k_scale_cache, key_cache)
    _check_scale_cache("v_scale_cache", v_scale_cache, key_cache)
    if (k_scale_cache is None) != (v_scale_cache is None):
        raise InvalidInput("k_scale_cache and v_scale_cache go together; give both or none.")
    if k_scale_cache is not None:
        if k_scale is not None or v_scale is not None:
            raise InvalidInput(
                "k_scale and k_scale_cache (or v_scale and v_scale_cache) are both given; pass one kind."
            )
        if key_cache.dtype.itemsize != 1:
            raise Unsupported(f"the cache is {_short(key_cache.dtype)}; scales per token and head need int8 or fp8.")
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    slots = slot_mapping.numpy()
    if slots.size and slots.max() >= num_slots:
        first = int((slots >= num_slots).argmax())
        raise InvalidInput(
            f"slot_mapping[{first}] is {slots[first]}; a cache of {key_cache.shape[0]} blocks of {key_cache.shape[1]} "
            f"has slots 0 to {num_slots - 1}."
        )


def check_copy_blocks(kv_caches: Tensor | Sequence[Tensor], block_mapping: Tensor) -> None:
    """Checks the arguments of `torch_core.launch.copy_blocks`; raises as `check_paged_attention`."""
    _check_index("block_mapping", block_mapping, 2, block_mapping.device)
    if block_mapping.shape[1] != 2:
        raise InvalidInput(f"block_mapping has shape {list(block_mapping.shape)}; it must be [num_pairs, 2].")
    caches = [kv_caches] if isinstance(kv_caches, Tensor) else kv_caches
    pairs = block_mapping.tolist()
    for index, cache in enumerate(caches):
        if cache.device != block_mapping.device:
            raise InvalidInput(f"kv_caches[{index}] is on {cache.device} and block_mapping on {block_mapping.device}.")
        for at, pair in enumerate(pairs):
            if min(pair) >= 0 and max(pair) >= cache.shape[0]:
                raise InvalidInput(
                    f"block_mapping[{at}] is {tuple(pair)}; kv_caches[{index}] has blocks 0 to {cache.shape[0] - 1}."
                )
    real = [(at, source, target) for at, (source, target) in enumerate(pairs) if min(source, target) >= 0]
    sources = {source for _, source, _ in real}
    written: set[int] = set()
    for at, source, target in real:
        if target in written or (target in sources and target != source):
            raise InvalidInput(
                f"block_mapping[{at}] writes block {target}, which another pair reads or writes; "
                "give every destination once, and none that is a source."
            )
        written.add(target)


def check_merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Checks the arguments of `torch_core.launch.merge_states`; raises as `check_paged_attention`."""
    for name, tensor in (("out_a", out_a), ("out_b", out_b)):
        _check_tensor(name, tensor, 3, _FLOATS, out_a.device)
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b)):
        _check_tensor(name, tensor, 2, (torch.float32,), out_a.device)
        if tensor.shape != out_a.shape[:2]:
            raise InvalidInput(
                f"{name} has shape {list(tensor.shape)}; out_a has {list(out_a.shape)}, so it must be "
                f"{list(out_a.shape[:2])}."
            )
    if out_a.shape != out_b.shape:
        raise InvalidInput(f"out_b has shape {list(out_b.shape)} and out_a {list(out_a.shape)}; they must be equal.")


def _check_tensor(name: str, tensor: Tensor, rank: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidInput(f"{name} is a {type(tensor).__name__}; it must be a torch tensor.")
    if tensor.dim() != rank:
        raise InvalidInput(f"{name} has shape {list(tensor.shape)}; it must have {rank} axes.")
    if tensor.dtype not in dtypes:
        raise InvalidInput(f"{name} is {_short(tensor.dtype)}; it must be one of {', '.join(map(_short, dtypes))}.")
    if tensor.device != device:
        raise InvalidInput(f"{name} is on {tensor.device} and the other tensors on {device}; move it there.")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            f"{name} requires a gradient, which this operation cannot give; call it under torch.no_grad() or pass "
            f"{name}.detach()."
        )


def _check_query(query: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    _check_tensor("query", query, 3, dtypes, query.device)
    if query.shape[1] == 0 or query.shape[2] == 0:
        raise InvalidInput(f"query has shape {list(query.shape)}; {_QUERY_SHAPE} needs heads of at least one element.")


def _check_heads(query: Tensor, num_kv_heads: int, head_size: int, name: str) -> None:
    if query.shape[2] != head_size:
        raise InvalidInput(f"query has head size {query.shape[2]} and {name} {head_size}; they must be equal.")
    if num_kv_heads == 0 or query.shape[1] % num_kv_heads:
        raise InvalidInput(
            f"query has {query.shape[1]} heads and {name} {num_kv_heads}; the first must be a multiple of the second."
        )


def _check_cache(kv_cache: Tensor | tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    if isinstance(kv_cache, Tensor):
        _check_tensor("kv_cache", kv_cache, 5, _CACHE_DTYPES, device)
        if kv_cache.shape[1] != 2:
            raise InvalidInput(
                f"kv_cache has shape {list(kv_cache.shape)}; it must be [num_blocks, 2, block_size, num_kv_heads, "
                "head_size], keys and values on the second axis."
            )
        key_cache, value_cache = kv_cache.unbind(1)
    else:
        key_cache, value_cache = kv_cache
        _check_tensor("kv_cache[0]", key_cache, 4, _CACHE_DTYPES, device)
        _check_tensor("kv_cache[1]", value_cache, 4, _CACHE_DTYPES, device)
        if key_cache.shape[:3] != value_cache.shape[:3]:
            raise InvalidInput(
                f"kv_cache is a pair of shapes {list(key_cache.shape)} and {list(value_cache.shape)}; they may differ "
                "in head size only."
            )
    if 0 in key_cache.shape or 0 in value_cache.shape:
        raise InvalidInput(f"kv_cache has an axis of size 0: {list(key_cache.shape)} for keys; every axis needs one.")
    return key_cache, value_cache


def _check_index(name: str, tensor: Tensor, rank: int, device: torch.device) -> None:
    _check_tensor(name, tensor, rank, (torch.int32,), device)


def _check_out(out: Tensor | None, query: Tensor, value_head_size: int, out_scale: object) -> None:
    if out is None:
        if out_scale is not None:
            raise InvalidInput("out_scale is given without out; pass an fp8 tensor as out.")
        return
    _check_tensor("out", out, 3, (*_FLOATS, *_FLOAT8), query.device)
    if out.shape != (*query.shape[:2], value_head_size):
        raise InvalidInput(f"out has shape {list(out.shape)}; it must be {[*query.shape[:2], value_head_size]}.")
    if out_scale is not None and out.dtype not in _FLOAT8:
        raise InvalidInput(f"out is {_short(out.dtype)} and out_scale is given; out_scale is for an fp8 out.")


def _check_options(
    options: dict[str, Any],
    known: tuple[str, ...],
    query: Tensor,
    num_seqs: int,
    max_query_len: int,
) -> None:
    if isinstance(max_query_len, bool) or not isinstance(max_query_len, int) or max_query_len < 0:
        raise InvalidInput(f"max_query_len is {max_query_len!r}; it must be an int, 0 or more.")
    for name, option in options.items():
        if name not in known:
            raise InvalidInput(f"{name} is not an argument of this operation; it takes {', '.join(known)}.")
        if option is None:
            continue
        if name in ("k_scale", "v_scale", "q_scale", "out_scale"):
            _check_scale(name, option)
        elif name in ("alibi_slopes", "sinks"):
            _check_tensor(name, option, 1, _FLOATS, query.device)
            _check_shape(name, option, (query.shape[1],))
        elif name == "mm_prefix_range":
            _check_index(name, option, 3, query.device)
            _check_shape(name, option, (num_seqs, option.shape[1], 2))
        elif name == "seq_causal":
            _check_tensor(name, option, 1, (torch.bool,), query.device)
            _check_shape(name, option, (num_seqs,))
        elif name == "qq_bias":
            _check_tensor(name, option, 2, _FLOATS, query.device)
            if min(option.shape) < max_query_len:
                raise InvalidInput(
                    f"qq_bias has shape {list(option.shape)}; both sides must be at least max_query_len = "
                    f"{max_query_len}."
                )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise InvalidInput(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}.")


def _check_scale(name: str, scale: Tensor | float | None) -> None:
    if isinstance(scale, Tensor) and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise InvalidInput(
            f"{name} is {_short(scale.dtype)} of shape {list(scale.shape)}; it must be a number or one float32 element."
        )


def _check_scale_cache(name: str, scales: Tensor | None, key_cache: Tensor) -> None:
    if scales is not None:
        _check_tensor(name, scales, 3, (torch.float32,), key_cache.device)
        _check_shape(name, scales, tuple(key_cache.shape[:3]))


def _check_starts(name: str, start_loc: Tensor, num_rows: int, divided: str, max_len: int) -> np.ndarray:
    starts = start_loc.numpy()
    if starts.size == 0 or starts[0] != 0:
        raise InvalidInput(f"{name} starts with {starts[:1].tolist()}; it must hold num_seqs + 1 offsets from 0 on.")
    lens = starts[1:] - starts[:-1]
    if lens.size and lens.min() < 0:
        first = int((lens < 0).argmax())
        raise InvalidInput(
            f"{name}[{first + 1}] is {starts[first + 1]}, less than {starts[first]} before it; offsets must not fall."
        )
    if starts[-1] > num_rows:
        raise InvalidInput(f"{name}[-1] is {starts[-1]}; {divided} has only {num_rows} rows.")
    if lens.size and lens.max() > max_len:
        first = int((lens > max_len).argmax())
        raise InvalidInput(f"sequence {first} has {lens[first]} rows in {name}; the stated maximum is {max_len}.")
    return lens


def _check_tables(
    block_tables: Tensor, seq_lens: Tensor, query_lens: np.ndarray, num_blocks: int, block_size: int
) -> None:
    lens, tables = seq_lens.numpy(), block_tables.numpy()
    if lens.size == 0:
        return
    capacity = tables.shape[1] * block_size
    if lens.min() < 0 or lens.max() > capacity:
        first = int(((lens < 0) | (lens > capacity)).argmax())
        raise InvalidInput(
            f"seq_lens[{first}] is {lens[first]}; a row of block_tables holds 0 to {tables.shape[1]} x {block_size} = "
            f"{capacity} tokens."
        )
    too_long = (query_lens > lens) & (lens > 0)
    if too_long.any():
        first = int(too_long.argmax())
        raise InvalidInput(
            f"sequence {first} has {query_lens[first]} query rows and seq_lens[{first}] is {lens[first]}; the new "
            "tokens are part of it, so it cannot be less."
        )
    used = np.arange(tables.shape[1]) < -(-lens // block_size)[:, None]
    bad = used & ((tables < 0) | (tables >= num_blocks))
    if bad.any():
        row, column = np.unravel_index(int(bad.argmax()), bad.shape)
        raise InvalidInput(
            f"block_tables[{row}, {column}] is {tables[row, column]}; the cache has blocks 0 to {num_blocks - 1}."
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
