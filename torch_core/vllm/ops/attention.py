"""vLLM's attention over a paged cache in this project's layout, over packed keys, and the merge of two results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import AttentionSpec
from torch_core.ops import run
from torch_core.vllm.ops.arguments import Scale, as_int32, one_scale, refuse_4_bits, refuse_option, run_descaled
from torch_core.vllm.ops.parameters import as_in_vllm


@as_in_vllm(q=3, k=4, v=4, cu_seqlens_q=1, seqused_k=1, block_table=2)
def unified_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor,
    max_seqlen_k: Any, softmax_scale: float, causal: bool | Tensor, window_size: tuple[int, int], block_table: Tensor,
    softcap: float, q_descale: Scale, k_descale: Scale, v_descale: Scale, seq_threshold_3D: Any = None,
    num_par_softmax_segments: Any = None, softmax_segm_output: Any = None,
    softmax_segm_max: Any = None, softmax_segm_expsum: Any = None,
    alibi_slopes: Tensor | None = None, output_scale: Scale = None, qq_bias: Tensor | None = None,
    sinks: Tensor | None = None, mm_prefix_range: Tensor | None = None, rswa_prefix_lens: Tensor | None = None,
    rswa_window: int | None = None, use_alibi_sqrt: bool = False, kv_quant_mode: Any = None,
    k_scale_cache: Tensor | None = None, v_scale_cache: Tensor | None = None, chunk_lookback: int = -1,
    use_td: Any = False, mm_prefix_clamp_sliding_window: bool = False,
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
        wanted = "pass None"
        raise Unsupported("rswa_window", "and rswa_prefix_lens: a prefix that escapes the window is not served", wanted)
    refuse_4_bits(kv_quant_mode)
    left, right, chunk = _window(window_size, causal, chunk_lookback)
    if mm_prefix_range is not None and mm_prefix_clamp_sliding_window and (left is not None or chunk is not None):
        wanted = "prefix ranges always reach past the window"
        raise Unsupported("mm_prefix_clamp_sliding_window", value=True, wanted=wanted)
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


@as_in_vllm(q=3, seqused_k=1)
def unified_attention_diffkv(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, softmax_scale: float,
    causal: bool, window_size: tuple[int, int], block_table: Tensor, softcap: float, max_seqlen_q: int = 1,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, use_alibi_sqrt: bool = False,
    seq_threshold_3D: Any = None, num_par_softmax_segments: Any = None,
    softmax_segm_output: Any = None, softmax_segm_max: Any = None,
    softmax_segm_expsum: Any = None, k_descale: Scale = None, v_descale: Scale = None,
    q_descale: Scale = None,
) -> None:  # fmt: skip
    """The counterpart of `unified_attention` for values of another head size; k and v are views of one packed cache.

    Args as there, but: k [num_blocks, block_size, num_kv_heads, head_size], v and out with the values' head size, and
    max_seqlen_q, which vLLM's callers may leave out: 1 with more tokens than sequences means for the number of tokens.
    """
    is_bound = max_seqlen_q > 1 or q.shape[0] <= seqused_k.shape[0]
    unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q if is_bound else q.shape[0], seqused_k, 0, softmax_scale, causal,
        window_size, block_table, softcap, q_descale, k_descale, v_descale, alibi_slopes=alibi_slopes, sinks=sinks,
        use_alibi_sqrt=use_alibi_sqrt,
    )  # fmt: skip


@as_in_vllm(q=3, k=3, v=3, b_start_loc=1, b_seq_len=1)
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
        b_start_loc: integers [num_seqs] or longer, first token of each sequence, in any order. Rows of no sequence
            become 0. Where sequences overlap, a row is a query of the one that begins first.
        b_seq_len: int32 [num_seqs].
        max_input_len: upper bound on b_seq_len.
        is_causal: hide keys after the query.
        softmax_scale: factor on the scores; head_size ** -0.5 when None.
        sliding_window_q, sliding_window_k: tokens before and after the query that stay visible; 0 or None for all.
        sinks: float [num_heads].
        sinks_bias_key0: must be False.

    Raises:
        InvalidInput: on a CPU, a sequence that begins before the first row, ends after the last one, or is longer than
            max_input_len.
        Unsupported: sinks_bias_key0.
    """
    refuse_option("sinks_bias_key0", sinks is not None and sinks_bias_key0, False, "a sink is no bias on key 0 here")
    starts = as_int32("b_start_loc", b_start_loc[: b_seq_len.shape[0]])
    lens = as_int32("b_seq_len", b_seq_len)
    on_cpu = q.device.type == "cpu"
    if on_cpu:
        _check_sequences(starts, lens, q.shape[0], int(max_input_len))
    query_starts, key_starts = dense_offsets(starts, lens)
    if on_cpu:
        # There offsets are checked, and never fall.
        k, v, key_starts = _packed_keys(k, v, key_starts)
    # Where values are checked, the gaps are held to the bound too.
    bound = max(int(max_input_len), q.shape[0]) if on_cpu else int(max_input_len)
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


