"""The torch core's ops as steps of a JAX program, through the callback: implementation="torch"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jattn.bridge.callback import call_torch
from torch_core import cpu, ops
from torch_core.errors import Unsupported
from torch_core.specs import AttentionSpec

__all__ = ["attention", "merge_states", "paged_attention", "write_kv_cache", "write_kv_cache_per_token_head"]

# Below this many multiply-adds a second OpenMP thread costs more than it brings: XLA's own threads hold the cores.
# Measured with the embedded model, see "CPU threads" in the README.
_ONE_THREAD_BELOW = 1 << 24
_NO_TOKEN_SCALES = (
    "implementation='torch' has no scales per token and head (k_scale_cache, v_scale_cache) on a CPU; use "
    "implementation='xla', or scales per tensor (k_scale, v_scale)."
)


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
) -> tuple[jax.Array, jax.Array | None]:
    """Runs `torch_core.ops.paged_attention` in place of XLA's buffers; lse is None unless asked for.

    Raises:
        Unsupported: scales per token and head, which the torch core's CPU functions do not take.
    """
    if k_scale_cache is not None or v_scale_cache is not None:
        raise Unsupported(_NO_TOKEN_SCALES)
    operands = {
        "query": query,
        "kv_cache": kv_cache,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "query_start_loc": query_start_loc,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }
    work = query.size * block_tables.shape[1] * kv_cache.shape[2]
    static = (("spec", spec), ("max_query_len", max_query_len))
    return _attend("paged_attention", operands, query.shape, static, with_lse, work)


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
) -> tuple[jax.Array, jax.Array | None]:
    """Runs `torch_core.ops.attention` on XLA's buffers; lse is None unless asked for."""
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "query_start_loc": query_start_loc,
        "key_start_loc": key_start_loc,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }
    out_shape = (*query.shape[:2], value.shape[2])
    static = (("spec", spec), ("max_query_len", max_query_len), ("max_key_len", max_key_len))
    return _attend("attention", operands, out_shape, static, with_lse, query.size * max_key_len)


def write_kv_cache(
    key: jax.Array,
    value: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> jax.Array:
    """Runs `torch_core.ops.write_kv_cache` on the aliased cache: the result is the same memory."""
    operands = {
        "key": key,
        "value": value,
        "kv_cache": kv_cache,
        "slot_mapping": slot_mapping,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    names, arrays = _present(operands)
    (cache,) = call_torch(
        _Write("write_kv_cache", names),
        arrays,
        [jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype)],
        aliases={names.index("kv_cache"): 0},
        num_threads=_threads(key.size),
    )
    return cache


def write_kv_cache_per_token_head(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Refuses.

    Raises:
        Unsupported: always; the torch core's CPU functions have no scales per token and head.
    """
    raise Unsupported(_NO_TOKEN_SCALES)


def merge_states(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Runs `torch_core.ops.merge_states` on XLA's buffers."""
    out, lse = call_torch(
        _merge,
        [out_a, lse_a, out_b, lse_b],
        [jax.ShapeDtypeStruct(out_a.shape, out_a.dtype), jax.ShapeDtypeStruct(lse_a.shape, jnp.float32)],
        num_threads=_threads(out_a.size),
    )
    return out, lse


# The functions that the callback runs are frozen records, not closures: equal ones share one compiled program.
@dataclass(frozen=True, slots=True)
class _Operation:
    """One of the torch core's operations by name, with what is static."""

    name: str
    operands: tuple[str, ...]
    static: tuple[tuple[str, Any], ...] = ()

    def run(self, tensors: Sequence[torch.Tensor], **results: torch.Tensor) -> Any:
        arguments = dict(zip(self.operands, tensors, strict=False))
        arguments.update(self.static)
        arguments.update(results)
        if tensors[0].is_cuda:
            return getattr(ops, self.name)(**arguments)
        # Shapes and dtypes were checked when the program was traced, values when the metadata was built: checking
        # them again in every layer would cost a third of a decode step.
        try:
            return getattr(cpu, self.name)(**arguments)
        except Exception:
            # The checks say what was wrong with the values; where they find nothing, the failure speaks for itself.
            getattr(ops, self.name)(**arguments)
            raise


@dataclass(frozen=True, slots=True)
class _Attend(_Operation):
    def __call__(self, *tensors: torch.Tensor) -> None:
        self.run(tensors, out=tensors[-1])


@dataclass(frozen=True, slots=True)
class _AttendWithLse(_Operation):
    def __call__(self, *tensors: torch.Tensor) -> None:
        _, lse = self.run(tensors, out=tensors[-2])
        tensors[-1].copy_(lse)


@dataclass(frozen=True, slots=True)
class _Write(_Operation):
    def __call__(self, *tensors: torch.Tensor) -> None:
        self.run(tensors)


def _attend(
    operation: str,
    operands: Mapping[str, jax.Array | None],
    out_shape: tuple[int, ...],
    static: tuple[tuple[str, Any], ...],
    with_lse: bool,
    work: int,
) -> tuple[jax.Array, jax.Array | None]:
    names, arrays = _present(operands)
    outputs = [jax.ShapeDtypeStruct(out_shape, arrays[0].dtype)]
    if with_lse:
        outputs.append(jax.ShapeDtypeStruct(out_shape[:2], jnp.float32))
    function = _AttendWithLse(f"{operation}_with_lse", names, static) if with_lse else _Attend(operation, names, static)
    results = call_torch(function, arrays, outputs, num_threads=_threads(work))
    return results[0], results[1] if with_lse else None


def _merge(*tensors: torch.Tensor) -> None:
    out_a, lse_a, out_b, lse_b, out, lse = tensors
    merged_out, merged_lse = ops.merge_states(out_a, lse_a, out_b, lse_b)
    out.copy_(merged_out)
    lse.copy_(merged_lse)


def _present(operands: Mapping[str, jax.Array | None]) -> tuple[tuple[str, ...], list[jax.Array]]:
    present = {name: array for name, array in operands.items() if array is not None}
    return tuple(present), list(present.values())


def _threads(work: int) -> int | None:
    return 1 if work < _ONE_THREAD_BELOW else None
