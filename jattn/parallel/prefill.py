"""Attention of long sequences whose tokens are split over a mesh axis: a ring of keys, or keys gathered.

Under the causal mask the last tokens see the most keys. So a sequence is split into two chunks per device, and a device
takes one from the front and its mirror image from the back: all devices have the same work in every step of the ring.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn import ops
from torch_core.attention.backward_call import backward_of
from torch_core.attention.call import DenseCall
from torch_core.attention.options import attention_spec
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import AttentionSpec

# Options that count the rows or the keys of a whole sequence.
_OF_WHOLE_SEQUENCES = ("mm_prefix_range", "qq_bias", "seq_causal", "segment_ids")
# Those that ask how far a key is from the query; plain ALiBi tells keys apart by their own places.
_DISTANCES = ("sliding_window", "attention_chunk", "relative_bias", "use_alibi_sqrt")
# On four H200s 32,768, 65,536 and 131,072 tokens, whose keys and values take up to these bytes, need 4.5, 14.7 and 53.2
# ms as a ring, and 3.9, 13.6 and 52.3 with gathered keys.
_MAX_GATHERED_BYTES = 1 << 29


def zigzag_order(num_tokens: int, num_devices: int) -> np.ndarray:
    """Returns int64[num_tokens], the token at each position, so that equal parts are the devices' chunks.

    `x[:, order]` is a batch to be split along its tokens, and `np.argsort(order)` undoes it.

    Raises:
        InvalidInput: a size is out of range, or the tokens do not form two equal chunks per device.

    Example:
        >>> zigzag_order(8, 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    check_int("num_tokens", num_tokens, 0)
    check_int("num_devices", num_devices, 1)
    if num_tokens % (2 * num_devices):
        wanted = f"it must be a multiple of {2 * num_devices}, two chunks for each device. Pad"
        raise InvalidInput("num_tokens", value=num_tokens, wanted=wanted)
    chunks = np.arange(num_tokens).reshape(2 * num_devices, -1)
    return np.concatenate([chunks[[rank, -1 - rank]].reshape(-1) for rank in range(num_devices)])


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: str,
    *,
    causal: bool = True,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    max_gathered_bytes: int = _MAX_GATHERED_BYTES,
    implementation: str | None = None,
) -> jax.Array:
    """Attends while keys and values are passed around the devices of a mesh axis; runs inside `jax.shard_map`.

    Each device holds its own keys and its neighbour's, never all, unless all take few bytes and nothing is derived:
    gathered first they are faster. The derivative passes the keys around again, together with the gradients of keys and
    values (Ring Attention, arXiv 2310.01889; zigzag as in Llama 3 and TransformerEngine). With grouped heads only the
    key/value heads are sent.

    Args:
        query: float[batch, tokens, num_heads, head_size], this device's tokens: two chunks of `zigzag_order`.
        key: float[batch, tokens, num_kv_heads, head_size].
        value: like key; its head size may differ.
        axis_name: the mesh axis.
        causal: hide keys after the query.
        scale: factor on the scores; head_size ** -0.5 by default.
        sliding_window: refused: most steps of the ring would carry keys that no query sees.
        logits_soft_cap: as in `jattn.attention`.
        max_gathered_bytes: keys and values of all devices that take no more are gathered; a device then needs as much
            memory twice.
        implementation: as in `jattn.ops.run`, also for the derivative.

    Returns:
        float[batch, tokens, num_heads, value_head_size].

    Raises:
        InvalidInput: shapes do not fit, or the tokens do not form two chunks.
        Unsupported: a window.
    """
    _check_chunks(query, key, value)
    if sliding_window is not None:
        wanted = "in a ring most steps would carry keys that no query sees. Use all_gather_attention"
        raise Unsupported("sliding_window", value=sliding_window, wanted=wanted)
    spec = attention_spec(query, scale=scale, causal=causal, logits_soft_cap=logits_soft_cap)
    check_int("max_gathered_bytes", max_gathered_bytes, 0)
    num_bytes = jax.lax.axis_size(axis_name) * sum(x.size * x.dtype.itemsize for x in (key, value))
    ring = _Ring(axis_name, spec, implementation, gathers=num_bytes <= max_gathered_bytes)
    return _ring(ring, query, key, value)


