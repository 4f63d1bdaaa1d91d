"""The launches of attention: a checked AttentionCall in, LaunchPlans of the rows, split and combine kernels out."""

from __future__ import annotations

from typing import Any

from torch_core.attention.call import OUTPUT_LIMITS, AttentionCall
from torch_core.attention.rows.kernel import attention_rows_kernel
from torch_core.attention.split.combine import attention_combine_kernel
from torch_core.attention.split.kernel import attention_split_kernel
from torch_core.attention.tiles import RowsTile, SplitTile, rows_tile
from torch_core.plan.operands import ScaleSpec, ceil_div, power_of_two, scale_pointer
from torch_core.plan.plan import ABSENT, Argument, ArraySpec, LaunchPlan, Pointer, Scalar
from torch_core.specs import DTYPE_BYTES

__all__ = ["combine_launch", "max_chunks", "rows_launch", "scalar_arguments", "split_launch"]

# Positions and windows stay below this, so that their sum fits 32 bits.
_NO_BOUND = 1 << 30
# Few sizes, so that few variants are compiled.
_BLOCK_SEQS = (1, 32, 256, 1024)
_COMBINE_CHUNKS = 16
# Up to this query length the heads of a tile run side by side: their tiles are of equal length, so that the device
# fills evenly. Beyond it, the tiles of one head do: its keys stay in the L2 cache.
_HEADS_FIRST_LEN = 4096
_MAX_GRID_Y = 65535
# Larger groups fill tiles of rows head by head.
_MAX_PACK = 64
_PARTIALS = ("partial_out", "partial_max", "partial_sum")


def rows_launch(call: AttentionCall, *, min_query: int) -> LaunchPlan:
    """Plans attention_rows_kernel for the sequences with at least `min_query` query rows, and for padding."""
    pack = call.group if call.group <= _MAX_PACK else 1
    tile = rows_tile(
        rows=max(1, call.max_query_len) * pack,
        max_query_len=call.max_query_len,
        head_padded=max(call.head_padded, call.value_padded),
        key_bytes=DTYPE_BYTES[call.key.dtype],
        query_bytes=DTYPE_BYTES[call.query.dtype],
        paged=call.paged,
        plain=call.plain,
    )
    pack = min(pack, tile.block_m)
    tokens = tile.block_m // pack
    head_groups = ceil_div(call.group, pack)
    tiles = call.num_tokens // tokens + call.num_seqs + 1
    head_programs = call.num_kv_heads * head_groups
    heads_first = call.max_query_len <= _HEADS_FIRST_LEN and tiles <= _MAX_GRID_Y
    arguments = {
        **_common_arguments(call),
        "key_start_loc": _pointer("key_start_loc", call.key_start_loc),
        "mm_prefix_range": _pointer("mm_prefix_range", call.mm_prefix_range),
        **_output_arguments(call),
        **scalar_arguments(call),
    }
    constexprs = {
        **_common_constexprs(call),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages,
        "PACK": pack,
        "PAGED": call.paged,
        "MIN_QUERY": min_query,
        "HEADS_FIRST": heads_first,
        "NUM_RANGES": 0 if call.mm_prefix_range is None else call.mm_prefix_range.shape[1],
    }
    return _launch(
        attention_rows_kernel,
        (head_programs, tiles) if heads_first else (tiles, head_programs),
        arguments,
        constexprs,
        ("out", "lse") if call.with_lse else ("out",),
        tile,
        hot=_is_hot(call) and tile.maxnreg is None,
    )


def split_launch(
    call: AttentionCall, tile: SplitTile, *, pack: int, chunk: int, max_query: int, zero_padding: bool
) -> LaunchPlan:
    """Plans attention_split_kernel for the sequences with at most `max_query` query rows."""
    chunks = max_chunks(call, chunk, max_query)
    head_programs = call.num_kv_heads * ceil_div(call.group, pack)
    # Every sequence with chunks has a token, so at most the rest of the tokens is padding.
    padding = ceil_div(max(0, call.num_tokens - call.num_seqs), max_query) if zero_padding else 0
    items = call.num_seqs * chunks + padding
    split = chunks > 1
    arguments = {
        **_common_arguments(call),
        **_output_arguments(call),
        "partial_out": Pointer("partial_out") if split else ABSENT,
        "partial_max": Pointer("partial_max") if split else ABSENT,
        "partial_sum": Pointer("partial_sum") if split else ABSENT,
        **scalar_arguments(call),
        "max_chunks": _count(chunks),
    }
    if max_query == 1:
        # A single query row stands at the last key: nothing is to its right.
        arguments["window_right"] = ABSENT
        arguments["seq_causal"] = ABSENT
    constexprs = {
        **_common_constexprs(call),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages,
        "PREFETCH": tile.prefetch,
        "CHUNK": chunk,
        "MAX_QUERY": max_query,
        "PACK": pack,
        "NUM_KV_HEADS": call.num_kv_heads,
        "ZERO_PADDING": zero_padding,
        "PAIRS": _reads_pairs(call, tile),
    }
    writes = ("out", *(("lse",) if call.with_lse else ()), *(_PARTIALS if split else ()))
    return _launch(
        attention_split_kernel, (items * head_programs,), arguments, constexprs, writes, tile, hot=_is_hot(call)
    )


