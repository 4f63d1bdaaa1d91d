"""The launches of the portable backward pass and their tiles, measured on an H200; from shapes and options alone."""

from __future__ import annotations

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.kernels.backward.kernel import backward_keys_kernel, backward_queries_kernel
from torch_core.attention.operands import cache_constexprs, count, make_launch, operation, padded
from torch_core.attention.partials import sum_parts_launch
from torch_core.attention.portable import Tile
from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import block_seqs
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, LaunchPlan, OperationPlan, Pointer

# Gradients with one number for each head, and the scratch of their parts.
_PARTS = {"d_alibi_slopes": "slope_parts", "d_sinks": "sink_parts"}
# Shared memory of an A100's thread block; smaller devices take smaller tiles.
_LARGE_SHARED_MEMORY = 160 * 1024
# Up to this length two small programs that share a multiprocessor lose less at the edges than a large one.
_SHORT_LEN = 4096


def backward_plan(
    call: DenseBackwardCall[ArraySpec], limits: DeviceLimits, *, queries: Tile | None = None, keys: Tile | None = None
) -> OperationPlan:
    """Plans the gradients of a checked call that is not empty: queries, then keys and values, then slopes and sinks.

    `queries` and `keys` are tiles of the two kernels in place of the tables', for measurements.
    """
    constexprs = cache_constexprs(call)
    queries, keys = queries or _queries_tile(call, limits), keys or _keys_tile(call, limits)
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
            kernel, call, grid, known, arguments=arguments, writes=writes, num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip

    key_tiles = call.key.shape[0] // keys.block_n + call.num_seqs + 1
    launches = [
        launch(backward_queries_kernel, queries, (tiles, call.num_heads), ("d_query", *scratch)),
        launch(backward_keys_kernel, keys, (key_tiles, call.num_kv_heads), ("d_key", "d_value")),
    ]
    launches += [sum_parts_launch(call, name, part, tiles) for name, part in _PARTS.items() if name in outputs]
    return operation(call, tuple(launches), tuple(scratch.items()))


def _queries_tile(call: DenseBackwardCall[ArraySpec], limits: DeviceLimits) -> Tile:
    head_padded, small = _shape(call, limits)
    if call.query.dtype == "float32":
        return Tile(32, 32, 1, 4) if head_padded <= 64 else Tile(16, 16, 1, 4 if head_padded <= 256 else 8)
    if head_padded > 256:
        return Tile(16 if small else 32, 32, 1, 8)
    if head_padded > 128:
        return Tile(64, 32, 1, 4) if small else Tile(128, 32, 2, 8)
    if head_padded <= 64:
        return Tile(64, 64, 3, 4)
    # Weights are dropped by a generator, whose registers large tiles do not have.
    if small or call.drops or call.max_query_len <= _SHORT_LEN:
        return Tile(64, 32, 2 if small else 3, 4)
    return Tile(128, 64, 3, 8)


def _keys_tile(call: DenseBackwardCall[ArraySpec], limits: DeviceLimits) -> Tile:
    head_padded, small = _shape(call, limits)
    if call.query.dtype == "float32":
        return Tile(32, 32, 1, 4) if head_padded <= 64 else Tile(16, 16, 1, 4 if head_padded <= 256 else 8)
    if head_padded > 256:
        return Tile(16 if small else 32, 16, 1, 8)
    if head_padded > 128:
        return Tile(32, 32, 1, 4) if small else Tile(64, 64, 2, 8)
    if head_padded <= 64 and not call.drops:
        return Tile(64, 64, 3, 4)
    if small or call.drops or call.max_query_len <= _SHORT_LEN:
        return Tile(32, 64, 2 if small else 3, 4)
    return Tile(64, 128, 3, 8)


def _shape(call: DenseBackwardCall[ArraySpec], limits: DeviceLimits) -> tuple[int, bool]:
    """Returns the larger padded head size of key and value, and whether a thread block has little shared memory."""
    head_padded = max(padded(call.head_size), padded(call.value_head_size))
    return head_padded, limits.shared_memory < _LARGE_SHARED_MEMORY
