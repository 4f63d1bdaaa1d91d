"""vLLM's prefill on a cached prefix, whose caches are head-major, and its step of chunks and decodes.

New keys are separate from the cache and unquantised, and the cache's last axis may differ from the head. So the context
of the batch is copied, in the query's dtype, to a cache of this project's layout: code written for these names runs,
and costs a copy that `unified_attention` does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_core.attention.call import PagedCall
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec
from torch_core.cache_writes.call import WriteCall
from torch_core.ops import run
from torch_core.vllm.ops.arguments import (
    Scale,
    as_int32,
    check_shape,
    one_scale,
    refuse_option,
    sequence_of_token,
    stored_dtype,
)
from torch_core.vllm.ops.parameters import as_in_vllm


@as_in_vllm(q=3, k=3, v=3, o=3, k_cache=(4, 5), v_cache=4, b_loc=2, b_start_loc=1, b_seq_len=1)
def context_attention_fwd(
    q: Tensor, k: Tensor | None, v: Tensor | None, o: Tensor, kv_cache_dtype: str, k_cache: Tensor, v_cache: Tensor,
    b_loc: Tensor, b_start_loc: Tensor, b_seq_len: Tensor, max_seq_len: Any, max_input_len: int, k_scale: Scale,
    v_scale: Scale, alibi_slopes: Tensor | None = None, sliding_window: int | None = None,
    sm_scale: float | None = None, skip_decode: bool = False, fp8_out_scale: Scale = None,
    sinks: Tensor | None = None, is_block_table_ptr: bool = False, interleaved_v_pack_factor: int = 0,
    causal: bool = True,
) -> None:  # fmt: skip
    """Attends new tokens to their cached context and to each other; writes their rows of `o` and no other.

    Not used: max_seq_len.

    Args:
        q: [num_tokens, num_heads, head_size].
        k, v: keys and values of the new tokens [num_tokens, num_kv_heads, head_size]; they need not be in the cache.
            None for both if they are.
        o: like q, or fp8 with fp8_out_scale; written.
        kv_cache_dtype: a name of `CACHE_DTYPES` but "int8".
        k_cache: [num_blocks, num_kv_heads, head_size / x, block_size, x], or [num_blocks, num_kv_heads, block_size,
            head_size]; uint8 memory is taken as kv_cache_dtype.
        v_cache: [num_blocks, num_kv_heads, head_size, block_size] with the first layout of k_cache, or k_cache's shape
            with the second.
        b_loc: integers [num_seqs, blocks], the blocks of each context.
        b_start_loc: int32 [num_seqs + 1].
        b_seq_len: int32 [num_seqs], the new tokens included.
        max_input_len: bound on the query lengths.
        k_scale, v_scale: dequantisation scales of an fp8 cache.
        alibi_slopes, sinks: float [num_heads].
        sliding_window: tokens that a query sees, its own included; 0 or None for all.
        sm_scale: factor on the scores; head_size ** -0.5 when None.
        skip_decode: leave the rows of single new tokens alone.
        fp8_out_scale: dequantisation scale of an fp8 output.
        is_block_table_ptr: must be False.
        interleaved_v_pack_factor: must be 0.
        causal: hide keys after the query.

    Raises:
        InvalidInput: only one of k and v is None.
        Unsupported: tables of pointers, interleaved values, another kv_cache_dtype.
    """
    refuse_option("is_block_table_ptr", is_block_table_ptr, False, "pass block numbers")
    refuse_option("interleaved_v_pack_factor", interleaved_v_pack_factor, 0, "values are not interleaved here")
    if (k is None) != (v is None):
        raise InvalidInput("k" if k is None else "v", value=None, wanted="give both, or None for both")
    k_cache, v_cache, scales = _as_blocks(kv_cache_dtype, k_cache, v_cache, k_scale, v_scale)
    if q.shape[0] == 0 or b_seq_len.shape[0] == 0:
        return
    starts, seq_lens = as_int32("b_start_loc", b_start_loc), as_int32("b_seq_len", b_seq_len)
    cached = seq_lens if k is None else seq_lens - starts.diff()
    block_size = k_cache.shape[1]
    room = 0 if k is None else -(-int(max_input_len) // block_size)
    keys, values = (
        _context(cache, b_loc, cached, room, scale, q.dtype)
        for cache, scale in zip((k_cache, v_cache), scales, strict=True)
    )
    tables = torch.arange(keys.shape[0], dtype=torch.int32, device=q.device).view(seq_lens.shape[0], -1)
    if k is not None and v is not None:
        tokens = torch.arange(q.shape[0], device=q.device)
        sequence = sequence_of_token(starts, q.shape[0])
        slots = sequence * (tables.shape[1] * block_size) + cached[sequence] + tokens - starts[sequence]
        slots = torch.where(tokens < starts[-1], slots, -1).to(torch.int32)
        run(WriteCall(key=k, value=v, key_cache=keys, value_cache=values, slot_mapping=slots))
    _attend(
        q, keys, values, o, tables, starts, seq_lens, int(max_input_len), (2 if skip_decode else 1, None), (None, None),
        sm_scale, causal, sliding_window, alibi_slopes=alibi_slopes, sinks=sinks, out_scale=fp8_out_scale,
    )  # fmt: skip


@as_in_vllm(query=3, output=3, key_cache=(4, 5), value_cache=4, block_table=2, query_start_loc=1, seq_lens=1)
def chunked_prefill_paged_decode(
    query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, kv_cache_dtype: str, key_cache: Tensor,
    value_cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, max_seq_len: Any,
    max_query_len: int, k_scale: Scale, v_scale: Scale, alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None, sm_scale: float | None = None, output_scale: Scale = None,
    sinks: Tensor | None = None, is_block_table_ptr: bool = False, use_interleaved_v_cache: bool = False,
    causal: bool = True,
) -> None:  # fmt: skip
    """Attends chunks of prompts as `context_attention_fwd` does, and single new tokens to the cache, which has them.

    Args as there, by the names of vLLM; use_interleaved_v_cache must be False.
    """
    refuse_option("is_block_table_ptr", is_block_table_ptr, False, "pass block numbers")
    refuse_option("use_interleaved_v_cache", use_interleaved_v_cache, False, "values are not interleaved here")
    shared: dict[str, Any] = {"alibi_slopes": alibi_slopes, "sinks": sinks}
    if max_query_len > 1:
        context_attention_fwd(
            query, key, value, output, kv_cache_dtype, key_cache, value_cache, block_table, query_start_loc, seq_lens,
            max_seq_len, max_query_len, k_scale, v_scale, sliding_window=sliding_window, sm_scale=sm_scale,
            skip_decode=True, fp8_out_scale=output_scale, causal=causal, **shared,
        )  # fmt: skip
    keys, values, scales = _as_blocks(kv_cache_dtype, key_cache, value_cache, k_scale, v_scale)
    if query.shape[0] == 0 or seq_lens.shape[0] == 0:
        return
    starts, tables = as_int32("query_start_loc", query_start_loc), as_int32("block_table", block_table)
    # Of the other sequences the cache is not read: it need not have their new tokens.
    lens = torch.where(starts.diff() == 1, as_int32("seq_lens", seq_lens), 0)
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        keys, values = (
            _context(cache, block_table, lens, 0, scale, query.dtype)
            for cache, scale in zip((keys, values), scales, strict=True)
        )
        scales = None, None
        tables = torch.arange(keys.shape[0], dtype=torch.int32, device=query.device).view(lens.shape[0], -1)
    _attend(
        query, keys, values, output, tables, starts, lens, int(max_query_len), (1, 1), scales, sm_scale, True,
        sliding_window, out_scale=output_scale, **shared,
    )  # fmt: skip


def _as_blocks(
    kv_cache_dtype: str, k_cache: Tensor, v_cache: Tensor, k_scale: Scale, v_scale: Scale
) -> tuple[Tensor, Tensor, tuple[Scale, Scale]]:
    """Returns views [num_blocks, block_size, num_kv_heads, head_size (k: or two axes)], and the scales in use."""
    dtype = stored_dtype(kv_cache_dtype)
    scales: tuple[Scale, Scale] = (None, None)
    if dtype is not None:
        k_cache, v_cache = k_cache.view(dtype), v_cache.view(dtype)
        scales = one_scale("k_scale", k_scale), one_scale("v_scale", v_scale)
    if k_cache.ndim == 5:
        return k_cache.permute(0, 3, 1, 2, 4), v_cache.permute(0, 3, 1, 2), scales
    return k_cache.permute(0, 2, 1, 3), v_cache.permute(0, 2, 1, 3), scales


def _context(cache: Tensor, tables: Tensor, lens: Tensor, room: int, scale: Scale, dtype: torch.dtype) -> Tensor:
    """Copies the blocks of each sequence one after the other, as real values, with room for more after them."""
    num_seqs, width = tables.shape
    block_size = cache.shape[1]
    used = torch.arange(width, device=tables.device) * block_size < lens[:, None]
    rows = cache[torch.where(used, tables, 0).flatten().long()].flatten(3)
    rows = rows.to(dtype) if scale is None else (rows.float() * scale).to(dtype)
    rows = rows.unflatten(0, (num_seqs, width))
    return torch.cat([rows, rows.new_zeros(num_seqs, room, *rows.shape[2:])], 1).flatten(0, 1)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, tables: Tensor, starts: Tensor, seq_lens: Tensor,
    max_query_len: int, lengths: tuple[int, int | None], scales: tuple[Scale, Scale], sm_scale: float | None,
    causal: bool, sliding_window: int | None, *, out_scale: Scale, **options: Any,
) -> None:  # fmt: skip
    """Attends, and writes the rows of sequences with this number of new tokens; other rows of `out` are unchanged."""
    check_shape("out", out, (*q.shape[:2], values.shape[3]))
    found = run(
        PagedCall(
            query=q,
            key_cache=keys,
            value_cache=values,
            block_tables=tables,
            seq_lens=seq_lens,
            query_start_loc=starts,
            spec=AttentionSpec(
                scale=q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale),
                causal=causal,
                window_left=sliding_window - 1 if sliding_window and sliding_window > 0 else None,
            ),
            max_query_len=max_query_len,
            out_dtype=str(out.dtype).removeprefix("torch."),
            k_scale=scales[0],
            v_scale=scales[1],
            out_scale=one_scale("out_scale", out_scale),
            **options,
        )
    )["out"]
    shortest, longest = lengths
    new = starts.diff()
    chosen = (new >= shortest) & (new <= (max_query_len if longest is None else longest))
    rows = chosen[sequence_of_token(starts, q.shape[0])] & (torch.arange(q.shape[0], device=q.device) < starts[-1])
    # As bytes: fp8 tensors have no `where`.
    out.view(torch.uint8).copy_(torch.where(rows[:, None, None], found.view(torch.uint8), out.view(torch.uint8)))