def combine_launch(call: AttentionCall, *, chunk: int, max_query: int) -> LaunchPlan:
    """Plans attention_combine_kernel after a split launch with more than one chunk."""
    chunks = max_chunks(call, chunk, max_query)
    common = _common_arguments(call)
    scalars = scalar_arguments(call)
    arguments = {
        **{name: common[name] for name in ("seq_lens", "query_start_loc", "sinks", "v_scale", "out_scale")},
        "partial_out": Pointer("partial_out"),
        "partial_max": Pointer("partial_max"),
        "partial_sum": Pointer("partial_sum"),
        **_output_arguments(call),
        **{name: scalars[name] for name in ("table_tokens", "out_factor", "window_left", "attention_chunk")},
        "max_chunks": _count(chunks),
    }
    common_constexprs = _common_constexprs(call)
    names = ("VALUE_SIZE", "VALUE_PADDED", "OUT_LIMIT", "EXACT", "OUT_STRIDES", "LSE_STRIDES")
    constexprs = {
        "BLOCK_CHUNKS": min(_COMBINE_CHUNKS, power_of_two(chunks)),
        "CHUNK": chunk,
        "MAX_QUERY": max_query,
        "NUM_HEADS": call.num_heads,
        **{name: common_constexprs[name] for name in names},
    }
    return _launch(
        attention_combine_kernel,
        (call.num_seqs * max_query, call.num_heads),
        arguments,
        constexprs,
        ("out", "lse") if call.with_lse else ("out",),
        # One warp holds the chunks of a row: its sums need no exchange through shared memory.
        RowsTile(1, 1, 1, 1 if call.value_padded <= 128 else 2),
        hot=True,
    )


def max_chunks(call: AttentionCall, chunk: int, max_query: int) -> int:
    """Returns how many chunks one sequence can have, from the table's width and the static window."""
    tokens = call.table_tokens
    chunks = ceil_div(tokens, chunk)
    seen = [size for size in (call.spec.window_left, call.spec.attention_chunk) if size is not None]
    if seen:
        chunks = min(chunks, ceil_div(min(seen) + max_query, chunk) + 1)
    return max(1, chunks)


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Argument],
    constexprs: dict[str, Any],
    writes: tuple[str, ...],
    tile: RowsTile | SplitTile,
    *,
    hot: bool,
) -> LaunchPlan:
    return LaunchPlan(
        kernel=kernel,
        grid=grid,
        arguments=tuple((name, arguments[name]) for name in kernel.arg_names if name in arguments),
        constexprs=tuple((name, constexprs[name]) for name in kernel.arg_names if name in constexprs),
        writes=writes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=getattr(tile, "maxnreg", None),
        hot=hot,
    )


def _reads_pairs(call: AttentionCall, tile: SplitTile) -> bool:
    """8-bit keys and values are read two at a time, but not into tall tiles, which multiply from shared memory."""
    sizes = (call.key.shape[-1], call.value.shape[-1], call.value_offset)
    strides = (*call.key.element_strides[:-1], *call.value.element_strides[:-1])
    return (
        DTYPE_BYTES[call.key.dtype] == 1
        and call.query.dtype != "float32"
        and tile.block_m < 64
        and min(call.head_padded, call.value_padded) >= 32
        and call.key.aligned
        and call.value.aligned
        and not any(number % 2 for number in (*sizes, *strides))
    )


def _pointer(name: str, spec: ArraySpec | None) -> Argument:
    return ABSENT if spec is None else Pointer(name)


