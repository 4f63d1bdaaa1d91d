"""What the plans of the gated delta rule and of its derivative share: the systems of chunks, arguments, scratch."""

from __future__ import annotations

from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import block_seqs, named_launch, power_of_two, strides
from torch_core.launch.plan import ABSENT, Argument, LaunchPlan, Pointer, Scalar
from torch_core.state.delta_call import L2NORM_EPSILON, GatedDeltaCall
from torch_core.state.kernels.delta.channels import (
    gated_delta_channels_kernel,
    gated_delta_far_pairs_kernel,
    gated_delta_near_pairs_kernel,
)
from torch_core.state.kernels.delta.systems import gated_delta_inverses_kernel, gated_delta_overlaps_kernel

#: Tokens of a chunk.
CHUNK = 64
#: Matrix units take 16 rows and columns and more.
LEAST_TILE = 16
#: Keys of this size and smaller leave registers for 16 rows of a state in each warp, and for segments.
SMALL_KEY = 128
_PADDED_ROWS = 16
_BLOCK_K = 32
# The arrays that only gates of channels need.
_BY_CHANNEL = ("reads", "queries", "adds", "through")


def system_launches(
    call: GatedDeltaCall[ArraySpec], arguments: dict[str, Argument], constexprs: dict[str, Any]
) -> list[LaunchPlan]:
    """Returns the launches that find and invert the systems of all chunks."""
    chunks, heads = chunk_tiles(call, 1), call.num_heads
    is_small = constexprs["KEY_PADDED"] <= SMALL_KEY
    # The parts of float32's products spill.
    once: dict[str, Any] = {"num_stages": 1, "hot": is_small and call.key.dtype != "float32"}

    def launch(kernel: Any, grid: tuple[int, ...], *writes: str, **options: Any) -> LaunchPlan:
        return named_launch(kernel, grid, arguments, constexprs, writes=writes, **once, **options)

    is_derivative = arguments["lowers"] is not ABSENT
    lowers = ("lowers",) if is_derivative else ()
    norms = ("norms",) if is_derivative else ()
    growths = () if arguments["growths"] is ABSENT else ("growths",)
    if call.gk is None:
        registers = 128 if call.num_kv_heads == heads and is_small and not is_derivative else None
        written = ("overlaps", "products", "factors", "decays", *lowers, *norms, *growths)
        launches = [launch(gated_delta_overlaps_kernel, (chunks * call.num_kv_heads,), *written, maxnreg=registers)]
    else:
        written, pairs = ("factors", "decays", *_BY_CHANNEL), ("overlaps", "products", *lowers)
        launches = [
            launch(gated_delta_channels_kernel, (chunks, heads), *written, num_warps=8),
            # A warp for 16 tokens needs no barrier.
            launch(gated_delta_near_pairs_kernel, (chunks, heads, CHUNK // 16), *pairs, num_warps=1),
            launch(gated_delta_far_pairs_kernel, (chunks, heads), *pairs),
        ]
    if call.key.dtype != "float32":
        # Not "tf32", which has few digits more than bfloat16; "tf32x3" takes twice as long.
        constexprs = {**constexprs, "PRECISION": "parts"}
    # A warp for each chunk: its blocks of 16 then need no barrier.
    return [*launches, launch(gated_delta_inverses_kernel, (chunks, heads), "inverses", num_warps=1)]


def chunk_tiles(call: GatedDeltaCall[ArraySpec], chunks: int) -> int:
    """Returns a bound of the number of tiles of some chunks."""
    return call.num_tokens // (chunks * CHUNK) + call.num_seqs


def constexprs_of(call: GatedDeltaCall[ArraySpec], least: int) -> dict[str, Any]:
    """Returns the compile-time parameters of all kernels; `least` is the smallest padded size."""
    group = call.num_heads // call.num_kv_heads
    keys = max(least, power_of_two(call.key.shape[2]))
    return {
        "NUM_HEADS": call.num_heads,
        "GROUP": group,
        "GROUP_PADDED": power_of_two(group),
        "KEY_SIZE": call.key.shape[2],
        "KEY_PADDED": keys,
        "VALUE_SIZE": call.value.shape[2],
        "VALUE_PADDED": max(least, power_of_two(call.value.shape[2])),
        "NORMALIZE": call.use_qk_l2norm_in_kernel,
        "BLOCK_SEQS": block_seqs(call.num_seqs),
        "BLOCK_T": _PADDED_ROWS,
        "BLOCK_K": min(_BLOCK_K, keys),
        "CHUNK": CHUNK,
        # Errors of a product are then small beside a rounding to the operands' type.
        "PRECISION": "tf32" if call.key.dtype == "bfloat16" else "tf32x3",
    }


def scratch_of(call: GatedDeltaCall[ArraySpec], segment: int | None) -> dict[str, ArraySpec]:
    """Returns the scratch of the systems, and of segments of that many chunks."""
    chunks, dtype, key_size = (chunk_tiles(call, 1), call.num_heads), call.key.dtype, call.key.shape[2]
    # Without gates of channels, the systems of a key's heads differ by factors alone.
    systems = (chunks[0], call.num_kv_heads) if call.gk is None else chunks
    scratch = {
        "overlaps": ArraySpec((*systems, CHUNK, CHUNK), "float32"),
        "inverses": ArraySpec((*chunks, CHUNK, CHUNK), dtype),
        "products": ArraySpec((*chunks, CHUNK, CHUNK), dtype),
        "factors": ArraySpec((*chunks, 5, CHUNK), "float32"),
    }
    # See `decay_sums`.
    sums = CHUNK * (2 if dtype == "float32" else 1)
    if call.gk is None:
        scratch["decays"] = ArraySpec((*chunks, sums), "float32")
    else:
        scratch["decays"] = ArraySpec((*chunks, sums, key_size), "float32")
        scratch |= {name: ArraySpec((*chunks, CHUNK, key_size), dtype) for name in _BY_CHANNEL[:3]}
        scratch["through"] = ArraySpec((*chunks, key_size), "float32")
    if segment is not None:
        sizes = constexprs_of(call, LEAST_TILE)
        keys, values = sizes["KEY_PADDED"], sizes["VALUE_PADDED"]
        segments = (chunk_tiles(call, segment), call.num_heads)
        scratch["summaries"] = ArraySpec((*segments, values + keys, keys), "float32")
        if call.g is not None:
            scratch |= {"growths": ArraySpec(chunks, "float32"), "kept": ArraySpec(segments, "int32")}
    return scratch


def arguments_of(
    call: GatedDeltaCall[ArraySpec], arrays: dict[str, ArraySpec], made: dict[str, ArraySpec]
) -> dict[str, Argument]:
    """Returns the arguments by name; `made` are the buffers that the launches write, besides the states."""
    absent = ArraySpec((1, 1, 1, 1), "float32")
    slots = ("cache_indices", "has_initial_state", "num_kept_tokens", "states")
    optional = ("g", "gk", *slots, "summaries", "kept", "growths", "lowers", "norms", *_BY_CHANNEL)
    return {
        **dict.fromkeys(optional, ABSENT),
        **{name: Pointer(name) for name in (*arrays, *made)},
        "num_tokens": Scalar(call.num_tokens, "i32", specialize=False),
        "num_seqs": Scalar(call.num_seqs, "i32", specialize=False),
        "num_states": Scalar(0 if call.states is None else call.states.shape[0], "i32", specialize=False),
        "scale": Scalar(call.scale, "fp32"),
        "epsilon": Scalar(L2NORM_EPSILON, "fp32"),
        **strides("query", ("token", "head"), call.query),
        **strides("key", ("token", "head"), call.key),
        **strides("value", ("token", "head"), call.value),
        **strides("beta", ("token",), call.beta),
        **strides("g", ("token",), arrays.get("g", absent)),
        **strides("gk", ("token", "head"), arrays.get("gk", absent)),
        **strides("states", ("slot", "head", "row"), arrays.get("states", absent)),
        **strides("out", ("token", "head"), made.get("out", absent)),
    }
