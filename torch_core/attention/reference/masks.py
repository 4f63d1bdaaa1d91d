"""The keys that a query row sees, and the bias of their scores: the mask semantics of `AttentionSpec` in tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.attention.call import BIAS_FIELDS, AttentionCall
from torch_core.base.specs import AttentionSpec


def visible_keys(
    query_len: int,
    key_len: int,
    *,
    spec: AttentionSpec,
    causal: bool | None = None,
    mm_prefix_range: Tensor | None = None,
) -> Tensor:
    """Returns which keys each query row of one sequence sees.

    Query row `i` is at position `p = key_len - query_len + i`; key `j` is visible when every condition of `spec`
    holds (see `AttentionSpec`). A position below zero (fewer keys than queries) follows the same inequalities; under a
    causal mask it sees nothing.

    Args:
        query_len: query rows of the sequence.
        key_len: keys of the sequence.
        spec: the static options.
        causal: overrides `spec.causal` for this sequence; None keeps it.
        mm_prefix_range: `[ranges, 2]` int, first and last position (both inclusive) of spans, images for example,
            inside which attention is bidirectional. Two positions of one span see each other regardless of the causal
            mask, the windows and the chunks. A range counts only when first < last, so `(0, 0)` pads.

    Returns:
        bool `[query_len, key_len]`.

    Example:
        >>> visible_keys(2, 4, spec=AttentionSpec(scale=1.0, window_left=1)).int()
        tensor([[0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    p = torch.arange(key_len - query_len, key_len)[:, None]
    j = torch.arange(key_len)[None, :]
    visible = torch.ones(query_len, key_len, dtype=torch.bool)
    if spec.causal if causal is None else causal:
        visible &= j <= p
    if spec.window_left is not None:
        visible &= j >= p - spec.window_left
    if spec.window_right is not None:
        visible &= j <= p + spec.window_right
    if spec.attention_chunk is not None:
        visible &= j // spec.attention_chunk == p // spec.attention_chunk
    if mm_prefix_range is not None:
        for first, last in mm_prefix_range.tolist():
            if first < last:
                visible |= (first <= p) & (p <= last) & (first <= j) & (j <= last)
    return visible


def biases(call: AttentionCall[Tensor]) -> dict[str, Tensor | None]:
    """Returns the arguments of `score_bias` that are arrays of a call."""
    return {name: getattr(call, name) for name in BIAS_FIELDS}


def score_bias(
    query_len: int,
    key_len: int,
    *,
    spec: AttentionSpec,
    dtype: torch.dtype,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    qq_bias: Tensor | None = None,
) -> Tensor | None:
    """Returns the bias of the scaled and capped scores of one sequence, before the mask.

    Args:
        query_len: query rows of the sequence.
        key_len: keys of the sequence.
        spec: the static options; `use_alibi_sqrt` picks the form of ALiBi.
        dtype: the dtype of the result.
        alibi_slopes: float `[num_heads]`, or None. Adds `slope * (j - p)` (Press et al., arXiv 2108.12409), or, in
            the square root form, `-slope * sqrt(p - j)` for `j <= p` and nothing for later keys.
        relative_bias: float `[num_heads, 2 * D + 1]`, or None. Adds entry `D + clip(j - p, -D, D)`
            (Raffel et al., arXiv 1910.10683: one for a bucket of distances).
        qq_bias: float `[rows, rows]` with at least `query_len` rows, or None: the bias between the new tokens of a
            sequence, the same for every sequence (tree attention: 0 on ancestors, -inf elsewhere). Column 0 is the
            first new token. It is added after the mask has been decided: -inf hides a key, and nothing shows one.

    Returns:
        `[num_heads or 1, query_len, key_len]`, or None when there is nothing to add.
    """
    bias = None
    distance = torch.arange(key_len)[None, :] - torch.arange(key_len - query_len, key_len)[:, None]
    if alibi_slopes is not None:
        form = -(-distance).clamp(min=0).to(dtype).sqrt() if spec.use_alibi_sqrt else distance.to(dtype)
        bias = alibi_slopes.cpu().to(dtype)[:, None, None] * form
    if relative_bias is not None:
        furthest = relative_bias.shape[1] // 2
        relative = relative_bias.cpu().to(dtype)[:, distance.clamp(-furthest, furthest) + furthest]
        bias = relative if bias is None else bias + relative
    if qq_bias is not None:
        context_len = key_len - query_len
        between = torch.zeros(1, query_len, key_len, dtype=dtype)
        first_key = max(context_len, 0)
        between[0, :, first_key:] = qq_bias.cpu().to(dtype)[:query_len, first_key - context_len : query_len]
        bias = between if bias is None else bias + between
    return bias
