"""Queries that are rounded to e4m3, for the kernel that multiplies them with an e4m3 cache in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from jattn.bridge.calls import array_spec
from jattn.bridge.native import device_limits
from jattn.ops.attention import paged_call
from jattn.ops.choose import choose
from jattn.ops.quantise import quantised
from torch_core.attention.call import PagedCall
from torch_core.base.specs import ArraySpec

_E4M3 = jnp.dtype(jnp.float8_e4m3fn)


def fp8_query(query: jax.Array, kv_cache: Any, **options: Any) -> tuple[jax.Array, dict[str, Any]]:
    """Rounds a query to e4m3 where that lets a faster kernel serve `paged_attention`, and returns its arguments.

    The kernel multiplies queries and keys, and weights and values, in 8 bits: on Hopper, for head sizes 64, 128 and
    256, over an e4m3 cache. vLLM's backends round queries too, with a scale of 1 unless the checkpoint has another one
    (`vllm/attention/layer.py`, `query_quant`); the scale here is always 1. e4m3 has 3 bits of mantissa from 2^-6 to
    448, the largest value, at which larger ones saturate. Batches of short queries alone keep theirs: there the cache's
    bytes are the cost.

    Args:
        query, kv_cache, **options: arguments of `paged_attention`.

    Returns:
        The query, rounded or not, and the options with the dtype of the result.
    """
    if not takes_fp8_query(query, kv_cache, **options):
        return query, options
    return quantised(query, None, _E4M3.name), {**options, "out_dtype": options.get("out_dtype") or query.dtype}


def takes_fp8_query(query: jax.Array | jax.ShapeDtypeStruct, kv_cache: Any, **options: Any) -> bool:
    """Returns whether `fp8_query` rounds a query, of which only shape and dtype count."""
    if query.dtype not in (jnp.bfloat16, jnp.float16) or jax.tree.leaves(kv_cache)[0].dtype != _E4M3:
        return False
    call: Any = paged_call(cast(jax.Array, query), kv_cache, **options)
    return choose(options.get("implementation"), call) == "triton" and _is_served(call)


def _is_served(call: PagedCall[jax.Array]) -> bool:
    # Imports Triton; this module must load without it.
    from torch_core.attention.kernels.hopper_fp8.plan import hopper_fp8_launch
    from torch_core.attention.kernels.split.plan import short_query_len

    specs = call.map(array_spec)
    rounded = replace(specs, query=ArraySpec(specs.query.shape, "float8_e4m3fn"), out_dtype=call.result_dtype)
    short = short_query_len(rounded)
    if short == call.max_query_len:
        return False
    return hopper_fp8_launch(rounded, device_limits(), min_query=short + 1) is not None
