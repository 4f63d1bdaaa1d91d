"""Context parallelism: a call on one rank's share of each sequence's keys, and the merge of the ranks' results.

Written once for torch and JAX. The mask of a call counts positions of the whole sequence. A rank has every n-th run of
keys; a query still sees a contiguous range of the keys there, and the local call has this range.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_core.attention.call import DenseCall, PagedCall
from torch_core.base.errors import Unsupported
from torch_core.base.specs import FP8_DTYPES, AttentionSpec
from torch_core.launch.call import A
from torch_core.metadata import get_dcp_local_seq_lens


def local_call(
    call: PagedCall[A],
    *,
    dcp_world_size: int,
    dcp_rank: Any,
    interleave_size: int = 1,
    local_seq_lens: Any = None,
    library: Any,
    **placement: Any,
) -> tuple[PagedCall[A], A | None]:
    """Returns the attention of a call's queries to the keys that one rank holds.

    Causal queries of several tokens become sequences of one token each: which keys of a rank they see differs token by
    token. That reads keys once for each token and is meant for the few tokens of speculation; `context_call` is for
    more. Windows and chunks read their own blocks alone.

    Args:
        call: call of the whole sequences, with the cache of this rank; its sinks are left out: `merge_parts` takes
            them.
        dcp_world_size, dcp_rank, interleave_size: as in `torch_core.metadata.get_dcp_local_seq_lens`.
        local_seq_lens: this rank's share of the sequences, if it is known already.
        library: `torch` or `jax.numpy`: whose arrays they are.
        **placement: options of its `arange`: `device=...` for torch.

    Returns:
        The call, which has an lse, and the term to add to that lse; None for no term.

    Raises:
        Unsupported: a mask or bias that counts tokens on one rank otherwise than in the whole sequence.
    """
    _refuse(call, interleave_size)
    spec, place = (
        call.spec,
        {"dcp_world_size": dcp_world_size, "dcp_rank": dcp_rank, "interleave_size": interleave_size},
    )
    # ALiBi's term of the lse also differs from token to token.
    if call.alibi_slopes is not None or (call.max_query_len > 1 and spec.causal):
        call, local_seq_lens = _token_by_token(call, library, placement), None
    seq_lens, block_size = call.seq_lens, call.block_size
    ends = get_dcp_local_seq_lens(seq_lens, **place) if local_seq_lens is None else local_seq_lens
    changes: dict[str, Any] = {"sinks": None, "with_lse": True, "out": None, "seq_lens": ends}
    lse_more = None
    if call.alibi_slopes is not None:
        # The last key of this rank stands where the kernel puts the query; from there it counts keys as neighbours.
        distance = (ends - 1) * dcp_world_size + dcp_rank - (seq_lens - 1)
        slopes = library.asarray(call.alibi_slopes, dtype=library.float32)
        lse_more, changes["alibi_slopes"] = distance[:, None] * slopes, slopes * dcp_world_size
    near = [tokens for tokens in (spec.attention_chunk, _window(spec)) if tokens is not None]
    if near:
        last, first = seq_lens - 1, library.zeros_like(seq_lens)
        if spec.window_left is not None:
            first = library.maximum(first, last - spec.window_left)
        if spec.attention_chunk is not None:
            first = library.maximum(first, last // spec.attention_chunk * spec.attention_chunk)
        begins = get_dcp_local_seq_lens(first, **place)
        skipped = begins // block_size
        longest = (min(near) // (interleave_size * dcp_world_size) + 2) * interleave_size
        width = min(call.block_tables.shape[1], longest // block_size + 2)
        rows = library.arange(seq_lens.shape[0], **placement)[:, None]
        columns = skipped[:, None] + library.arange(width, **placement)
        begins, ends = begins - skipped * block_size, ends - skipped * block_size
        # A range in which everything is seen, around the last key that is seen in any case.
        changes |= {
            "block_tables": call.block_tables[rows, columns.clip(0, call.block_tables.shape[1] - 1)],
            "seq_lens": library.where(ends > begins, ends, 0),
            "mm_prefix_range": library.stack((begins, ends - 1), -1)[:, None],
            "spec": replace(spec, causal=True, window_left=0, window_right=None, attention_chunk=None),
        }
    elif call.max_query_len == 1:
        changes["spec"] = replace(spec, causal=True, window_right=None)
    return replace(call, **changes), lse_more


def context_call(
    call: PagedCall[A], *, dcp_world_size: int, dcp_rank: Any, interleave_size: int = 1, library: Any
) -> PagedCall[A]:
    """Returns the attention of long queries to one rank's share of the keys from before the step.

    Every query sees all of it, so that no mask is needed; the new tokens attend to each other elsewhere, where their
    keys are available.

    Args:
        call, dcp_world_size, dcp_rank, interleave_size, library: as in `local_call`.

    Raises:
        Unsupported: windows, chunks, ALiBi and other options that `local_call` refuses.
    """
    _refuse(call, interleave_size)
    if found := call.sees_distances:
        raise Unsupported(
            f"{call.name}: the context of queries of up to {call.max_query_len} tokens is spread over ranks, and "
            f"{found} differs from token to token. Pass no new keys (new=None): then each token is a "
            "sequence of its own."
        )
    before = call.seq_lens - (call.query_start_loc[1:] - call.query_start_loc[:-1])
    place = {"dcp_world_size": dcp_world_size, "dcp_rank": dcp_rank, "interleave_size": interleave_size}
    seq_lens = get_dcp_local_seq_lens(library.where(before > 0, before, 0), **place)
    spec = replace(call.spec, causal=False)
    return replace(call, sinks=None, with_lse=True, out=None, seq_lens=seq_lens, spec=spec)


def among_call(call: PagedCall[A], key: A, value: A) -> DenseCall[A]:
    """Returns the attention of a step's tokens to each other, from their keys and values; it has the sinks."""
    return DenseCall(
        query=call.query,
        key=key,
        value=value,
        query_start_loc=call.query_start_loc,
        key_start_loc=call.query_start_loc,
        sinks=call.sinks,
        spec=call.spec,
        max_query_len=call.max_query_len,
        max_key_len=call.max_query_len,
        with_lse=True,
        out_dtype=call.result_dtype,
    )


