"""The torch core's plans as ops of a JAX program: as native custom calls, implementation="triton", unless told else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp

from jattn.bridge.native import array_spec, call_operation, device_limits
from torch_core.plan.plan import OperationPlan
from torch_core.specs import ArraySpec, AttentionSpec

# The plan functions import Triton, so they are imported where they are used: this module must load without it.

__all__ = [
    "CallOperation",
    "attention",
    "copy_blocks",
    "merge_states",
    "paged_attention",
    "write_kv_cache",
    "write_kv_cache_per_token_head",
]


class CallOperation(Protocol):
    """What puts a plan's launches into the program: returns its outputs and in-place operands by name."""

    def __call__(self, plan: OperationPlan, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]: ...


def paged_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    alibi_slopes: jax.Array | None,
    sinks: jax.Array | None,
    k_scale_cache: jax.Array | None = None,
    v_scale_cache: jax.Array | None = None,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    with_lse: bool,
    call: CallOperation = call_operation,
) -> tuple[jax.Array, jax.Array | None]:
    """Adds the launches of `torch_core.plan.attention.plan_paged_attention`; lse is None unless asked for."""
    if query.shape[0] == 0 or seq_lens.shape[0] == 0:
        return _nothing(query, query.shape, with_lse)
    from torch_core.attention.choose import plan_paged_attention

    required = {
        "query": query,
        "kv_cache": kv_cache,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "query_start_loc": query_start_loc,
    }
    options = _present(
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale_cache=k_scale_cache,
        v_scale_cache=v_scale_cache,
    )
    plan = plan_paged_attention(
        *map(array_spec, required.values()),
        spec=spec,
        max_query_len=max_query_len,
        with_lse=with_lse,
        limits=device_limits(),
        **_specs(options),
    )
    results = call(plan, {**required, **options})
    return results["out"], results.get("lse")


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_start_loc: jax.Array,
    key_start_loc: jax.Array,
    alibi_slopes: jax.Array | None,
    sinks: jax.Array | None,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    max_key_len: int,
    with_lse: bool,
    call: CallOperation = call_operation,
) -> tuple[jax.Array, jax.Array | None]:
    """Adds the launches of `torch_core.plan.attention.plan_attention`; lse is None unless asked for.

    `max_key_len` is not needed: the kernels read every length on the device.
    """
    if query.shape[0] == 0 or query_start_loc.shape[0] == 1:
        return _nothing(query, (*query.shape[:2], value.shape[2]), with_lse)
    from torch_core.attention.choose import plan_attention

    required = {
        "query": query,
        "key": key,
        "value": value,
        "query_start_loc": query_start_loc,
        "key_start_loc": key_start_loc,
    }
    options = _present(alibi_slopes=alibi_slopes, sinks=sinks)
    plan = plan_attention(
        *map(array_spec, required.values()),
        spec=spec,
        max_query_len=max_query_len,
        with_lse=with_lse,
        limits=device_limits(),
        **_specs(options),
    )
    results = call(plan, {**required, **options})
    return results["out"], results.get("lse")


def write_kv_cache(
    key: jax.Array,
    value: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    call: CallOperation = call_operation,
) -> jax.Array:
    """Adds the launch of `torch_core.plan.write.plan_write_kv_cache`; the result is the same memory."""
    if slot_mapping.shape[0] == 0:
        return kv_cache
    from torch_core.blocks.write.plan import plan_write_kv_cache

    arrays = {"key": key, "value": value, "kv_cache": kv_cache, "slot_mapping": slot_mapping}
    scales = _present(k_scale=k_scale, v_scale=v_scale)
    plan = plan_write_kv_cache(*map(array_spec, arrays.values()), **_specs(scales))
    return call(plan, {**arrays, **scales})["kv_cache"]


def write_kv_cache_per_token_head(
    key: jax.Array,
    value: jax.Array,
    kv_cache: jax.Array,
    k_scale_cache: jax.Array,
    v_scale_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    call: CallOperation = call_operation,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the launch of `torch_core.plan.write.plan_write_kv_cache_per_token_head`, in place in all three caches."""
    if slot_mapping.shape[0] == 0:
        return kv_cache, k_scale_cache, v_scale_cache
    from torch_core.blocks.write.plan import plan_write_kv_cache_per_token_head

    arrays = {
        "key": key,
        "value": value,
        "kv_cache": kv_cache,
        "k_scale_cache": k_scale_cache,
        "v_scale_cache": v_scale_cache,
        "slot_mapping": slot_mapping,
    }
    results = call(plan_write_kv_cache_per_token_head(*map(array_spec, arrays.values())), arrays)
    return results["kv_cache"], results["k_scale_cache"], results["v_scale_cache"]


def copy_blocks(kv_cache: jax.Array, block_mapping: jax.Array, *, call: CallOperation = call_operation) -> jax.Array:
    """Adds the launch of `torch_core.plan.copy.plan_copy_blocks`; the result is the same memory."""
    if block_mapping.shape[0] == 0:
        return kv_cache
    from torch_core.blocks.copy.plan import plan_copy_blocks

    plan = plan_copy_blocks(array_spec(kv_cache), array_spec(block_mapping))
    return call(plan, {"kv_cache": kv_cache, "block_mapping": block_mapping})["kv_cache"]


def merge_states(
    out_a: jax.Array,
    lse_a: jax.Array,
    out_b: jax.Array,
    lse_b: jax.Array,
    *,
    call: CallOperation = call_operation,
) -> tuple[jax.Array, jax.Array]:
    """Adds the launch of `torch_core.plan.merge.plan_merge_states`."""
    if out_a.shape[0] == 0:
        return out_a, lse_a
    from torch_core.attention.merge.plan import plan_merge_states

    arrays = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    results = call(plan_merge_states(*map(array_spec, arrays.values())), arrays)
    return results["out"], results["lse"]


def _nothing(query: jax.Array, shape: tuple[int, ...], with_lse: bool) -> tuple[jax.Array, jax.Array | None]:
    return jnp.zeros(shape, query.dtype), jnp.full(shape[:2], -jnp.inf, jnp.float32) if with_lse else None


def _present(**arrays: jax.Array | None) -> dict[str, jax.Array]:
    return {name: array for name, array in arrays.items() if array is not None}


def _specs(arrays: dict[str, jax.Array]) -> dict[str, ArraySpec]:
    return {name: array_spec(array) for name, array in arrays.items()}
