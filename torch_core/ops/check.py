"""Host-side checks of the public operations on CPU tensors, made before anything is computed or written.

On CUDA the launch plans check shapes and dtypes; the values of lengths, tables and slots are checked where metadata
is built. On the CPU those values are at hand, so they are checked here as well. Every message names the argument, its
value, the limit, the first bad index and the fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_core.errors import InvalidInput, Unsupported
from torch_core.ops.check_operands import (
    CACHE_DTYPES,
    FLOAT8,
    FLOATS,
    INDEX,
    check_cache,
    check_heads,
    check_options,
    check_out,
    check_query,
    check_scale,
    check_scale_caches,
    check_starts,
    check_tables,
    check_tensor,
    dtype_name,
)

__all__ = [
    "check_attention",
    "check_copy_blocks",
    "check_merge_states",
    "check_paged_attention",
    "check_write_kv_cache",
]

_OPTIONS = frozenset(("alibi_slopes", "sinks", "mm_prefix_range", "qq_bias", "seq_causal", "out_scale"))
_PAGED_OPTIONS = _OPTIONS | {"k_scale", "v_scale", "q_scale", "k_scale_cache", "v_scale_cache"}
_PAGED_QUERY_DTYPES = (*FLOATS, *FLOAT8)


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
    """Checks the arguments of `torch_core.ops.paged_attention`.

    Without the causal mask a sequence may have more query rows than keys: cross attention to a short encoder input.

    Raises:
        InvalidInput: something does not fit.
        Unsupported: a tensor requires a gradient.
    """
    check_query(query, _PAGED_QUERY_DTYPES)
    device = query.device
    key_shape, value_shape, _ = check_cache(kv_cache, device)
    check_heads(query, key_shape[2], key_shape[3], "kv_cache")
    check_tensor("block_tables", block_tables, 2, INDEX, device)
    check_tensor("seq_lens", seq_lens, 1, INDEX, device)
    check_tensor("query_start_loc", query_start_loc, 1, INDEX, device)
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
    check_out(out, query, value_shape[3], options.get("out_scale"))
    check_options(options, _PAGED_OPTIONS, query, num_seqs, max_query_len)
    check_scale_caches(options.get("k_scale_cache"), options.get("v_scale_cache"), key_shape, device)
    query_lens = check_starts("query_start_loc", query_start_loc, query.shape[0], "query", max_query_len)
    check_tables(block_tables, seq_lens, query_lens if causal else None, key_shape[0], key_shape[1])


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
    """Checks the arguments of `torch_core.ops.attention`; raises as `check_paged_attention`."""
    check_query(query, FLOATS)
    device = query.device
    check_tensor("key", key, 3, FLOATS, device)
    check_tensor("value", value, 3, FLOATS, device)
    if key.shape[:2] != value.shape[:2]:
        raise InvalidInput(
            f"key has shape {list(key.shape)} and value {list(value.shape)}; they may differ in head size only."
        )
    check_heads(query, key.shape[1], key.shape[2], "key")
    check_tensor("query_start_loc", query_start_loc, 1, INDEX, device)
    check_tensor("key_start_loc", key_start_loc, 1, INDEX, device)
    if query_start_loc.shape != key_start_loc.shape:
        raise InvalidInput(
            f"query_start_loc has {query_start_loc.shape[0]} entries and key_start_loc {key_start_loc.shape[0]}; "
            "both need num_seqs + 1."
        )
    check_out(out, query, value.shape[-1], options.get("out_scale"))
    check_options(options, _OPTIONS, query, query_start_loc.shape[0] - 1, max_query_len)
    check_starts("query_start_loc", query_start_loc, query.shape[0], "query", max_query_len)
    check_starts("key_start_loc", key_start_loc, key.shape[0], "key", max_key_len)


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
    """Checks the arguments of `torch_core.ops.write_kv_cache`; raises as `check_paged_attention`."""
    device = key.device
    check_tensor("key", key, 3, CACHE_DTYPES, device)
    check_tensor("value", value, 3, CACHE_DTYPES, device)
    key_shape, value_shape, dtype = check_cache(kv_cache, device)
    for name, new, shape in (("key", key, key_shape), ("value", value, value_shape)):
        if new.shape[1:] != shape[2:]:
            raise InvalidInput(
                f"{name} has shape {list(new.shape)}; for this cache it must be [num_tokens, {shape[2]}, {shape[3]}]."
            )
        if new.dtype.itemsize == 1 and new.dtype != dtype:
            raise InvalidInput(
                f"{name} is {dtype_name(new.dtype)} and the cache {dtype_name(dtype)}; give float32, bfloat16 or "
                "float16, or the dtype of the cache."
            )
    check_tensor("slot_mapping", slot_mapping, 1, INDEX, device)
    num_slots = slot_mapping.shape[0]
    if num_slots > min(key.shape[0], value.shape[0]):
        raise InvalidInput(
            f"slot_mapping has {num_slots} entries; key has {key.shape[0]} tokens and value {value.shape[0]}; give at "
            "most one slot per token."
        )
    check_scale("k_scale", k_scale)
    check_scale("v_scale", v_scale)
    check_scale_caches(k_scale_cache, v_scale_cache, key_shape, device)
    if k_scale_cache is not None:
        if k_scale is not None or v_scale is not None:
            raise InvalidInput(
                "k_scale and k_scale_cache (or v_scale and v_scale_cache) are both given; pass one kind."
            )
        if dtype.itemsize != 1:
            raise Unsupported(f"the cache is {dtype_name(dtype)}; scales per token and head need int8 or fp8.")
    limit = key_shape[0] * key_shape[1]
    slots = slot_mapping.numpy()
    if num_slots and slots.max() >= limit:
        first = int((slots >= limit).argmax())
        raise InvalidInput(
            f"slot_mapping[{first}] is {slots[first]}; a cache of {key_shape[0]} blocks of {key_shape[1]} has slots 0 "
            f"to {limit - 1}."
        )


def check_copy_blocks(kv_caches: Tensor | Sequence[Tensor], block_mapping: Tensor) -> None:
    """Checks the arguments of `torch_core.ops.copy_blocks`; raises as `check_paged_attention`."""
    check_tensor("block_mapping", block_mapping, 2, INDEX, block_mapping.device)
    if block_mapping.shape[1] != 2:
        raise InvalidInput(f"block_mapping has shape {list(block_mapping.shape)}; it must be [num_pairs, 2].")
    pairs = [(at, *pair) for at, pair in enumerate(block_mapping.tolist()) if min(pair) >= 0]
    for index, cache in enumerate([kv_caches] if isinstance(kv_caches, Tensor) else kv_caches):
        if cache.device != block_mapping.device:
            raise InvalidInput(
                f"kv_caches[{index}] is on {cache.device} and block_mapping on {block_mapping.device}; move it there."
            )
        for at, source, target in pairs:
            if max(source, target) >= cache.shape[0]:
                raise InvalidInput(
                    f"block_mapping[{at}] is ({source}, {target}); kv_caches[{index}] has blocks 0 to "
                    f"{cache.shape[0] - 1}."
                )
    sources = {source for _, source, _ in pairs}
    written: set[int] = set()
    for at, source, target in pairs:
        if target in written or (target in sources and target != source):
            raise InvalidInput(
                f"block_mapping[{at}] writes block {target}, which another pair reads or writes; "
                "give every destination once, and none that is a source."
            )
        written.add(target)


def check_merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    out_scale: Tensor | float | None = None,
) -> None:
    """Checks the arguments of `torch_core.ops.merge_states`; raises as `check_paged_attention`."""
    for name, tensor in (("out_a", out_a), ("out_b", out_b)):
        check_tensor(name, tensor, 3, FLOATS, out_a.device)
    if out_a.shape != out_b.shape:
        raise InvalidInput(f"out_b has shape {list(out_b.shape)} and out_a {list(out_a.shape)}; they must be equal.")
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(name, tensor, 2, (torch.float32,), out_a.device)
        if tensor.shape != out_a.shape[:2]:
            raise InvalidInput(
                f"{name} has shape {list(tensor.shape)}; out_a has {list(out_a.shape)}, so it must be "
                f"{list(out_a.shape[:2])}."
            )
    check_out(out, out_a, out_a.shape[2], out_scale)
    if out_scale is not None:
        check_scale("out_scale", out_scale)
