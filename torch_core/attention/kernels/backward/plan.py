"""The launches of the portable backward pass: from shapes, dtypes and options alone."""

from __future__ import annotations

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.kernels.backward.kernel import (
    backward_keys_kernel,
    backward_queries_kernel,
)
from torch_core.attention.kernels.backward.tiles import keys_tile, queries_tile
from torch_core.attention.operands import cache_constexprs, count, make_launch, operation
from torch_core.attention.partials import sum_parts_launch
from torch_core.attention.portable import Tile, block_seqs
from torch_core.base.specs import DTYPE_BYTES, ArraySpec
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, LaunchPlan, OperationPlan, Pointer

# Gradients with one number for each head, and the scratch of their parts.
_PARTS = {"d_alibi_slopes": "slope_parts", "d_sinks": "sink_parts"}


def backward_plan(
    call: DenseBackwardCall[ArraySpec],
    limits: DeviceLimits,
    *,
    queries: Tile | None = None,
    keys: Tile | None = None,
) -> OperationPlan:
    """Plans the gradients of a checked call that is not empty: queries, then keys and values, then slopes and sinks.

    `queries` and `keys` are tiles of the two kernels in place of the tables', for measurements.
    """
    constexprs = cache_constexprs(call)
    shape = {
        "head_padded": max(constexprs["HEAD_PADDED"], constexprs["VALUE_PADDED"]),
        "element_bytes": DTYPE_BYTES[call.query.dtype],
        "max_len": call.max_query_len,
        "shared_memory": limits.shared_memory,
        "drops": call.drops,
    }
    queries, keys = queries or queries_tile(**shape), keys or keys_tile(**shape)
    arrays, outputs = call.arrays(), call.outputs()
    constexprs |= {
        "BLOCK_SEQS": block_seqs(call.num_seqs),
        "NUM_RANGES": 0 if call.mm_prefix_range is None else call.mm_prefix_range.shape[1],
        **{
            f"{name.upper()}_STRIDES": spec.element_strides[:2]
            for name, spec in {**arrays, **outputs}.items()
            if len(spec.shape) > 1
        },
    }
    constexprs.setdefault("D_LSE_STRIDES", (0, 0))
    tiles = call.num_tokens // queries.block_m + call.num_seqs + 1
    rows = ArraySpec((call.num_heads, call.num_tokens), "float32")
    parts = {part: ArraySpec((call.num_heads, tiles), "float32") for name, part in _PARTS.items() if name in outputs}
    scratch = {"delta": rows, "row_lse": rows, **parts}
    arguments: dict[str, Argument] = {
        **dict.fromkeys(_PARTS.values(), ABSENT),
        **{name: Pointer(name) for name in (*arrays, *outputs, *scratch)},
        "num_key_rows": count(call.key.shape[0]),
    }

    def launch(kernel: object, tile: Tile, grid: tuple[int, int], writes: tuple[str, ...]) -> LaunchPlan:
        known = {**constexprs, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.num_stages}
        return make_launch(
            kernel,
            call,
            grid,
            known,
            arguments=arguments,
            writes=writes,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    key_tiles = call.key.shape[0] // keys.block_n + call.num_seqs + 1
    launches = [
        launch(backward_queries_kernel, queries, (tiles, call.num_heads), ("d_query", *scratch)),
        launch(backward_keys_kernel, keys, (key_tiles, call.num_kv_heads), ("d_key", "d_value")),
    ]
    launches += [sum_parts_launch(call, name, part, tiles) for name, part in _PARTS.items() if name in outputs]
    return operation(call, tuple(launches), tuple(scratch.items()))
