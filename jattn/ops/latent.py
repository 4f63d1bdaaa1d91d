"""Multi-head latent attention on JAX arrays, by keywords and in jnp: attention to cached latents, and their write."""

from __future__ import annotations

import functools
from typing import Unpack

import jax
import jax.numpy as jnp

from jattn.ops.arguments import documented, dtype_name, refuse_traced
from jattn.ops.attention import Request, output, output_and_lse
from jattn.ops.attention_in_order import attend_in_order
from jattn.ops.attention_jnp import NARROWED, attend_to_blocks
from jattn.ops.cache import places
from jattn.ops.quantise import quantised, scaled
from jattn.ops.rotate_and_write import rotate
from jattn.ops.run import run
from jattn.ops.softmax import compute_dtype
from jattn.ops.xla import JaxOp, register
from torch_core.attention.options import LatentOptions
from torch_core.base.specs import LARGEST_CODE, PACKED_GROUP
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.launch.public import operation

_LARGEST = LARGEST_CODE["float8_e4m3fn"]


@documented(LatentCall)
def latent_request(
    query: jax.Array,
    latent_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    kv_lora_rank: int,
    max_query_len: int,
    scale: float,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    **options: Unpack[LatentOptions[jax.Array]],
) -> Request[LatentCall[jax.Array]]:
    """Attends new tokens to cached latents in the absorbed form of multi-head latent attention (DeepSeek-V2).

    A row of the cache is a token's compressed latent and, after it, its rotary key, which all heads share: the whole
    row is every head's key, the latent every head's value. The projections from latents to keys and values are applied
    to the query beforehand and to the result afterwards. The new tokens' rows must be in the cache already
    (`write_latent_cache`). Everything that `paged_attention` promises of tables, padding and neighbours holds here.

    Returns:
        float[num_tokens, num_heads, kv_lora_rank]; padded rows and rows that see nothing are 0. The function with "lse"
        in its name also returns the natural-log LSE, float32[num_tokens, num_heads].

    Example:
        >>> import jax.numpy as jnp
        >>> cache = jnp.ones((2, 4, 8 + 2))  # 2 blocks of 4 tokens, of which a sequence has the second
        >>> table, lens, starts = jnp.array([[1]]), jnp.array([3]), jnp.array([0, 1])
        >>> options = {"kv_lora_rank": 8, "max_query_len": 1, "scale": 0.5}
        >>> mla_attention(jnp.ones((1, 2, 10)), cache, table, lens, starts, **options).shape
        (1, 2, 8)
    """
    refuse_traced({**options, "scale": scale})
    call = LatentCall(
        query=query,
        latent_cache=latent_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        kv_lora_rank=kv_lora_rank,
        max_query_len=max_query_len,
        scale=scale,
        out_dtype=dtype_name(out_dtype),
        **options,
    )
    return call, functools.partial(run, implementation=implementation)


