"""Plans of attention: paged and dense, for any mix of long and short queries."""

from __future__ import annotations

from functools import lru_cache

from torch_core.attention.call import AttentionCall, keys_of
from torch_core.attention.hopper.plan import hopper_launch
from torch_core.attention.hopper_fp8.plan import hopper_fp8_launch
from torch_core.attention.launch import combine_launch, max_chunks, rows_launch, scalar_arguments, split_launch
from torch_core.attention.tiles import chunk_size, split_tile
from torch_core.errors import InvalidInput
from torch_core.plan.operands import ScaleSpec, ceil_div, check_cache
from torch_core.plan.plan import ArraySpec, DeviceLimits, LaunchPlan, OperationPlan
from torch_core.specs import DTYPE_BYTES, AttentionSpec

__all__ = ["plan_attention", "plan_paged_attention"]

# Query tokens times packed heads that one program of the split kernel takes at most.
_MAX_SPLIT_ROWS = 64
# What a mixed batch gives to the split kernel: the rows that its smallest tile holds anyway.
_MIXED_SPLIT_ROWS = 16


@lru_cache(maxsize=4096)
def plan_paged_attention(
    query: ArraySpec,
    kv_cache: ArraySpec | tuple[ArraySpec, ArraySpec],
    block_tables: ArraySpec,
    seq_lens: ArraySpec,
    query_start_loc: ArraySpec,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    with_lse: bool = False,
    out: ArraySpec | None = None,
    out_dtype: str | None = None,
    out_scale: ScaleSpec = None,
    q_scale: ScaleSpec = None,
    k_scale: ScaleSpec = None,
    v_scale: ScaleSpec = None,
    alibi_slopes: ArraySpec | None = None,
    sinks: ArraySpec | None = None,
    k_scale_cache: ArraySpec | None = None,
    v_scale_cache: ArraySpec | None = None,
    mm_prefix_range: ArraySpec | None = None,
    qq_bias: ArraySpec | None = None,
    seq_causal: ArraySpec | None = None,
    kv_chunk_size: int | None = None,
    limits: DeviceLimits | None = None,
) -> OperationPlan:
    """Plans attention over a paged cache; the semantics are those of `torch_core.reference.paged_attention_with_lse`.

    Short queries (decode, speculative rows) go to the split kernel, long ones to the rows kernel; a batch that may
    hold both runs both, and each skips the other's sequences. The choice, and the chunk size of the split kernel,
    follow from shapes and max_query_len alone: within one plan a sequence's bits do not depend on its neighbours.

    Buffers: query, kv_cache (or key_cache and value_cache), block_tables, seq_lens, query_start_loc, then the optional
    arrays under the names of their parameters. Outputs: out, and lse with `with_lse`.

    Args:
        query: [num_tokens, num_heads, head_size].
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], or a pair of a key cache
            [num_blocks, block_size, num_kv_heads, head_size] and a value cache, whose head size may differ.
        block_tables: int32 [num_seqs, max_blocks].
        seq_lens: int32 [num_seqs].
        query_start_loc: int32 [num_seqs + 1].
        spec: the static options.
        max_query_len: an upper bound on the query lengths; longer queries are not served.
        with_lse: plan the lse output, float32 [num_tokens, num_heads].
        out: an output with strides of its own: planned as an array written in place. None plans a contiguous output.
        out_dtype: dtype of a planned output; the query's (bfloat16 for an fp8 query) when None.
        out_scale: what one unit of an fp8 output is worth.
        q_scale: what one unit of an fp8 query is worth.
        k_scale: what one unit of a stored key is worth.
        v_scale: the same for values.
        alibi_slopes: float [num_heads].
        sinks: float [num_heads].
        k_scale_cache: float32 [num_blocks, block_size, num_kv_heads], a scale per token and head.
        v_scale_cache: the same for values.
        mm_prefix_range: int32 [num_seqs, ranges, 2].
        qq_bias: float [rows, rows].
        seq_causal: bool [num_seqs].
        kv_chunk_size: keys of one chunk of the split kernel, a power of two from 128; None for the tile table's. With
            a number, a sequence has the same bits in all tables and batches whose plans have the same tile.
        limits: the device; an H200 when None.

    Raises:
        InvalidInput: shapes, dtypes or strides do not fit together.
        Unsupported: the Triton kernels do not serve this combination; the message says what does.
    """
    if isinstance(kv_cache, ArraySpec):
        check_cache(kv_cache)
        key = value = keys_of(kv_cache)
    else:
        key, value = kv_cache
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        kv_cache=kv_cache if isinstance(kv_cache, ArraySpec) else None,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        spec=spec,
        max_query_len=max_query_len,
        out=out or _output(query, value, out_dtype),
        with_lse=with_lse,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        out_scale=out_scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_scales=k_scale_cache,
        value_scales=v_scale_cache,
        mm_prefix_range=mm_prefix_range,
        qq_bias=qq_bias,
        seq_causal=seq_causal,
        limits=limits or DeviceLimits(),
    )
    _check_not_empty(call)
    if kv_chunk_size is not None and (kv_chunk_size < 128 or kv_chunk_size & (kv_chunk_size - 1)):
        raise InvalidInput(f"kv_chunk_size is {kv_chunk_size}; it must be a power of two, 128 or more.")
    short = _short_query_len(call)
    launches: list[LaunchPlan] = []
    scratch: tuple[tuple[str, ArraySpec], ...] = ()
    if short < call.max_query_len:
        launches.append(_rows(call, min_query=short + 1))
    if short:
        split, scratch = _split(call, max_query=short, zero_padding=not launches, chunk=kv_chunk_size)
        launches += split
    return _operation("paged_attention", call, tuple(launches), scratch, out is not None)