def dense_offsets(starts: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns query_start_loc and key_start_loc, int32 [3 * num_seqs + 1], of sequences in any order, without waiting.

    Each sequence gives three: the gap before it, which are queries without keys; neither queries nor keys that count;
    and the queries that no earlier sequence has, which are its last ones, with all of its keys. Queries rise, keys
    need not: only those of a sequence with queries are read.
    """
    starts, order = torch.sort(starts, stable=True)
    ends = starts + lens[order]
    zero = ends.new_zeros(1)
    before = torch.cat([zero, ends.cummax(0).values])[:-1]
    first = torch.maximum(starts, before)
    queries = torch.stack([first, first, torch.maximum(first, ends)], 1)
    keys = torch.stack([torch.cat([zero, ends])[:-1], starts, ends], 1)
    return torch.cat([zero, queries.flatten()]), torch.cat([zero, keys.flatten()])


@as_in_vllm(prefix_output=3, prefix_lse=2, suffix_lse=2, output_lse=2)
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


def _check_sequences(starts: Tensor, lens: Tensor, num_tokens: int, max_len: int) -> None:
    for seq, (start, length) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
        if not 0 <= length <= max_len:
            wanted = f"it must be from 0 to max_input_len, {max_len}"
            raise InvalidInput(f"b_seq_len[{seq}]", value=length, wanted=wanted)
        if length and not 0 <= start <= num_tokens - length:
            wanted = f"its {length} tokens must be rows of q, which has {num_tokens}"
            raise InvalidInput(f"b_start_loc[{seq}]", value=start, wanted=wanted)


def _packed_keys(k: Tensor, v: Tensor, key_starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the keys and values of each third sequence, one after the other, and their offsets."""
    begins, ends = key_starts[2::3].tolist(), key_starts[3::3].tolist()
    rows = torch.cat([torch.arange(*pair) for pair in zip(begins, ends, strict=True)] or [torch.arange(0)])
    lens = torch.zeros(key_starts.shape[0] - 1, dtype=torch.int32)
    lens[2::3] = key_starts[3::3] - key_starts[2::3]
    return k[rows], v[rows], torch.cat([key_starts[:1], lens.cumsum(0, dtype=torch.int32)])


def _window(
    window_size: tuple[int, int], causal: bool | Tensor, chunk_lookback: int
) -> tuple[int | None, int | None, int | None]:
    """Returns window_left, window_right and attention_chunk."""
    left = window_size[0]
    if left < 0:
        return None, None, None
    if chunk_lookback > 0:
        wanted = "a chunk sees itself only: use 0, or -1 for a window"
        raise Unsupported("chunk_lookback", value=chunk_lookback, wanted=wanted)
    if chunk_lookback == 0:
        return None, None, left + 1
    return left, None if causal is True else left, None