@documented(LatentWriteCall)
def write_latent_cache(
    kv_c: jax.Array,
    k_pe: jax.Array,
    latent_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: float | jax.Array | None = None,
    cos_sin_cache: jax.Array | None = None,
    positions: jax.Array | None = None,
    is_neox_style: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Writes each token's latent and rotary key into its slot of the cache.

    In place if the caller donated the cache to the jitted step (`KVPool.run` does); otherwise XLA copies it first.
    Use the returned array and never the old one. Two tokens must not share a slot.

    Returns:
        The cache with the new tokens in it.

    Example:
        >>> import jax.numpy as jnp
        >>> latents, keys, slots = jnp.ones((1, 2)), jnp.zeros((1, 1)), jnp.array([3])  # the second block's second slot
        >>> write_latent_cache(latents, keys, jnp.zeros((2, 2, 3)), slots)[1].tolist()
        [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    """
    call = LatentWriteCall(
        kv_c=kv_c,
        k_pe=k_pe,
        latent_cache=latent_cache,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        cos_sin_cache=cos_sin_cache,
        positions=positions,
        is_neox_style=is_neox_style,
    )
    return run(call, implementation)["latent_cache"]


mla_attention = operation(latent_request, output, "mla_attention", returns="jax.Array")
mla_attention_with_lse = operation(
    latent_request, output_and_lse, "mla_attention_with_lse", returns="tuple[jax.Array, jax.Array]"
)


def _mla_attention(call: LatentCall[jax.Array]) -> dict[str, jax.Array]:
    if call.batch_invariant:
        return attend_in_order(call, _slots, plain=_mla_attention)
    return attend_to_blocks(call, _blocks)


def _slots(call: LatentCall[jax.Array], seq: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rows at positions of a sequence as keys, and their latents as values."""
    blocks, offsets = call.block_tables[seq, positions // call.block_size], positions % call.block_size
    rows = _elements(call, call.latent_cache[blocks, offsets])[:, None].astype(compute_dtype(call))
    rows = scaled(rows, call.k_scale)
    return rows, rows[..., : call.kv_lora_rank]


def _blocks(call: LatentCall[jax.Array], blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of blocks as keys, and their latents as values."""
    rows = _elements(call, call.latent_cache[blocks])
    return rows, rows[..., : call.kv_lora_rank]


def _elements(call: LatentCall[jax.Array], rows: jax.Array) -> jax.Array:
    """Returns rows of the cache, packed ones as what they stand for."""
    if not call.is_packed:
        return rows
    dtype = call.query.dtype if call.query.dtype.itemsize > 1 else jnp.bfloat16
    return _unpacked(rows, call.kv_lora_rank).astype(dtype)


def _write_latent_cache(call: LatentWriteCall[jax.Array]) -> dict[str, jax.Array]:
    cache, num_slots = call.latent_cache, call.slot_mapping.shape[0]
    kv_c, k_pe = call.kv_c[:num_slots], _rotated(call)
    if call.is_packed:
        rows = _packed(kv_c, k_pe)
    else:
        rows = jnp.concatenate([quantised(part, call.k_scale, cache.dtype.name) for part in (kv_c, k_pe)], axis=1)
    blocks, offsets = places(call.slot_mapping, *cache.shape[:2])
    return {"latent_cache": cache.at[blocks, offsets].set(rows, mode="drop")}


def _packed(kv_c: jax.Array, k_pe: jax.Array) -> jax.Array:
    """Returns the rows, uint8[tokens, bytes], of latents and rotated keys."""
    tokens = kv_c.shape[0]
    groups = kv_c.astype(jnp.float32).reshape(tokens, -1, PACKED_GROUP)
    # XLA multiplies by the reciprocal instead: a scale may have another last bit than everywhere else.
    scales = jnp.maximum(jnp.abs(groups).max(-1) / _LARGEST, jnp.finfo(jnp.float32).tiny)
    codes = jnp.clip(groups / scales[..., None], -_LARGEST, _LARGEST).astype(jnp.float8_e4m3fn)
    parts = (codes, scales, k_pe.astype(jnp.bfloat16))
    return jnp.concatenate([jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(tokens, -1) for x in parts], axis=1)


def _unpacked(rows: jax.Array, kv_lora_rank: int) -> jax.Array:
    """Returns the dequantised values of packed rows uint8[..., bytes], float32[..., kv_lora_rank + rope_dim]."""
    groups = kv_lora_rank // PACKED_GROUP
    codes, scales, rotary = jnp.split(rows, (kv_lora_rank, kv_lora_rank + 4 * groups), axis=-1)
    latents = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    scales = jax.lax.bitcast_convert_type(scales.reshape(*rows.shape[:-1], groups, 4), jnp.float32)
    rotary = jax.lax.bitcast_convert_type(rotary.reshape(*rows.shape[:-1], -1, 2), jnp.bfloat16)
    latents = latents.reshape(*scales.shape, PACKED_GROUP) * scales[..., None]
    return jnp.concatenate([latents.reshape(codes.shape), rotary.astype(jnp.float32)], axis=-1)


def _rotated(call: LatentWriteCall[jax.Array]) -> jax.Array:
    """Returns the rotary keys of a call's slots, rotated if the call has positions."""
    count = call.slot_mapping.shape[0]
    keys = call.k_pe[:count]
    if call.cos_sin_cache is None or call.positions is None:
        return keys
    return rotate(keys, call.cos_sin_cache[call.positions[:count]], is_neox_style=call.is_neox_style)


register(JaxOp(call=LatentCall, jnp=_mla_attention, narrowed=NARROWED))
register(JaxOp(call=LatentWriteCall, jnp=_write_latent_cache))