def all_gather_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, axis_name: str, *, causal: bool = True, **options: Any
) -> jax.Array:
    """Attends to all devices' keys and values, gathered first; runs inside `jax.shard_map`.

    One all-gather of keys and one of values; reduce-scatters of their gradients. The device holds all keys for a while.
    Every mask and bias that depends on the distance between query and key is supported.

    Args:
        query, key, value, axis_name, causal: as in `ring_attention`.
        **options: further options of `jattn.attention`.

    Returns:
        float[batch, tokens, num_heads, value_head_size].

    Raises:
        InvalidInput: shapes do not fit, or the tokens do not form two chunks.
        Unsupported: options that count a sequence's own rows (`qq_bias`, `mm_prefix_range`, `seq_causal`,
            `segment_ids`), and, without the causal mask, windows, chunks and other options that depend on distances.
    """
    _check_chunks(query, key, value)
    batch, tokens = query.shape[:2]
    world, rank, chunk = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name), tokens // 2
    natural = np.argsort(zigzag_order(tokens * world, world))
    # One computed sequence is a chunk of the real one or, without the causal mask, two chunks that are not adjacent.
    clash = [name for name in _OF_WHOLE_SEQUENCES if options.get(name) is not None]
    if clash:
        raise Unsupported(f"{' and '.join(clash)} is not served where tokens are split. Keep such sequences whole.")
    near = [name for name in _DISTANCES if options.get(name) is not None and options[name] is not False]
    if not causal and near:
        raise Unsupported(f"{' and '.join(near)} without the causal mask is not served where tokens are split.")
    if causal:
        # Two sequences for each: a chunk of queries, and all keys up to its end. Together they are of one length.
        ends = jnp.array([rank + 1, 2 * world - rank]) * chunk
        rows = jnp.arange((2 * world + 1) * chunk)
        rows = jnp.where(rows < ends[0], rows, rows - ends[0])
        key_lens = jnp.tile(ends, batch)
    else:
        rows, key_lens = jnp.arange(2 * world * chunk), jnp.full(batch, 2 * world * chunk)
    max_query_len = chunk if causal else tokens
    every_key, every_value = (
        jax.lax.all_gather(x, axis_name, axis=1, tiled=True)[:, natural][:, rows].reshape(-1, *x.shape[2:])
        for x in (key, value)
    )
    out = ops.attention(
        query.reshape(-1, *query.shape[2:]),
        every_key,
        every_value,
        jnp.arange(key_lens.shape[0] + 1, dtype=jnp.int32) * max_query_len,
        jnp.pad(jnp.cumsum(key_lens), (1, 0)).astype(jnp.int32),
        max_query_len=max_query_len,
        max_key_len=2 * world * chunk,
        causal=causal,
        **options,
    )
    return out.reshape(batch, tokens, *out.shape[1:])