@lru_cache(maxsize=4096)
def plan_attention(
    query: ArraySpec,
    key: ArraySpec,
    value: ArraySpec,
    query_start_loc: ArraySpec,
    key_start_loc: ArraySpec,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    with_lse: bool = False,
    out: ArraySpec | None = None,
    out_dtype: str | None = None,
    out_scale: ScaleSpec = None,
    alibi_slopes: ArraySpec | None = None,
    sinks: ArraySpec | None = None,
    mm_prefix_range: ArraySpec | None = None,
    qq_bias: ArraySpec | None = None,
    seq_causal: ArraySpec | None = None,
    limits: DeviceLimits | None = None,
) -> OperationPlan:
    """Plans attention over packed keys and values: encoders, cross attention, prefill without a cache.

    The semantics are those of `torch_core.reference.attention_with_lse`. Buffers: query, key, value, query_start_loc,
    key_start_loc, then the optional arrays under the names of their parameters. Outputs: out, and lse with `with_lse`.

    Args:
        query: [num_tokens, num_heads, head_size].
        key: [num_keys, num_kv_heads, head_size].
        value: [num_keys, num_kv_heads, value_head_size].
        query_start_loc: int32 [num_seqs + 1].
        key_start_loc: int32 [num_seqs + 1].
        spec: the static options.
        max_query_len: an upper bound on the query lengths; it picks the tile.
        with_lse: plan the lse output, float32 [num_tokens, num_heads].
        out: as in `plan_paged_attention`.
        out_dtype: as in `plan_paged_attention`.
        out_scale: as in `plan_paged_attention`.
        alibi_slopes: float [num_heads].
        sinks: float [num_heads].
        mm_prefix_range: int32 [num_seqs, ranges, 2].
        qq_bias: float [rows, rows].
        seq_causal: bool [num_seqs].
        limits: the device; an H200 when None.

    Raises:
        InvalidInput: shapes, dtypes or strides do not fit together.
        Unsupported: the Triton kernels do not serve this combination; the message says what does.
    """
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        key_start_loc=key_start_loc,
        query_start_loc=query_start_loc,
        spec=spec,
        max_query_len=max_query_len,
        out=out or _output(query, value, out_dtype),
        with_lse=with_lse,
        out_scale=out_scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        mm_prefix_range=mm_prefix_range,
        qq_bias=qq_bias,
        seq_causal=seq_causal,
        limits=limits or DeviceLimits(),
    )
    _check_not_empty(call)
    return _operation("attention", call, (_rows(call, min_query=1),), (), out is not None)


