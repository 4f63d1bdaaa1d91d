"""A paged call as a dense call over the keys and values of its sequences, which is differentiated instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import jax
import jax.numpy as jnp

from jattn.ops.softmax import first_visible
from torch_core.attention.backward_call import DIFFERENTIATED
from torch_core.attention.call import AttentionCall, DenseCall, PagedCall
from torch_core.base.errors import Unsupported


def gathered(call: PagedCall[jax.Array]) -> DenseCall[jax.Array]:
    """Returns the dense call with the same results, whose keys and values are read from the cache, scales applied.

    It has a key for each slot of the block tables, packed as those of a dense call: the sequences', then padding. Keys
    before the first that a sequence's queries see may lie in a block that was given back: they are zeros.

    Raises:
        Unsupported: sequences or blocks are split over Explicit axes: the packed keys are not even.
    """
    arrays = (call.query, *(call.caches if call.kv_cache is None else (call.kv_cache,)))
    if any(jax.typeof(x).sharding.mesh.explicit_axes and jax.typeof(x).sharding.spec[0] for x in arrays):
        raise Unsupported(
            f"{call.name}: Explicit mesh axes split its sequences or the blocks of its cache; its backward pass then "
            "needs implementation='xla', or jax.shard_map with each device's own sequences and blocks."
        )
    num_keys = call.num_seqs * call.table_tokens
    starts = jnp.pad(jnp.cumsum(call.seq_lens, dtype=jnp.int32), (1, 0))
    rows = jnp.arange(num_keys, dtype=jnp.int32)
    real = rows < starts[-1]
    seq = jnp.where(real, jnp.searchsorted(starts, rows, side="right") - 1, 0)
    position = jnp.where(real, rows - starts[seq], 0)
    blocks = jnp.where(real, call.block_tables[seq, position // call.block_size], 0)
    read_from = first_visible(call, call.seq_lens - jnp.diff(call.query_start_loc))
    wanted = real & (position >= read_from[seq])
    offsets = position % call.block_size

    def read(index: int, scale: jax.Array | float | None, scale_cache: jax.Array | None) -> jax.Array:
        cache = call.caches[index] if call.kv_cache is None else call.kv_cache
        found = _rows(cache, (blocks, offsets) if call.kv_cache is None else (blocks, jnp.int32(index), offsets))
        found = jnp.where(wanted[:, None, None], found, 0)
        if scale is not None or scale_cache is not None:
            found = found.astype(jnp.float32) * (1.0 if scale is None else scale)
        if scale_cache is not None:
            found = found * scale_cache[blocks, offsets][..., None]
        return found.astype(call.query.dtype)

    shared = {field.name: getattr(call, field.name) for field in fields(AttentionCall)}
    return DenseCall(
        **shared,
        key=read(0, call.k_scale, call.k_scale_cache),
        value=read(1, call.v_scale, call.v_scale_cache),
        key_start_loc=starts,
        max_key_len=call.table_tokens,
    )


def gathered_with_pullback(
    call: PagedCall[jax.Array],
) -> tuple[DenseCall[jax.Array], Callable[[dict[str, jax.Array]], dict[str, jax.Array]]]:
    """Returns `gathered`, and the function from its gradients to those of the call's arrays, by name."""

    def gather(arrays: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], DenseCall[jax.Array]]:
        dense = gathered(call.with_arrays(arrays))
        return {name: x for name, x in dense.arrays().items() if name in DIFFERENTIATED}, dense

    floats = {name: x for name, x in call.arrays().items() if jnp.issubdtype(x.dtype, jnp.floating)}
    _, pull, dense = jax.vjp(gather, floats, has_aux=True)

    def pulled(found: dict[str, jax.Array]) -> dict[str, jax.Array]:
        named = {name.removeprefix("d_"): x for name, x in found.items()}
        return pull({name: _as_split(x, getattr(dense, name)) for name, x in named.items()})[0]

    return dense, pulled


def _as_split(x: jax.Array, other: jax.Array) -> jax.Array:
    # Along Explicit axes the heads of queries may be split and those of the cache not, or the other way round.
    sharding = jax.typeof(other).sharding
    return jax.sharding.reshard(x, sharding) if sharding.mesh.explicit_axes else x


@jax.custom_vjp
def _rows(cache: jax.Array, at: tuple[jax.Array, ...]) -> jax.Array:
    return cache[at]


def _add_rows(residuals: tuple[jax.Array, tuple[jax.Array, ...]], found: jax.Array) -> tuple[jax.Array, None]:
    # JAX's own transpose says nothing of where the sum lies, which newer releases ask for along Explicit axes.
    cache, at = residuals
    sharding = jax.typeof(cache).sharding
    explicit = sharding if sharding.mesh.explicit_axes else None
    return jnp.zeros_like(cache).at[at].add(found, out_sharding=explicit), None


_rows.defvjp(lambda cache, at: (cache[at], (cache, at)), _add_rows)
