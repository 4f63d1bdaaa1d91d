"""A layer's step if devices share the cache of its key/value heads: writes its tokens, then attends to all."""

from __future__ import annotations

from typing import Any

import jax

from jattn.metadata import AttentionMetadata
from jattn.ops.attention import paged_call
from jattn.parallel.decode import paged_attention, write_kv_cache
from torch_core.cache_writes.call import WriteCall


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
        metadata: metadata of the step, built for blocks of all devices' tokens together; the same on all.
        axis_name: the mesh axis.
        group_size: number of neighbours on the axis over which sequences are spread; None for all.
        k_scale, v_scale: dequantisation scales of a quantised cache.
        implementation: as in `jattn.ops.run`.
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
    return paged_attention(call, axis_name, new=new, split_heads=True, **place)["out"], kv_cache