def merge_parts(outs: Any, lses: Any, sinks: Any = None, *, library: Any) -> tuple[Any, Any]:
    """Returns the attention to all keys from that to each part of them (FlashInfer, arXiv 2501.01005).

    Args:
        outs: float `[parts, num_tokens, num_heads, head_size]`; a part that saw nothing may hold anything.
        lses: float32 `[parts, num_tokens, num_heads]`, natural logarithms; -inf if a part saw nothing.
        sinks: float `[num_heads]`, a logit without a value in every softmax; None for none.
        library: `torch` or `jax.numpy`.

    Returns:
        float32 output and lse; zeros and -inf if no part saw anything.
    """
    top = library.amax(lses, 0)
    nothing = top == -float("inf")
    if sinks is not None:
        top = library.maximum(top, sinks)
    shift = library.where(nothing, 0.0, top)
    weights = library.exp(lses - shift)
    total = weights.sum(0)
    if sinks is not None:
        total = total + library.exp(sinks - shift)
    total = library.where(nothing, 1.0, total)
    parts = library.where(weights[..., None] > 0, outs, 0.0) * (weights / total)[..., None]
    return parts.sum(0), library.where(nothing, -float("inf"), shift + library.log(total))


def _window(spec: AttentionSpec) -> int | None:
    return None if spec.window_left is None else spec.window_left + 1


def _refuse(call: PagedCall[Any], interleave_size: int) -> None:
    spec, slopes = call.spec, call.alibi_slopes is not None
    reasons = {
        "seq_causal": call.seq_causal is not None,
        "mm_prefix_range": call.mm_prefix_range is not None,
        "qq_bias": call.qq_bias is not None,
        "relative_bias": call.relative_bias is not None,
        "square-root ALiBi": slopes and spec.use_alibi_sqrt,
        "ALiBi with runs of more than one token (interleave_size)": slopes and interleave_size > 1,
        "a window or chunk without the causal mask": not spec.causal
        and call.max_query_len > 1
        and (spec.window_left, spec.window_right, spec.attention_chunk) != (None, None, None),
        "ALiBi without the causal mask": not spec.causal and call.max_query_len > 1 and slopes,
        "an fp8 output": call.result_dtype in FP8_DTYPES or call.out_scale is not None,
    }
    clash = [reason for reason, found in reasons.items() if found]
    if clash:
        raise Unsupported(
            f"{call.name}: keys are spread over ranks, and {' and '.join(clash)} cannot be told from one rank's share. "
            "Keep such sequences on one rank."
        )


def _token_by_token(call: PagedCall[Any], library: Any, placement: dict[str, Any]) -> PagedCall[Any]:
    starts = call.query_start_loc
    tokens = library.arange(call.num_tokens, dtype=starts.dtype, **placement)
    seq = (library.searchsorted(starts, tokens, side="right") - 1).clip(0, call.num_seqs - 1)
    # Counted from the sequence's end, where its last new token stands.
    behind = starts[seq + 1] - 1 - tokens
    return replace(
        call,
        block_tables=call.block_tables[seq],
        seq_lens=library.where(tokens < starts[-1], (call.seq_lens[seq] - behind).clip(0), 0),
        query_start_loc=library.arange(call.num_tokens + 1, dtype=starts.dtype, **placement),
        max_query_len=1,
    )
