"""Attention within the rows of a padded batch: by the kernels if they serve the call, otherwise in jnp."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jattn import ops
from jattn.nn.options import DenseOptions, check_arrays
from jattn.nn.padded import Packing, flat_lengths, real_tokens
from jattn.nn.segments import Segments, positions_in_segments, segments_of_mask
from jattn.ops.attention import dense_call
from torch_core.base.errors import InvalidInput, Unsupported

_LOG = logging.getLogger(__name__)
# Outside jit this is one program instead of one for each primitive. A function that looks at weights has side effects.
_one_program = jax.jit(ops.masked_attention, static_argnames=("precision", *ops.MASK_OPTIONS), inline=True)
_DEFAULT_PRECISIONS = (None, "default", jax.lax.Precision.DEFAULT)


class Dropout(NamedTuple):
    """The dropout of a call, in Flax's terms; `batch_dims` are the sizes of the caller's batch axes."""

    rng: jax.Array
    rate: float
    broadcast: bool
    batch_dims: tuple[int, ...]

    def drop(self, weights: jax.Array) -> jax.Array:
        """Drops weights [batch, heads, length, key_length]; with flax's shapes, it drops the same weights as flax."""
        heads, *lengths = weights.shape[1:]
        shape = (*(1 for _ in self.batch_dims), 1, *lengths) if self.broadcast else (*self.batch_dims, heads, *lengths)
        keep = jax.random.bernoulli(self.rng, 1.0 - self.rate, shape)
        keep = keep.reshape(math.prod(shape[:-3]), *shape[-3:])
        return weights * keep.astype(weights.dtype) / (1.0 - self.rate)


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    input_positions: jax.Array | None = None,
    rope: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    lengths: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    max_segments: int | None = None,
    deterministic_gradients: bool = True,
    implementation: str | None = None,
    force_fp32_for_softmax: bool = True,
    qk_attn_weights_einsum: None = None,
    attn_weights_value_einsum: None = None,
    **options: Unpack[DenseOptions],
) -> jax.Array:
    """Replaces `nnx.dot_product_attention` and linen's: `MultiHeadAttention(attention_fn=jattn.attention_fn)`.

    The kernels serve calls without a mask, with segments too. They also serve a padding mask `[batch..., 1, 1,
    key_length]` if no option depends on positions: the real keys are packed, and the mask becomes lengths. Outside jit,
    a mask `[batch..., 1, length, length]` that only separates segments, causal or not, becomes segments. Any other
    mask, a bias, a precision, sown weights and dropout in segments are computed exactly, in jnp; an explicit
    `implementation` that does not serve them is refused. Set `rope` and the options of `jattn.attention` with
    `functools.partial`.

    There are two differences from flax. A row that sees no key gives 0 instead of the mean of all values. With
    `is_causal` and more keys than queries, the last query sees all keys (in flax 0.12.11 and older, a single query sees
    the first key only).

    Args:
        query: float[batch..., length, num_heads, head_size].
        key: float[batch..., key_length, num_kv_heads, head_size].
        value: float[batch..., key_length, num_kv_heads, value_head_size].
        bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype, precision, module,
            promote_dtype, is_causal: as in `nnx.dot_product_attention`. In jnp dropout draws flax's own numbers, in
            the kernels those of `jattn.attention`, by seeds from `dropout_rng`.
        input_positions: int[batch..., length] or [length], for `rope`; by default they count from 0 in each segment.
        rope: newer flax's `nnx.RoPE`, or any function of x[heads, tokens, head_size] and positions[tokens].
        lengths, key_lengths: int32[batch...], number of real tokens of each row; the rest is padding, with output 0.
            `key_lengths` is `lengths` by default if there are as many keys as queries.
        segment_ids: int32[batch..., length], the segment of each token, such as a document of a packed row: tokens
            attend within their segment. Ids of 0 and below are padding, at any place; its output is 0.
        key_segment_ids, max_segments: as in `jattn.attention`; int32[batch..., key_length].
        deterministic_gradients: as `deterministic` in `jattn.attention`; in flax that name means "no dropout".
        implementation: "triton", "torch", "xla", or None for the fastest that serves the call.
        force_fp32_for_softmax: ignored; the softmax is always float32.
        qk_attn_weights_einsum, attn_weights_value_einsum: must be None.
        scale, sliding_window, attention_chunk, logits_soft_cap, alibi_slopes, use_alibi_sqrt, sinks, mm_prefix_range,
            relative_bias, qq_bias, seq_causal, out_dtype, out_scale, batch_invariant: as in `jattn.attention`.

    Returns:
        float[batch..., length, num_heads, value_head_size].

    Raises:
        InvalidInput: shapes that do not match, dropout without a key, or positions without rope.
        Unsupported: an explicit implementation that does not serve the call, or an einsum that is not None.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = nnx.MultiHeadAttention(
        ...     num_heads=2, in_features=4, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 3, 4)), is_causal=True).shape
        (1, 3, 4)
    """
    if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
        raise Unsupported("an einsum of your own was given; jattn computes both products itself: leave it None.")
    ops.refuse_leaked(
        query=query, key=key, value=value, bias=bias, mask=mask, dropout_rng=dropout_rng,
        input_positions=input_positions, lengths=lengths, key_lengths=key_lengths, segment_ids=segment_ids,
        key_segment_ids=key_segment_ids,
    )  # fmt: skip
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    batch_dims = _check_shapes(query, key, value)
    segments = Segments.of(segment_ids, key_segment_ids, max_segments, query.shape[:-2], key.shape[:-2])
    if segments is not None and (lengths is not None or key_lengths is not None):
        raise InvalidInput("lengths", "are given beside segment_ids", "mark padding by ids of 0 instead")
    if rope is not None:
        key_ids = segment_ids if key_segment_ids is None else key_segment_ids
        for_query, for_key = (
            positions_in_segments(ids) if input_positions is None else input_positions for ids in (segment_ids, key_ids)
        )
        query, key = rotated(rope, query, for_query), rotated(rope, key, for_key)
    elif input_positions is not None:
        raise InvalidInput("input_positions is given and rope is not; pass functools.partial(attention_fn, rope=...).")
    dropout = None
    if dropout_rate > 0.0 and not deterministic:
        if dropout_rate >= 1:
            raise InvalidInput("dropout_rate", f"is {dropout_rate}", "it must be at least 0 and less than 1")
        if dropout_rng is None:
            raise InvalidInput("dropout_rate", f"is {dropout_rate} and dropout_rng None", "pass a jax.random key")
        dropout = Dropout(dropout_rng, dropout_rate, broadcast_dropout, batch_dims)
    size = math.prod(batch_dims)
    if key_lengths is None and key.shape[-3] == query.shape[-3]:
        key_lengths = lengths
    lengths = flat_lengths("lengths", lengths, batch_dims, query.shape[-3])
    key_lengths = flat_lengths("key_lengths", key_lengths, batch_dims, key.shape[-3])
    mask = None if mask is None else _scores_like("mask", mask, query, key).astype(bool)
    bias = None if bias is None else _scores_like("bias", bias, query, key)
    sow = None if module is None else _sow(module, batch_dims)
    query, key, value = (x.reshape(size, *x.shape[-3:]) for x in (query, key, value))
    chosen = ops.choose(implementation, _described(query, key, value, causal=is_causal, **options))
    unpadded = lengths is None and key_lengths is None and segments is None
    # The positions of a chunk would count from another token.
    if mask is not None and unpadded and chosen != "xla" and options.get("attention_chunk") is None:
        found = segments_of_mask(mask)
        if found is not None:
            mask, segments, is_causal = None, found[0], is_causal or found[1]
    positional = (is_causal and query.shape[1] > 1) or any(options.get(name) is not None for name in ops.POSITIONAL)
    reasons = {
        "a mask that is not [batch..., 1, 1, key_length], or one beside causal, a window, a chunk or ALiBi": (
            mask is not None and (segments is not None or positional or mask.shape[1:3] != (1, 1))
        ),
        "dropout in segments": dropout is not None and segments is not None,
        "a bias": bias is not None,
        "weights to sow": sow is not None,
        f"precision {precision}": precision not in _DEFAULT_PRECISIONS,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    invariant = options.pop("batch_invariant", False)
    if invariant and (reason is not None or mask is not None):
        raise Unsupported(f"attention with {reason or 'a mask'} is not batch-invariant; leave one of them out.")
    if chosen != "xla" and reason is not None and implementation is not None:
        problem = f"attention with {reason} is not served by implementation {implementation!r}"
        raise Unsupported(f"{problem}; use 'xla', or None.")
    lens = {"lengths": lengths, "key_lengths": key_lengths, "dropout": dropout, "causal": is_causal}
    if reason is not None or (chosen == "xla" and segments is None and not invariant):
        if chosen != "xla" and mask is not None:
            _say_slow(reason)
        masks = {"mask": mask, "bias": bias, "segment_ids": None if segments is None else segments.pair}
        out = _in_jnp(query, key, value, sow=sow, precision=precision, **masks, **lens, **options)
    else:
        fixed = {"deterministic": deterministic_gradients, "implementation": implementation}
        fixed["batch_invariant"] = invariant
        out = _by_kernels(query, key, value, mask=mask, segments=segments, **lens, **fixed, **options)
    return out.reshape(*batch_dims, *out.shape[1:])


def _in_jnp(
    *operands: jax.Array,
    lengths: jax.Array | None,
    key_lengths: jax.Array | None,
    sow: Callable[[jax.Array], None] | None,
    dropout: Dropout | None,
    **options: Any,
) -> jax.Array:
    # The arrays stay padded: the packed jnp path would gather every row.
    options |= {"query_lens": lengths, "key_lens": key_lengths}
    if sow is None and dropout is None:
        return _one_program(*operands, **options)

    def on_weights(weights: jax.Array) -> jax.Array:
        if sow is not None:
            sow(weights)
        return weights if dropout is None else dropout.drop(weights)

    return ops.masked_attention(*operands, **options, on_weights=on_weights)


def _by_kernels(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    segments: Segments | None,
    lengths: jax.Array | None,
    key_lengths: jax.Array | None,
    dropout: Dropout | None,
    **options: Any,
) -> jax.Array:
    (batch, length), key_length = query.shape[:2], key.shape[1]
    real_keys = real_tokens(key_lengths, key_length)
    if mask is not None:
        padding = jnp.broadcast_to(mask[:, 0, 0], (batch, key_length))
        real_keys = padding if real_keys is None else padding & real_keys
    queries = Packing.of(batch, length, real_tokens(lengths, length))
    keys = Packing.of(batch, key_length, real_keys)
    if dropout is not None:
        options["dropout_rate"] = dropout.rate
        options["dropout_seeds"] = ops.dropout_seeds(dropout.rng, batch, query.shape[2], broadcast=dropout.broadcast)
    if segments is not None:
        options |= segments.options
    packed = queries.pack(query), keys.pack(key), keys.pack(value), queries.start_loc, keys.start_loc
    out = ops.attention(*packed, max_query_len=length, max_key_len=key_length, **options)
    return queries.unpack(out).reshape(batch, length, *out.shape[1:])


@functools.cache
def _say_slow(reason: str | None) -> None:
    _LOG.warning(
        "attention with %s is computed in jnp, with every score in memory. The kernels serve is_causal=True, lengths=, "
        "and segment_ids= for documents and padding.",
        reason,
    )


def _described(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Any:
    """Returns the packed call of a padded batch without arrays; the choice of an implementation reads shapes only."""
    (batch, length), key_length = query.shape[:2], key.shape[1]
    packed: Any = (jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], *x.shape[2:]), x.dtype) for x in (query, key, value))
    starts: Any = jax.ShapeDtypeStruct((batch + 1,), jnp.int32)
    return dense_call(*packed, query_start_loc=starts, max_query_len=length, max_key_len=key_length, **options)