def _output(query: ArraySpec, value: ArraySpec, dtype: str | None) -> ArraySpec:
    if dtype is None:
        dtype = "bfloat16" if query.dtype.startswith("float8") else query.dtype
    return ArraySpec((*query.shape[:2], value.shape[-1]), dtype)


def _check_not_empty(call: AttentionCall) -> None:
    if call.num_tokens == 0 or call.num_seqs == 0:
        raise InvalidInput(
            f"query has {call.num_tokens} rows and query_start_loc {call.num_seqs} sequences; there is nothing to "
            "launch: return an empty output without a plan."
        )


def _split_pack(call: AttentionCall) -> int:
    return min(call.group, _MAX_SPLIT_ROWS)


def _short_query_len(call: AttentionCall) -> int:
    """Query tokens up to which a sequence goes to the split kernel; 0 for none."""
    if call.mm_prefix_range is not None:
        return 0
    pack = _split_pack(call)
    if call.max_query_len * pack <= _MAX_SPLIT_ROWS:
        return max(1, call.max_query_len)
    if call.num_seqs == 1:
        return 0
    return max(1, _MIXED_SPLIT_ROWS // pack)


def _rows(call: AttentionCall, *, min_query: int) -> LaunchPlan:
    for plan_hopper in (hopper_launch, hopper_fp8_launch):
        hopper = plan_hopper(call, scalar_arguments(call), min_query=min_query)
        if hopper is not None:
            return hopper
    return rows_launch(call, min_query=min_query)


def _split(
    call: AttentionCall, *, max_query: int, zero_padding: bool, chunk: int | None
) -> tuple[list[LaunchPlan], tuple[tuple[str, ArraySpec], ...]]:
    pack = _split_pack(call)
    head_programs = call.num_kv_heads * ceil_div(call.group, pack)
    tile = split_tile(
        rows=max_query * pack,
        programs=call.num_seqs * head_programs,
        table_tokens=call.table_tokens,
        head_padded=max(call.head_padded, call.value_padded),
        key_bytes=DTYPE_BYTES[call.key.dtype],
        query_bytes=DTYPE_BYTES[call.query.dtype],
    )
    chunk = chunk or chunk_size(
        num_seqs=call.num_seqs,
        table_tokens=max(1, call.table_tokens),
        head_programs=head_programs,
        key_bytes=DTYPE_BYTES[call.key.dtype],
    )
    launches = [split_launch(call, tile, pack=pack, chunk=chunk, max_query=max_query, zero_padding=zero_padding)]
    chunks = max_chunks(call, chunk, max_query)
    if chunks == 1:
        return launches, ()
    launches.append(combine_launch(call, chunk=chunk, max_query=max_query))
    rows = (call.num_seqs * max_query, chunks, call.num_heads)
    scratch = (
        ("partial_out", ArraySpec((*rows, call.value.shape[-1]), "float32")),
        ("partial_max", ArraySpec(rows, "float32")),
        ("partial_sum", ArraySpec(rows, "float32")),
    )
    return launches, scratch


def _operation(
    name: str,
    call: AttentionCall,
    launches: tuple[LaunchPlan, ...],
    scratch: tuple[tuple[str, ArraySpec], ...],
    out_in_place: bool,
) -> OperationPlan:
    lse = (("lse", ArraySpec((call.num_tokens, call.num_heads), "float32")),) if call.with_lse else ()
    out = (("out", call.out),)
    return OperationPlan(
        name=name,
        inputs=call.inputs + (out if out_in_place else ()),
        in_place=("out",) if out_in_place else (),
        outputs=lse if out_in_place else out + lse,
        scratch=scratch,
        launches=launches,
    )