def _common_arguments(call: AttentionCall) -> dict[str, Argument]:
    key, value = call.buffers
    return {
        "query": Pointer("query"),
        "key_cache": Pointer(key),
        "value_cache": Pointer(value),
        "block_tables": _pointer("block_tables", call.block_tables),
        "seq_lens": _pointer("seq_lens", call.seq_lens),
        "query_start_loc": Pointer("query_start_loc"),
        "alibi_slopes": _pointer("alibi_slopes", call.alibi_slopes),
        "sinks": _pointer("sinks", call.sinks),
        "q_scale": scale_pointer("q_scale", call.q_scale),
        "k_scale": scale_pointer("k_scale", call.k_scale),
        "v_scale": scale_pointer("v_scale", call.v_scale),
        "k_scale_cache": _pointer("k_scale_cache", call.key_scales),
        "v_scale_cache": _pointer("v_scale_cache", call.value_scales),
        "qq_bias": _pointer("qq_bias", call.qq_bias),
        "seq_causal": _pointer("seq_causal", call.seq_causal),
        "out_scale": scale_pointer("out_scale", call.out_scale),
    }


def _output_arguments(call: AttentionCall) -> dict[str, Argument]:
    return {"out": Pointer("out"), "lse": Pointer("lse") if call.with_lse else ABSENT}


def scalar_arguments(call: AttentionCall) -> dict[str, Argument]:
    """Returns the by-value arguments of all attention kernels, by parameter name."""
    spec = call.spec
    right = spec.window_right
    if call.seq_causal is not None:
        right = _NO_BOUND if right is None else right
    elif spec.causal:
        right = 0
    out_factor = _number(call.v_scale) / _number(call.out_scale)
    table_stride = 0 if call.block_tables is None else call.block_tables.element_strides[0]
    return {
        "num_tokens": _count(call.num_tokens),
        "num_seqs": _count(call.num_seqs),
        "table_stride": _count(table_stride),
        "table_tokens": _count(min(call.table_tokens, _NO_BOUND)),
        "scale": Scalar(abs(spec.scale) * _number(call.q_scale) * _number(call.k_scale), "fp32"),
        "out_factor": Scalar(out_factor, "fp32"),
        "soft_cap": ABSENT if spec.logits_soft_cap is None else Scalar(spec.logits_soft_cap, "fp32"),
        "window_left": _bound(spec.window_left),
        "window_right": _bound(right),
        "attention_chunk": _bound(spec.attention_chunk),
        "qq_bias_size": ABSENT if call.qq_bias is None else _count(call.qq_bias.shape[0]),
    }


def _common_constexprs(call: AttentionCall) -> dict[str, Any]:
    # A dense array has no blocks: its strides are those of (nothing, token, head).
    key_strides = call.key.element_strides[:-1] if call.paged else (0, *call.key.element_strides[:-1])
    value_strides = call.value.element_strides[:-1] if call.paged else (0, *call.value.element_strides[:-1])
    return {
        "BLOCK_SEQS": next((size for size in _BLOCK_SEQS if size >= call.num_seqs), _BLOCK_SEQS[-1]),
        "GROUP": call.group,
        "HEAD_SIZE": call.key.shape[-1],
        "HEAD_PADDED": call.head_padded,
        "VALUE_SIZE": call.value.shape[-1],
        "VALUE_PADDED": call.value_padded,
        "BLOCK_SIZE": call.block_size,
        "ALIBI_SQRT": call.spec.use_alibi_sqrt,
        "NEGATE": call.spec.scale < 0,
        "EXACT": call.query.dtype == "float32",
        "OUT_LIMIT": OUTPUT_LIMITS.get(call.out.dtype, 0.0),
        "QUERY_STRIDES": call.query.element_strides[:2],
        "KEY_STRIDES": key_strides,
        "VALUE_STRIDES": value_strides,
        "VALUE_OFFSET": call.value_offset,
        "OUT_STRIDES": call.out.element_strides[:2],
        "LSE_STRIDES": (call.num_heads, 1),
        "SCALE_STRIDES": (0, 0, 0) if call.key_scales is None else call.key_scales.element_strides,
    }


def _count(value: int) -> Scalar:
    return Scalar(value, "i32", specialize=False)


def _bound(value: int | None) -> Argument:
    return ABSENT if value is None else _count(min(value, _NO_BOUND))


def _number(scale: ScaleSpec) -> float:
    return float(scale) if isinstance(scale, (int, float)) else 1.0


def _is_hot(call: AttentionCall) -> bool:
    """The variants that serve most models: a spill there is an error."""
    return call.plain and call.query.dtype != "float32" and call.head_padded <= 128
