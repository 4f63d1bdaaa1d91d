"""Attention of one sequence over its own keys and values: the arithmetic that dense and paged attention share."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.call import AttentionCall, DenseCall
from torch_core.attention.dropout import keep_factor, keep_mask
from torch_core.attention.reference.masks import biases, score_bias, visible_keys
from torch_core.base.specs import AttentionSpec
from torch_core.launch.call import Call

C = TypeVar("C", bound=Call[Tensor])


def attend(call: AttentionCall[Tensor], seq: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attends sequence number `seq` of a call over its own keys and values; see `attend_sequence`."""
    dropout = None
    if isinstance(call, DenseCall) and call.dropout_seeds is not None:
        seeds, rate = call.dropout_seeds[seq].cpu().numpy(), call.dropout_rate
        kept = keep_mask(seeds, np.arange(query.shape[0]), (0, key.shape[0]), rate)
        dropout = torch.from_numpy(kept) * keep_factor(rate)
    return attend_sequence(
        query,
        key,
        value,
        spec=call.spec,
        causal=None if call.seq_causal is None else bool(call.seq_causal[seq]),
        sinks=call.sinks,
        mm_prefix_range=None if call.mm_prefix_range is None else call.mm_prefix_range[seq],
        dropout=dropout,
        **biases(call),
    )


def attend_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spec: AttentionSpec,
    causal: bool | None = None,
    sinks: Tensor | None = None,
    mm_prefix_range: Tensor | None = None,
    dropout: Tensor | None = None,
    **bias_arrays: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attends one sequence, in the dtype of its arguments (which have their scales applied already).

    Score of query `i` and key `j`: `scale * q_i . k_j`, then the soft cap `cap * tanh(score / cap)`, then the
    biases, then the mask. The softmax of a row runs over its visible keys and, with sinks, over one
    more logit per head that has no value (gpt-oss; the "attention sink" of vLLM). Key and value rows that no query
    sees never reach a result, with any content: 0 x NaN would be NaN, so they are set to zero first.

    Args:
        query: `[query_len, num_heads, head_size]`.
        key: `[key_len, num_kv_heads, head_size]`; query head `h` reads key head `h // (num_heads // num_kv_heads)`.
        value: `[key_len, num_kv_heads, value_head_size]`.
        spec: the static options.
        causal: overrides `spec.causal`.
        sinks: float `[num_heads]`.
        mm_prefix_range: int `[ranges, 2]`; see `visible_keys`.
        dropout: `[num_heads, query_len, key_len]`, factors of the softmax weights, but not of the lse.
        **bias_arrays: the arguments of `score_bias`.

    Returns:
        The output `[query_len, num_heads, value_head_size]` in the dtype of `query`, and the natural logarithm of
        each row's softmax denominator (sink included), `[query_len, num_heads]`, float64 for a float64 query and
        float32 otherwise. A row that sees no key gives zeros and -inf, with or without a sink.
    """
    query_len, num_heads, _ = query.shape
    key_len, num_kv_heads, _ = key.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    visible = visible_keys(query_len, key_len, spec=spec, causal=causal, mm_prefix_range=mm_prefix_range)
    bias = score_bias(query_len, key_len, spec=spec, dtype=lse_dtype, **bias_arrays)
    if bias is not None:
        visible = visible & (bias > -torch.inf).all(dim=0)
    hidden_from_all = ~visible.any(dim=0)
    key = key.masked_fill(hidden_from_all[:, None, None], 0)
    value = value.masked_fill(hidden_from_all[:, None, None], 0)

    group_size = num_heads // num_kv_heads
    key = key.repeat_interleave(group_size, dim=1)
    value = value.repeat_interleave(group_size, dim=1)

    scores = spec.scale * torch.einsum("ihd,jhd->hij", query, key)
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
    scores = scores.to(lse_dtype)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, -torch.inf)

    # A row that sees nothing keeps a shift of 0: exp(-inf - 0) is 0, where exp(-inf + inf) would be NaN.
    seen = visible.any(dim=1)
    shift = scores.amax(dim=-1, keepdim=True) if key_len else scores.new_zeros(num_heads, query_len, 1)
    if sinks is not None:
        sinks = sinks.cpu().to(lse_dtype)[:, None, None]
        shift = torch.maximum(shift, sinks)
    shift = shift.masked_fill(shift == -torch.inf, 0)
    weights = torch.exp(scores - shift)
    denominator = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        denominator = denominator + torch.exp(sinks - shift)
    # Not the logarithm of 0, whose derivative is infinite where nothing is seen.
    denominator = denominator.masked_fill(denominator == 0, 1)
    lse = (denominator.log() + shift).squeeze(-1).masked_fill(~seen, -torch.inf)
    weights = weights / denominator
    if dropout is not None:
        weights = weights * dropout.to(lse_dtype)
    weights = weights.to(query.dtype)
    output = torch.einsum("hij,jhd->ihd", weights, value)
    return output, lse.T


def empty_results(call: AttentionCall[Tensor], compute_dtype: torch.dtype | None) -> tuple[Tensor, Tensor, torch.dtype]:
    """Returns the output and lse of rows that no sequence owns (zeros, -inf) and the dtype to compute in.

    The output has the dtype of the query (bfloat16 for an fp8 query) unless `compute_dtype` is given: then that.
    """
    query = call.query
    output_dtype = query.dtype if query.dtype.itemsize > 1 else torch.bfloat16
    if compute_dtype is not None:
        output_dtype = compute_dtype
    elif output_dtype == torch.float64:
        compute_dtype = torch.float64
    else:
        compute_dtype = torch.float32
    output = torch.zeros(call.num_tokens, call.num_heads, call.value_head_size, dtype=output_dtype)
    lse_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    return output, torch.full((call.num_tokens, call.num_heads), -torch.inf, dtype=lse_dtype), compute_dtype


def on_the_host(call: C) -> C:
    """Returns a call whose indices are int32 in the host's memory, if their values can be checked."""
    return call.map(lambda x: x.cpu().int() if x.dtype in (torch.int32, torch.int64) else x)


def store_output(call: AttentionCall[Tensor], output: Tensor) -> Tensor:
    """Returns the output where the query is, in `out` when it is given; fp8 is divided by its scale and saturates."""
    if call.out is None:
        return output.to(call.query.device)
    if call.out_scale is not None:
        output = output / torch.as_tensor(call.out_scale).cpu().to(output.dtype).reshape(())
    if call.out.dtype.itemsize == 1:
        largest = torch.finfo(call.out.dtype).max
        output = output.clamp(-largest, largest)
    return call.out.copy_(output)
