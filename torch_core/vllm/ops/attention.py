"""vLLM's attention over a paged cache in this project's layout, over packed keys, and the merge of two results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import Unsupported
from torch_core.base.specs import AttentionSpec
from torch_core.latent.call import LatentCall
from torch_core.ops import run
from torch_core.vllm.ops.arguments import Scale, as_int32, one_scale, refuse_4_bits, run_descaled


def unified_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor,
    max_seqlen_k: int, softmax_scale: float, causal: bool | Tensor, window_size: tuple[int, int], block_table: Tensor,
    softcap: float, q_descale: Scale, k_descale: Scale, v_descale: Scale, seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None, softmax_segm_output: Tensor | None = None,
    softmax_segm_max: Tensor | None = None, softmax_segm_expsum: Tensor | None = None,
    alibi_slopes: Tensor | None = None, output_scale: Scale = None, qq_bias: Tensor | None = None,
    sinks: Tensor | None = None, mm_prefix_range: Tensor | None = None, rswa_prefix_lens: Tensor | None = None,
    rswa_window: int | None = None, use_alibi_sqrt: bool = False, kv_quant_mode: Any = None,
    k_scale_cache: Tensor | None = None, v_scale_cache: Tensor | None = None, chunk_lookback: int = -1,
    use_td: bool = False, mm_prefix_clamp_sliding_window: bool = False,
) -> None:  # fmt: skip
    """Attends any mix of prefill and decode rows over a paged cache and writes `out`.

    Not used: max_seqlen_k, seq_threshold_3D, num_par_softmax_segments, softmax_segm_output, softmax_segm_max,
    softmax_segm_expsum, use_td.

    Args:
        q: [num_tokens, num_heads, head_size].
        k, v: the caches [num_blocks, block_size, num_kv_heads, head_size], any strides with the last one 1.
        out: like q, or fp8 with output_scale; written.
        cu_seqlens_q: int32 [num_seqs + 1].
        max_seqlen_q: upper bound on the query lengths.
        seqused_k: int32 [num_seqs], tokens in the cache.
        softmax_scale: factor on the scores.
        causal: one flag, or bool [num_seqs].
        window_size: (W - 1, 0) or (W - 1, W - 1) for a window of W, (-1, -1) for none. Without a causal mask the
            window reaches as far to the right as to the left.
        block_table: int32 [num_seqs, max_blocks].
        softcap: soft cap on the scores; 0 for none.
        q_descale: dequantisation scale of an fp8 query: a number, one element, a view that repeats one, or [num_seqs,
            num_kv_heads], which costs a launch before and after.
        k_descale, v_descale: the same for an 8-bit cache.
        alibi_slopes, sinks: float [num_heads].
        output_scale: dequantisation scale of an fp8 output.
        qq_bias: float [rows, rows].
        mm_prefix_range: int32 [num_seqs, ranges, 2], both ends inclusive.
        use_alibi_sqrt: the square root form of ALiBi.
        kv_quant_mode: vLLM's enum; only 4-bit modes are told apart, the scales say the rest.
        k_scale_cache, v_scale_cache: float32 [num_blocks, block_size, num_kv_heads], scales per token and head.
        chunk_lookback: -1, or 0 for chunked local attention with chunks of W.

    Raises:
        Unsupported: rswa, 4-bit caches, chunk_lookback above 0, clamped prefix ranges.
    """
    if rswa_window is not None and rswa_prefix_lens is not None:
        raise Unsupported(
            "rswa_window", "and rswa_prefix_lens: a prefix that escapes the window is not served", "pass None"
        )
    refuse_4_bits(kv_quant_mode)
    left, right, chunk = _window(window_size, causal, chunk_lookback)
    if mm_prefix_range is not None and mm_prefix_clamp_sliding_window and (left is not None or chunk is not None):
        raise Unsupported("mm_prefix_clamp_sliding_window: prefix ranges always reach past the window; pass False.")
    # A cache of 16 bits or more holds the real values: its write has no scale either.
    scaled = k.dtype.itemsize == 1 and k_scale_cache is None
    run_descaled(
        PagedCall(
            query=q,
            key_cache=k,
            value_cache=v,
            block_tables=block_table,
            seq_lens=seqused_k,
            query_start_loc=cu_seqlens_q,
            spec=AttentionSpec(
                scale=float(softmax_scale),
                causal=True if isinstance(causal, Tensor) else causal,
                window_left=left,
                window_right=right,
                logits_soft_cap=float(softcap) if softcap else None,
                attention_chunk=chunk,
                use_alibi_sqrt=use_alibi_sqrt,
            ),
            max_query_len=int(max_seqlen_q),
            out_scale=one_scale("output_scale", output_scale),
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            qq_bias=qq_bias,
            mm_prefix_range=mm_prefix_range,
            seq_causal=causal if isinstance(causal, Tensor) else None,
            k_scale_cache=k_scale_cache,
            v_scale_cache=v_scale_cache,
        ),
        out,
        q_descale=q_descale,
        k_descale=k_descale if scaled else None,
        v_descale=v_descale if scaled else None,
    )


def unified_attention_diffkv(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, softmax_scale: float,
    causal: bool, window_size: tuple[int, int], block_table: Tensor, softcap: float, max_seqlen_q: int | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, use_alibi_sqrt: bool = False,
    seq_threshold_3D: int | None = None, num_par_softmax_segments: int | None = None,
    softmax_segm_output: Tensor | None = None, softmax_segm_max: Tensor | None = None,
    softmax_segm_expsum: Tensor | None = None,
) -> None:  # fmt: skip
    """The counterpart of `unified_attention` for values of another head size; k and v are views of one packed cache.

    Args as there, but: k [num_blocks, block_size, num_kv_heads, head_size], v and out with the values' head size, and
    max_seqlen_q, which vLLM takes for 1: None means for the safe bound, the number of tokens.
    """
    bound, none = q.shape[0] if max_seqlen_q is None else max_seqlen_q, None
    mask = causal, window_size, block_table, softcap
    unified_attention(
        q, k, v, out, cu_seqlens_q, bound, seqused_k, 0, softmax_scale, *mask, none, none, none,
        alibi_slopes=alibi_slopes, sinks=sinks, use_alibi_sqrt=use_alibi_sqrt,
    )  # fmt: skip


def decode_attention_fwd(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, o: Tensor, lse: Tensor, req_to_token: Tensor, b_seq_len: Tensor,
    attn_logits: Tensor | None, num_kv_splits: int, sm_scale: float, page_size: int = 1, logit_cap: float = 0.0,
    k_scale: Scale = None, v_scale: Scale = None, is_mla: bool = False,
) -> None:  # fmt: skip
    """Attends one query of each sequence over a paged cache; writes `o` and `lse`.

    Not used: attn_logits, num_kv_splits.

    Args:
        q: [num_seqs, num_heads, head_size].
        k_buffer, v_buffer: [num_pages, page_size, num_kv_heads, head_size], or without the first axis split; the head
            sizes may differ.
        o: [num_seqs, num_heads, value_head_size]; written.
        lse: [num_seqs, num_heads], natural log; written.
        req_to_token: int32 [num_seqs, pages], the pages of each sequence.
        b_seq_len: int32 [num_seqs].
        sm_scale: factor on the scores.
        page_size: tokens of a page.
        logit_cap: soft cap on the scores; 0 for none.
        k_scale, v_scale: dequantisation scales of an 8-bit cache.
        is_mla: `v_buffer` is the first elements of `k_buffer`'s rows, the latents of one head; it is not read.

    Raises:
        Unsupported: heads beyond 256 on CUDA without `is_mla`.
    """
    k, v = (x if x.ndim == 4 else x.unflatten(0, (-1, page_size)) for x in (k_buffer, v_buffer))
    scaled = k.dtype.itemsize == 1
    batch: dict[str, Any] = {
        "query": q,
        "block_tables": as_int32("req_to_token", req_to_token),
        "seq_lens": as_int32("b_seq_len", b_seq_len),
        "query_start_loc": torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device),
        "spec": AttentionSpec(scale=float(sm_scale), logits_soft_cap=float(logit_cap) or None),
        "max_query_len": 1,
        "out": o,
        "with_lse": True,
        "k_scale": one_scale("k_scale", k_scale) if scaled else None,
    }
    if is_mla:
        found = run(LatentCall(latent_cache=k[:, :, 0], kv_lora_rank=v.shape[-1], **batch))
    else:
        v_scale = one_scale("v_scale", v_scale) if scaled else None
        found = run(PagedCall(key_cache=k, value_cache=v, v_scale=v_scale, **batch))
    lse.copy_(found["lse"])


def context_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, b_start_loc: Tensor, b_seq_len: Tensor, max_input_len: int,
    is_causal: bool = True, softmax_scale: float | None = None, sliding_window_q: int | None = None,
    sliding_window_k: int | None = None, sinks: Tensor | None = None, sinks_bias_key0: bool = False,
) -> None:  # fmt: skip
    """Attends packed sequences to their own keys and values and writes `o` (vLLM's prefill operation).

    Args:
        q: [num_tokens, num_heads, head_size].
        k, v: [num_tokens, num_kv_heads, head_size].
        o: like q; written.
        b_start_loc: int32 [num_seqs] or longer, first token of each sequence; they rise, and rows between two sequences
            are padding.
        b_seq_len: int32 [num_seqs].
        max_input_len: upper bound on b_seq_len.
        is_causal: hide keys after the query.
        softmax_scale: factor on the scores; head_size ** -0.5 when None.
        sliding_window_q, sliding_window_k: tokens before and after the query that stay visible; 0 or None for all.
        sinks: float [num_heads].
        sinks_bias_key0: must be False.

    Raises:
        InvalidInput: sequences that overlap, if the CPU sees them.
        Unsupported: sinks_bias_key0.
    """
    if sinks is not None and sinks_bias_key0:
        raise Unsupported("sinks_bias_key0: a sink is a logit without a value here, not a bias on key 0; pass False.")
    starts = as_int32("b_start_loc", b_start_loc[: b_seq_len.shape[0]])
    ends = starts + as_int32("b_seq_len", b_seq_len)
    zero = ends.new_zeros(1)
    before = torch.cat([zero, ends])[:-1]
    # A gap between two sequences becomes two more sequences: queries without keys, whose rows become 0, and keys
    # without queries.
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
    output: Tensor, prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor, suffix_lse: Tensor,
    output_lse: Tensor | None = None, prefill_tokens_with_context: int | None = None, output_scale: Scale = None,
) -> None:  # fmt: skip
    """Merges attention over a prefix with attention over the rest and writes `output`.

    Args:
        output: [num_tokens, num_heads, head_size], or fp8 with output_scale; written.
        prefix_output, suffix_output: [num_tokens, num_heads, head_size].
        prefix_lse, suffix_lse: float32 [num_heads, num_tokens], natural log.
        output_lse: float32 [num_heads, num_tokens]; written when given.
        prefill_tokens_with_context: tokens from this one on have no prefix: the suffix is copied.
        output_scale: dequantisation scale of an fp8 output.
    """
    run(
        MergeCall(
            out_a=prefix_output,
            lse_a=prefix_lse.T,
            out_b=suffix_output,
            lse_b=suffix_lse.T,
            out=output,
            lse=None if output_lse is None else output_lse.T,
            out_scale=one_scale("output_scale", output_scale),
            num_tokens_a=prefill_tokens_with_context,
        )
    )


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