def rotated(
    rope: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    positions: jax.Array | None,
    *,
    batch_invariant: bool = False,
) -> jax.Array:
    """Applies `rope` to [..., length, heads, head_size]; positions count from 0 in each row by default."""
    if positions is None:
        positions = jnp.arange(x.shape[-3], dtype=jnp.int32)
    if not jnp.issubdtype(jnp.result_type(positions), jnp.integer):
        raise InvalidInput(f"input_positions is {jnp.result_type(positions)}; positions are integers, such as int32.")
    shape, tokens = jnp.shape(positions), x.shape[:-2]
    if len(shape) > len(tokens) or any(n not in (1, m) for n, m in zip(shape[::-1], tokens[::-1], strict=False)):
        raise InvalidInput(f"input_positions has shape {shape}; it must be {tokens}, or {tokens[-1:]} for all rows.")
    positions = jnp.broadcast_to(positions, tokens)

    def turn(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        # nnx.RoPE takes one row of positions: all tokens of the batch make one.
        tokens, places = rows
        return rope(tokens.swapaxes(0, 1), places).swapaxes(0, 1).astype(x.dtype)

    rows = x.reshape(-1, *x.shape[-2:]), positions.reshape(-1)
    return (ops.in_tiles(turn, rows) if batch_invariant else turn(rows)).reshape(x.shape)


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[int, ...]:
    if min(query.ndim, key.ndim, value.ndim) < 3 or not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise InvalidInput(
            f"query, key and value have shapes {query.shape}, {key.shape} and {value.shape}; they must be "
            "[batch..., length, heads, head_size] with the same batch."
        )
    if key.shape[-3:-1] != value.shape[-3:-1]:
        raise InvalidInput("key", f"has shape {key.shape} and value {value.shape}", "lengths and heads must be equal")
    return query.shape[:-3]


def _scores_like(name: str, array: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
    """Returns a mask or bias as [batch, heads or 1, length or 1, key_length]."""
    check_arrays(**{name: array})
    batch_dims, wanted = query.shape[:-3], (query.shape[-2], query.shape[-3], key.shape[-3])
    full = (*batch_dims, *wanted)
    fits = array.ndim <= len(full) and all(
        size in (1, whole) for size, whole in zip(array.shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        wanted = f"it must be broadcastable to [batch..., num_heads, length, key_length] = {list(full)}"
        raise InvalidInput(name, f"has shape {array.shape}", wanted)
    array = array.reshape((1,) * (len(full) - array.ndim) + array.shape)
    array = jnp.broadcast_to(array, (*batch_dims, *array.shape[-3:-1], key.shape[-3]))
    return array.reshape(math.prod(batch_dims), *array.shape[-3:])


def _sow(module: Any, batch_dims: tuple[int, ...]) -> Callable[[jax.Array], None]:
    collection = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"

    def sow(weights: jax.Array) -> None:
        module.sow(collection, "attention_weights", weights.reshape(*batch_dims, *weights.shape[1:]))

    return sow
