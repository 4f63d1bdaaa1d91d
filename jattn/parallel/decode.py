"""Decode context parallelism: the keys of each sequence are distributed over devices, and their results are merged.

Blocks are shared: of a block of `block_size * devices` tokens each device keeps `block_size` in its own block of that
id (`torch_core.metadata.context_parallel`). Build a step's metadata with that large block size; it is the same
everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jattn import ops
from jattn.metadata import AttentionMetadata
from jattn.ops.attention import paged_call
from jattn.parallel.all_reduce import exchange, merge_attention
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.context_parallel import among_call, context_call, local_call, merge_parts
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput
from torch_core.cache_writes.call import WriteCall
from torch_core.launch.call import array_fields
from torch_core.metadata import get_dcp_local_slots


def write_kv_cache(
    call: WriteCall[jax.Array],
    axis_name: str,
    *,
    interleave_size: int = 1,
    group_size: int | None = None,
    implementation: str | None = None,
) -> dict[str, jax.Array]:
    """Writes this device's share of a step's keys and values; runs inside `jax.shard_map`.

    Args:
        call: call with all new tokens and this device's cache; its slots refer to blocks of all devices' tokens
            together.
        axis_name: the mesh axis over which sequences are spread.
        interleave_size: number of consecutive tokens on one device; it must divide the block size.
        group_size: number of neighbours on the axis that share a cache; None for the whole axis.
        implementation: as in `jattn.ops.run`.

    Returns:
        The new values of the arrays that the call writes, by name.

    Raises:
        InvalidInput: the call is inconsistent, runs do not fill blocks, or groups do not fill the axis.
    """
    place = _place(axis_name, interleave_size, group_size)
    slots = get_dcp_local_slots(jnp.asarray(call.slot_mapping), block_size=call.block_size, **place)
    return ops.run(replace(call, slot_mapping=slots), implementation)


def paged_attention(
    call: PagedCall[jax.Array],
    axis_name: str,
    *,
    interleave_size: int = 1,
    new: tuple[jax.Array, jax.Array] | None = None,
    split_heads: bool = False,
    group_size: int | None = None,
    peers: jax.Array | None = None,
    implementation: str | None = None,
) -> dict[str, jax.Array]:
    """Attends to sequences whose tokens are spread over a mesh axis; runs inside `jax.shard_map`.

    With whole heads one all-gather moves each device's output and lse to all others. With split heads, as in tensor
    parallelism, queries are gathered, and one all-to-all sends each head's parts to the device of the head. This sends
    the fewest bytes (1 / devices of them), and the result has the layout of the output projection.

    Args:
        call: call of the whole sequences (the same tables, lengths and offsets on all devices) and this device's cache.
        axis_name, interleave_size, implementation: as in `write_kv_cache`.
        new: keys and values of the step's tokens, float[num_tokens, num_kv_heads, head_size]. The new tokens of a
            sequence attend to each other through these, and to the cache as one row of queries: use this for prompts
            and chunks. None reads all keys from the cache, token by token: use this for decode and for few tokens.
        split_heads: query and output have only this device's heads, in the order of devices.
        group_size: as in `write_kv_cache`; every group has its own sequences, or its own heads of the same sequences.
        peers: as in `jattn.parallel.all_reduce`: kernels gather small queries and merge small results, unless there are
            groups. They have no derivative, and must depend on the other sums and exchanges of the program.

    Returns:
        `out` and `lse`, of every head or of this device's; equal bit by bit on all devices if they are whole.

    Raises:
        InvalidInput: the call is inconsistent, or groups do not fill the axis.
        Unsupported: a mask that one device's share does not determine; see `torch_core.attention.context_parallel`.
    """
    place = _place(axis_name, interleave_size, group_size)
    groups = _groups(axis_name, group_size)
    whole = call
    if split_heads:
        axes = {
            name: field.dims.index("num_heads")
            for name, field in array_fields(type(call)).items()
            if "num_heads" in field.dims
        }
        # Sinks come in where parts are merged, and where the result goes is every device's own matter.
        gathered = {
            # Kernels move the queries alone, since two exchanges that do not depend on each other use the same memory.
            name: _gathered(jnp.asarray(x), axis_name, axes[name], groups, peers if name == "query" else None)
            for name, x in call.arrays().items()
            if name in axes and name not in ("sinks", *call.written)
        }
        whole = replace(call, **gathered)
    if new is None:
        local, lse_more = local_call(whole, **place, library=jnp)
    else:
        local, lse_more = context_call(whole, **place, library=jnp), None
    found = ops.run(local, implementation)
    lse = found["lse"] if lse_more is None else found["lse"] + lse_more
    # The new tokens have the sinks, if they are apart.
    sinks = call.sinks if new is None else None
    merging: dict[str, Any] = {"sinks": sinks, "split_heads": split_heads, "group_size": group_size, "peers": peers}
    dtype = call.result_dtype if new is None else jnp.float32
    out, lse = merge_over_axis(found["out"], lse, axis_name, out_dtype=dtype, **merging)
    if new is not None:
        among = ops.run(_among(call, new, place if split_heads else None), implementation)
        out, lse = merge_parts(jnp.stack([out, among["out"]]), jnp.stack([lse, among["lse"]]), library=jnp)
    return {"out": out.astype(call.result_dtype), "lse": lse}


def attend_spread(
    query: jax.Array,
    key: jax.Array | None,
    value: jax.Array | None,
    kv_cache: jax.Array,
    metadata: AttentionMetadata,
    axis_name: str,
    *,
    group_size: int | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    implementation: str | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """The counterpart of `jattn.nn.PagedAttention` for spread sequences; runs inside `jax.shard_map`.

    Args:
        query: float[num_tokens, num_heads, head_size], queries of this device's heads, in the order of devices.
        key, value: float[num_tokens, num_kv_heads, head_size], of the key/value heads of the group's queries; None to
            read a complete cache.
        kv_cache: this device's share of the cache; consumed.
        metadata: metadata of the step, built for blocks of all devices' tokens together; the same on all, but for
            `peers`, see `paged_attention`.
        axis_name, group_size, implementation: as in `paged_attention`.
        k_scale, v_scale: dequantisation scales of a quantised cache.
        **options: further options of `jattn.paged_attention`.

    Returns:
        The output of this device's heads, and its cache with the new tokens.

    Raises:
        InvalidInput: shapes do not fit.
        Unsupported: a mask that one device's share does not determine; see `torch_core.attention.context_parallel`.
    """
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    place: dict[str, Any] = {"group_size": group_size, "implementation": implementation}
    new = None
    if key is not None and value is not None:
        write = WriteCall(key=key, value=value, kv_cache=kv_cache, slot_mapping=metadata.slot_mapping, **scales)
        kv_cache, new = write_kv_cache(write, axis_name, **place)["kv_cache"], (key, value)
    call = paged_call(query, kv_cache, **metadata.sequences, **scales, **options)
    # If a mask differs from token to token, each token reads the cache by itself; and an 8-bit cache also rounds the
    # keys of the same step's tokens.
    is_rounded = kv_cache.dtype.itemsize == 1
    if metadata.max_query_len == 1 or call.sees_distances or is_rounded:
        new = None
    found = paged_attention(call, axis_name, new=new, split_heads=True, peers=metadata.peers, **place)
    return found["out"], kv_cache


def merge_over_axis(
    out: jax.Array,
    lse: jax.Array,
    axis_name: str,
    *,
    sinks: jax.Array | None = None,
    split_heads: bool = False,
    group_size: int | None = None,
    peers: jax.Array | None = None,
    out_dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Merges attention to disjoint keys over a mesh axis: by one kernel, or one collective with one message.

    Args:
        out: float[num_tokens, num_heads, head_size], the result over each device's keys.
        lse: float32[num_tokens, num_heads]; -inf if a device saw nothing.
        axis_name: the mesh axis.
        sinks: float[num_heads], sinks of the resulting heads.
        split_heads: each device keeps its part of the heads (all-to-all) instead of all heads (all-gather).
        group_size, peers: as in `paged_attention`.
        out_dtype: dtype of the resulting output.

    Returns:
        The output and float32 lse.

    Raises:
        InvalidInput: heads that the axis does not divide.
    """
    size, world = out.shape[-1], group_size or jax.lax.axis_size(axis_name)
    groups = _groups(axis_name, group_size)
    num_heads, rest = divmod(out.shape[1], world if split_heads else 1)
    if rest:
        wanted = f"{world} devices split them, so it must be a multiple"
        raise InvalidInput("out", f"has {out.shape[1]} heads", wanted)
    if peers is not None and groups is None:
        result: dict[str, Any] = {"sinks": sinks, "num_heads": num_heads, "out_dtype": out_dtype}
        merged = merge_attention(out, lse, axis_name, peers, **result)
        if merged is not None:
            return merged
    # As integers: bit patterns that are NaNs must not be normalised on the way.
    unit = f"uint{8 * out.dtype.itemsize}"
    bits = [jax.lax.bitcast_convert_type(x, unit).reshape(*x.shape[:2], -1) for x in (out, lse)]
    message = jnp.concatenate(bits, -1)
    if split_heads:
        message = message.reshape(out.shape[0], world, num_heads, message.shape[-1])
        message = jax.lax.all_to_all(message, axis_name, split_axis=1, concat_axis=0, axis_index_groups=groups)
    else:
        message = jax.lax.all_gather(message, axis_name, axis_index_groups=groups)
    outs = jax.lax.bitcast_convert_type(message[..., :size], out.dtype)
    words = message[..., size:]
    lses = jax.lax.bitcast_convert_type(words[..., 0] if words.shape[-1] == 1 else words, lse.dtype)
    whole, total = merge_parts(outs, lses, sinks, library=jnp)
    return whole.astype(out_dtype), total


