"""vLLM's attention operations by their names and parameters, over this project's: code written for vLLM runs by import.

Parameter names and order are those of vLLM 0.33 (vllm/v1/attention/ops). What vLLM passes for its own kernels only
(segment buffers, thresholds, descriptor switches) is accepted and not used. What has no counterpart here raises
`Unsupported` with the reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_core.calls import DenseCall, MergeCall, PagedCall, WriteCall
from torch_core.errors import InvalidInput, Unsupported
from torch_core.ops import run
from torch_core.specs import AttentionSpec
from torch_core.vllm.types import CACHE_DTYPES

__all__ = [
    "context_attention_fwd",
    "merge_attn_states",
    "triton_reshape_and_cache_flash",
    "triton_reshape_and_cache_flash_diffkv",
    "triton_reshape_and_cache_flash_per_token_head_quant",
    "unified_attention",
]


def unified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool | Tensor,
    window_size: tuple[int, int],
    block_table: Tensor,
    softcap: float,
    q_descale: Tensor | float | None,
    k_descale: Tensor | float | None,
    v_descale: Tensor | float | None,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: Tensor | None = None,
    softmax_segm_max: Tensor | None = None,
    softmax_segm_expsum: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    output_scale: Tensor | float | None = None,
    qq_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    mm_prefix_range: Tensor | None = None,
    rswa_prefix_lens: Tensor | None = None,
    rswa_window: int | None = None,
    use_alibi_sqrt: bool = False,
    kv_quant_mode: Any = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    chunk_lookback: int = -1,
    use_td: bool = False,
    mm_prefix_clamp_sliding_window: bool = False,
) -> None:
    """Attends any mix of prefill and decode rows over a paged cache and writes `out`.

    Not used: max_seqlen_k, seq_threshold_3D, num_par_softmax_segments, softmax_segm_output, softmax_segm_max,
    softmax_segm_expsum, use_td.

    Args:
        q: [num_tokens, num_heads, head_size].
        k: the key cache [num_blocks, block_size, num_kv_heads, head_size], any strides with the last one 1.
        v: the value cache.
        out: like q, or fp8 with output_scale; written.
        cu_seqlens_q: int32 [num_seqs + 1].
        max_seqlen_q: upper bound on the query lengths.
        seqused_k: int32 [num_seqs], tokens in the cache.
        max_seqlen_k: upper bound on those.
        softmax_scale: factor on the scores.
        causal: one flag, or bool [num_seqs].
        window_size: (W - 1, 0) or (W - 1, W - 1) for a window of W, (-1, -1) for none. Without a causal mask the
            window reaches as far to the right as to the left.
        block_table: int32 [num_seqs, max_blocks].
        softcap: soft cap on the scores; 0 for none.
        q_descale: what one unit of an fp8 query is worth: a number, one element, or a view that repeats one.
        k_descale: the same for keys of an 8-bit cache.
        v_descale: the same for values.
        alibi_slopes: float [num_heads].
        output_scale: what one unit of an fp8 output is worth.
        qq_bias: float [rows, rows].
        sinks: float [num_heads].
        mm_prefix_range: int32 [num_seqs, ranges, 2], both ends inclusive.
        use_alibi_sqrt: the square root form of ALiBi.
        kv_quant_mode: vLLM's enum; only 4-bit modes are told apart, the scales say the rest.
        k_scale_cache: float32 [num_blocks, block_size, num_kv_heads], scales per token and head.
        v_scale_cache: the same for values.
        chunk_lookback: -1, or 0 for chunked local attention with chunks of W.

    Raises:
        InvalidInput: shapes or dtypes do not fit.
        Unsupported: rswa, 4-bit caches, a scale per sequence or head, chunk_lookback above 0, clamped prefix ranges.
    """
    if rswa_window is not None and rswa_prefix_lens is not None:
        raise Unsupported(
            "rswa_window and rswa_prefix_lens: a prefix that escapes the window is not served; pass None."
        )
    _refuse_4_bits(kv_quant_mode)
    left, right, chunk = _window(window_size, causal, chunk_lookback)
    if mm_prefix_range is not None and mm_prefix_clamp_sliding_window and (left is not None or chunk is not None):
        raise Unsupported("mm_prefix_clamp_sliding_window: prefix ranges always reach past the window; pass False.")
    # A cache of 16 bits or more holds the real values: its write has no scale either.
    scaled = k.dtype.itemsize == 1 and k_scale_cache is None
    run(
        PagedCall(
            query=q,
            key_cache=k,
            value_cache=v,
            block_tables=block_table,
            seq_lens=seqused_k,
            query_start_loc=cu_seqlens_q,
            spec=AttentionSpec(
                scale=float(softmax_scale),
                causal=causal if isinstance(causal, bool) else True,
                window_left=left,
                window_right=right,
                logits_soft_cap=float(softcap) if softcap else None,
                attention_chunk=chunk,
                use_alibi_sqrt=use_alibi_sqrt,
            ),
            max_query_len=int(max_seqlen_q),
            out=out,
            q_scale=_one_scale("q_descale", q_descale),
            k_scale=_one_scale("k_descale", k_descale) if scaled else None,
            v_scale=_one_scale("v_descale", v_descale) if scaled else None,
            out_scale=_one_scale("output_scale", output_scale),
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            qq_bias=qq_bias,
            mm_prefix_range=mm_prefix_range,
            seq_causal=causal if isinstance(causal, Tensor) else None,
            k_scale_cache=k_scale_cache,
            v_scale_cache=v_scale_cache,
        )
    )


def context_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    b_start_loc: Tensor,
    b_seq_len: Tensor,
    max_input_len: int,
    is_causal: bool = True,
    softmax_scale: float | None = None,
    sliding_window_q: int | None = None,
    sliding_window_k: int | None = None,
    sinks: Tensor | None = None,
    sinks_bias_key0: bool = False,
) -> None:
    """Attends packed sequences to their own keys and values and writes `o` (vLLM's prefill operation).

    Args:
        q: [num_tokens, num_heads, head_size].
        k: [num_tokens, num_kv_heads, head_size].
        v: the same.
        o: like q; written.
        b_start_loc: int32 [num_seqs] or longer, first token of each sequence; they rise, and rows between two sequences
            are padding.
        b_seq_len: int32 [num_seqs].
        max_input_len: upper bound on b_seq_len.
        is_causal: hide keys after the query.
        softmax_scale: factor on the scores; head_size ** -0.5 when None.
        sliding_window_q: tokens before the query that stay visible; 0 or None for all.
        sliding_window_k: tokens after it; 0 or None for all.
        sinks: float [num_heads].
        sinks_bias_key0: must be False.

    Raises:
        InvalidInput: shapes or dtypes do not fit; on the CPU also sequences that overlap.
        Unsupported: sinks_bias_key0.
    """
    if sinks is not None and sinks_bias_key0:
        raise Unsupported("sinks_bias_key0: a sink is a logit without a value here, not a bias on key 0; pass False.")
    starts = b_start_loc[: b_seq_len.shape[0]].to(torch.int32)
    ends = starts + b_seq_len.to(torch.int32)
    zero = ends.new_zeros(1)
    before = torch.cat([zero, ends])[:-1]
    # What lies between two sequences is two more of them: queries without keys, whose rows become 0, and keys without
    # queries.
    query_starts = torch.cat([zero, torch.stack([starts, starts, ends], 1).flatten()])
    key_starts = torch.cat([zero, torch.stack([before, starts, ends], 1).flatten()])
    # Where values are checked, the gaps are held to the bound too.
    bound = int(max_input_len) if q.device.type == "cuda" else max(int(max_input_len), q.shape[0])
    run(
        DenseCall(
            query=q,
            key=k,
            value=v,
            query_start_loc=query_starts,
            key_start_loc=key_starts,
            spec=AttentionSpec(
                scale=q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
                causal=is_causal,
                window_left=sliding_window_q or None,
                window_right=sliding_window_k or None,
            ),
            max_query_len=bound,
            max_key_len=bound,
            out=o,
            sinks=sinks,
        )
    )


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Tensor | float | None = None,
) -> None:
    """Merges attention over a prefix with attention over the rest and writes `output`.

    Args:
        output: [num_tokens, num_heads, head_size], or fp8 with output_scale; written.
        prefix_output: [num_tokens, num_heads, head_size].
        prefix_lse: float32 [num_heads, num_tokens], natural log.
        suffix_output: as prefix_output.
        suffix_lse: as prefix_lse.
        output_lse: float32 [num_heads, num_tokens]; written when given.
        prefill_tokens_with_context: tokens from this one on have no prefix: the suffix is copied.
        output_scale: what one unit of an fp8 output is worth.

    Raises:
        InvalidInput: shapes or dtypes do not fit.
    """
    run(
        MergeCall(
            out_a=prefix_output,
            lse_a=prefix_lse.T,
            out_b=suffix_output,
            lse_b=suffix_lse.T,
            out=output,
            lse=None if output_lse is None else output_lse.T,
            out_scale=_one_scale("output_scale", output_scale),
            num_tokens_a=prefill_tokens_with_context,
        )
    )


def triton_reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
    interleaved_v_pack_factor: int = 1,
) -> None:
    """Writes new keys and values at their slots; an fp8 cache stores value / scale, saturated.

    Args:
        key: [num_tokens or more, num_kv_heads, head_size].
        value: the same.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size]; uint8 memory is taken as kv_cache_dtype.
        value_cache: the same.
        slot_mapping: int32 or int64 [num_tokens]; negative ones are skipped.
        kv_cache_dtype: a name of `CACHE_DTYPES` but "int8"; "half" and "float" too.
        k_scale: one element; used by fp8 caches only.
        v_scale: the same.
        interleaved_v_pack_factor: must be 1.

    Raises:
        InvalidInput: shapes or dtypes do not fit.
        Unsupported: another kv_cache_dtype, packed values, or head-major 5-D caches.
    """
    if interleaved_v_pack_factor != 1:
        raise Unsupported(
            f"interleaved_v_pack_factor is {interleaved_v_pack_factor}; values are not packed here: use 1."
        )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.ndim != 4:
            raise Unsupported(
                f"{name} has {cache.ndim} axes; only [num_blocks, block_size, num_kv_heads, head_size] is served."
            )
    quantized, scales = _stored_dtype(kv_cache_dtype), {}
    if quantized is not None:
        key_cache, value_cache = key_cache.view(quantized), value_cache.view(quantized)
        scales = {"k_scale": _one_scale("k_scale", k_scale), "v_scale": _one_scale("v_scale", v_scale)}
    _write(key, value, key_cache, value_cache, slot_mapping, **scales)


def triton_reshape_and_cache_flash_diffkv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
) -> None:
    """Does what `triton_reshape_and_cache_flash` does, for a cache whose last axis holds a key and then a value.

    Args:
        key: [num_tokens or more, num_kv_heads, key_head_size].
        value: [num_tokens or more, num_kv_heads, value_head_size].
        kv_cache: [num_blocks, block_size, num_kv_heads, key_head_size + value_head_size].
        slot_mapping: int32 or int64 [num_tokens].
        kv_cache_dtype: as there.
        k_scale: as there.
        v_scale: as there.

    Raises:
        InvalidInput: shapes or dtypes do not fit.
        Unsupported: another kv_cache_dtype.
    """
    sizes = [key.shape[-1], value.shape[-1]]
    if kv_cache.shape[-1] != sum(sizes):
        raise InvalidInput(f"kv_cache has {kv_cache.shape[-1]} elements per head; key and value have {sizes}.")
    caches = kv_cache.split(sizes, dim=-1)
    triton_reshape_and_cache_flash(key, value, caches[0], caches[1], slot_mapping, kv_cache_dtype, k_scale, v_scale)


def triton_reshape_and_cache_flash_per_token_head_quant(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    slot_mapping: Tensor,
    kv_quant_mode: Any = None,
) -> None:
    """Quantises keys and values with a scale per token and head and writes both.

    Args:
        key: [num_tokens or more, num_kv_heads, head_size].
        value: the same.
        key_cache: int8 or fp8 [num_blocks, block_size, num_kv_heads, head_size].
        value_cache: the same.
        k_scale_cache: float32 [num_blocks, block_size, num_kv_heads].
        v_scale_cache: the same.
        slot_mapping: int32 or int64 [num_tokens].
        kv_quant_mode: vLLM's enum; the dtype of the caches says int8 or fp8.

    Raises:
        InvalidInput: shapes or dtypes do not fit.
        Unsupported: a 4-bit mode, or caches that are neither int8 nor fp8.
    """
    _refuse_4_bits(kv_quant_mode)
    _write(key, value, key_cache, value_cache, slot_mapping, k_scale_cache=k_scale_cache, v_scale_cache=v_scale_cache)


def _write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, **scales: Any
) -> None:
    # vLLM's slots are int64, and this project's int32.
    slots = slot_mapping.to(torch.int32)
    run(WriteCall(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots, **scales))


def _refuse_4_bits(kv_quant_mode: Any) -> None:
    if "INT4" in str(getattr(kv_quant_mode, "name", kv_quant_mode)):
        raise Unsupported(f"kv_quant_mode is {kv_quant_mode}; caches are 8-bit or wider: use int8 or fp8.")


def _window(
    window_size: tuple[int, int], causal: bool | Tensor, chunk_lookback: int
) -> tuple[int | None, int | None, int | None]:
    """Returns window_left, window_right and attention_chunk."""
    left = window_size[0]
    if left < 0:
        return None, None, None
    if chunk_lookback > 0:
        raise Unsupported(f"chunk_lookback is {chunk_lookback}; a chunk sees itself only: use 0, or -1 for a window.")
    if chunk_lookback == 0:
        return None, None, left + 1
    return left, None if causal is True else left, None


def _one_scale(name: str, scale: Tensor | float | None) -> Tensor | float | None:
    if not isinstance(scale, Tensor):
        return scale
    if scale.numel() != 1 and any(stride for stride, size in zip(scale.stride(), scale.shape, strict=True) if size > 1):
        raise Unsupported(
            f"{name} has shape {list(scale.shape)}; one scale per tensor is served: pass one element, or a view that "
            "repeats it."
        )
    return scale.as_strided((1,), (1,)).to(torch.float32)


def _stored_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    """Returns the fp8 type of a cache's bytes; None when its elements are the real values."""
    names = {**CACHE_DTYPES, "half": torch.float16, "float": torch.float32}
    del names["int8"]
    if kv_cache_dtype not in names:
        raise Unsupported(
            f"kv_cache_dtype is {kv_cache_dtype!r}; use one of {', '.join(names)}, or the per-token-head operation."
        )
    dtype = names[kv_cache_dtype]
    return dtype if dtype is not None and dtype.itemsize == 1 else None