def _check_chunks(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = {name: tuple(x.shape) for name, x in (("query", query), ("key", key), ("value", value))}
    each = shapes.values()
    if any(len(shape) != 4 for shape in each) or len({shape[:2] for shape in each}) > 1 or query.shape[1] % 2:
        found = [f"{name} has shape {list(shape)}" for name, shape in shapes.items()]
        raise InvalidInput(
            f"{', '.join(found)}; they are [batch, tokens, heads, size], of one batch and two chunks of equal length "
            "(zigzag_order)."
        )


class _Ring(NamedTuple):
    axis_name: str
    spec: AttentionSpec
    implementation: str | None
    gathers: bool  # Whether all keys are gathered where nothing is derived.


class _Rows(NamedTuple):
    """The arrays of query rows, [batch, tokens, ...] each."""

    query: jax.Array
    out: jax.Array
    lse: jax.Array
    d_out: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: _Ring, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    if not ring.gathers:
        return _forward(ring, query, key, value)[0]
    spec = ring.spec
    options = {"scale": spec.scale, "logits_soft_cap": spec.logits_soft_cap, "implementation": ring.implementation}
    return all_gather_attention(query, key, value, ring.axis_name, causal=spec.causal, **options)


def _forward(ring: _Ring, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
    out, lse = _attend(ring, query, key, value)

    def step(state: Any, index: jax.Array) -> tuple[Any, None]:
        out, lse, keys = state
        key, value = keys = _pass_on(ring, keys)
        return (*_merge(out, lse, *_attend(ring, query, key, value, index)), keys), None

    (out, lse, _), _ = _steps(ring, step, (out.astype(jnp.float32), lse, (key, value)))
    out = out.astype(query.dtype)
    return out, (query, key, value, out, lse)


def _merge(out: jax.Array, lse: jax.Array, more: jax.Array, more_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the attention to two parts of the keys. It sums no axis, so that XLA merges all steps in one pass."""
    both = jnp.logaddexp(lse, more_lse)
    shift = jnp.where(both == -jnp.inf, 0, both)
    weight, more_weight = (jnp.exp(x - shift)[..., None] for x in (lse, more_lse))
    return out * weight + more.astype(jnp.float32) * more_weight, both


def _backward(ring: _Ring, saved: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, key, value, out, lse = saved
    rows = _Rows(query, out, lse, d_out)
    d_query, *d_keys = _derive(ring, rows, key, value)

    def step(state: Any, index: jax.Array) -> tuple[Any, None]:
        d_query, keys, d_keys = state
        keys, d_keys = _pass_on(ring, (keys, d_keys))
        key, value = keys
        more, *d_more = _derive(ring, rows, key, value, index)
        return (d_query + more, keys, tuple(x + y for x, y in zip(d_keys, d_more, strict=True))), None

    state = (d_query, (key, value), tuple(d_keys))
    (d_query, _, d_keys), _ = _steps(ring, step, state)
    # Once more, and the gradients are where their keys are.
    d_key, d_value = _pass_on(ring, d_keys)
    return tuple(x.astype(y.dtype) for x, y in zip((d_query, d_key, d_value), (query, key, value), strict=True))


_ring.defvjp(_forward, _backward)


def _steps(ring: _Ring, step: Any, state: Any) -> Any:
    others = jax.lax.axis_size(ring.axis_name) - 1
    # Unrolled, so that XLA sends the next keys while it attends to these.
    return jax.lax.scan(step, state, jnp.arange(1, others + 1), unroll=max(1, min(others, 8)))


def _pass_on(ring: _Ring, arrays: Any) -> Any:
    world = jax.lax.axis_size(ring.axis_name)
    to_next = [(rank, (rank + 1) % world) for rank in range(world)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis_name, to_next), arrays)


def _attend(
    ring: _Ring, query: jax.Array, key: jax.Array, value: jax.Array, index: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    found = ops.run(_call(ring, query, key, value, index), ring.implementation)
    out, lse = (found[name].reshape(*query.shape[:2], *found[name].shape[1:]) for name in ("out", "lse"))
    return out, lse


def _derive(
    ring: _Ring, rows: _Rows, key: jax.Array, value: jax.Array, index: jax.Array | None = None
) -> list[jax.Array]:
    """Returns float32 gradients of queries, keys and values, from an lse over all devices' keys."""
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in rows._asdict().items() if name != "query"}
    found = ops.run(backward_of(_call(ring, rows.query, key, value, index), **flat), ring.implementation)
    inputs = (rows.query, key, value)
    gradients = (found[f"d_{name}"] for name in ("query", "key", "value"))
    return [x.astype(jnp.float32).reshape(y.shape) for x, y in zip(gradients, inputs, strict=True)]


def _call(
    ring: _Ring, query: jax.Array, key: jax.Array, value: jax.Array, index: jax.Array | None
) -> DenseCall[jax.Array]:
    """Returns the attention to a device's own keys, or to those of step `index` of the ring."""
    packed = [x.reshape(-1, *x.shape[2:]) for x in (query, key, value)]
    tokens = query.shape[1]
    parts = [[jnp.array(0)], [jnp.array(0)]]
    if ring.spec.causal and index is not None:
        # All rows see the front chunk of an earlier device, and nothing else of it. The two chunks of a later device
        # lie between this device's two: the second sees both. What is left is a sequence without queries or keys.
        earlier = index <= jax.lax.axis_index(ring.axis_name)
        parts[0].append(jnp.where(earlier, tokens, tokens // 2))
        parts[1].append(jnp.where(earlier, tokens // 2, 0))
    starts = [jnp.arange(query.shape[0])[:, None] * tokens + jnp.stack(each) for each in parts]
    query_starts, key_starts = (jnp.append(x.reshape(-1), query.shape[0] * tokens).astype(jnp.int32) for x in starts)
    return DenseCall(
        query=packed[0],
        key=packed[1],
        value=packed[2],
        query_start_loc=query_starts,
        key_start_loc=key_starts,
        spec=replace(ring.spec, causal=ring.spec.causal and index is None),
        max_query_len=tokens,
        max_key_len=tokens,
        with_lse=True,
    )