def _gathered(
    x: jax.Array, axis_name: str, axis: int, groups: list[list[int]] | None, peers: jax.Array | None
) -> jax.Array:
    """Returns the parts of all devices, or of the group's, one behind the other along an axis."""
    if peers is None or groups is not None:
        return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True, axis_index_groups=groups)
    parts = jnp.moveaxis(exchange(x[None], axis_name, peers), 0, axis)
    return parts.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def _among(
    call: PagedCall[jax.Array], new: tuple[jax.Array, jax.Array], place: dict[str, Any] | None
) -> DenseCall[jax.Array]:
    """Returns the attention of the new tokens to each other, of the heads at a place or of all."""
    if place is not None:
        # The key/value heads of this device's query heads.
        world, kv_heads = place["dcp_world_size"], call.num_kv_heads
        if kv_heads % world and world % kv_heads:
            problem = f"has {kv_heads} key/value heads and {world} devices split the query heads"
            wanted = "one must be a multiple of the other. Pass new=None, or whole heads"
            raise InvalidInput("new", problem, wanted)
        first, count = place["dcp_rank"] * kv_heads // world, max(1, kv_heads // world)
        new = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count, 1), new)
    return among_call(call, *new)


def _place(axis_name: str, interleave_size: int, group_size: int | None) -> dict[str, Any]:
    rank, world = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    if group_size is None:
        return {"dcp_world_size": world, "dcp_rank": rank, "interleave_size": interleave_size}
    check_int("group_size", group_size, 1)
    if world % group_size:
        wanted = f"it must divide the {world} devices of axis {axis_name!r}, or be None for all"
        raise InvalidInput("group_size", value=group_size, wanted=wanted)
    return {"dcp_world_size": group_size, "dcp_rank": rank % group_size, "interleave_size": interleave_size}


def _groups(axis_name: str, group_size: int | None) -> list[list[int]] | None:
    """Returns the neighbours that talk to each other, as `jax.lax` takes them; None for all."""
    world = jax.lax.axis_size(axis_name)
    if group_size in (None, world):
        return None
    return [list(range(first, first + group_size)) for first in range(0, world, group_size)]
