"""Paged caches that a module holds itself: blocks and a length for each sequence, and lost updates found."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from jattn.metadata import AttentionMetadata
from jattn.nn.checks import refuse_donated
from jattn.nn.padded import Packing, flat_lengths, real_tokens
from jattn.nn.paged import PagedAttention
from torch_core.base.errors import InvalidInput, RequestTooLong
from torch_core.base.specs import PAD_SLOT_ID

__all__ = ["ModuleCache", "PagedCache", "check_module_cache", "decode_module_cache", "new_module_cache"]


class PagedCache(nnx.Cache):
    """A cache variable of `jattn.nn.MultiHeadAttention`; `nnx.Cache` as a filter finds it too.

    It warns if a traced update never leaves the traced function: `jax.jit(f)(module)` loses the module's updates if `f`
    does not return the module, and every later step would attend to a stale cache.
    """

    __slots__ = ("_held", "_unread")

    # Every way out of a trace (a pytree, nnx's transformations, a user) reads the value under this name.
    @property
    def _raw_value(self) -> Any:
        object.__setattr__(self, "_unread", False)
        return self._held

    @_raw_value.setter
    def _raw_value(self, value: Any) -> None:
        object.__setattr__(self, "_held", value)

    def peek(self) -> jax.Array:
        """Returns the value; unlike any other read this does not count as carrying it on."""
        return self._held

    def put(self, value: jax.Array) -> None:
        """Sets the value, and remembers whether somebody must still carry it out of a trace."""
        if isinstance(self._held, np.ndarray):
            # Read from a file; nnx would write into that memory.
            self._raw_value = jnp.asarray(self._held)
        self[...] = value
        object.__setattr__(self, "_unread", isinstance(value, Tracer))

    def __del__(self) -> None:
        if getattr(self, "_unread", False):
            warnings.warn(
                "a traced function wrote a module's KV cache and dropped it: the update is lost. Return the module "
                "from a function under jax.jit (or its nnx.state), or use nnx.jit, which carries updates itself.",
                RuntimeWarning,
                stacklevel=2,
            )


class ModuleCache(NamedTuple):
    """The arrays of a held cache.

    Attributes:
        key: [1 + sequences * blocks, block_size, num_kv_heads, head_dim]; block 0 is the null block.
        value: the same.
        seq_lens: int32[batch...], tokens of each sequence.
    """

    key: jax.Array
    value: jax.Array
    seq_lens: jax.Array

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks that each sequence owns, one after the other."""
        return (self.key.shape[0] - 1) // max(1, self.seq_lens.size)

    @property
    def max_length(self) -> int:
        """Tokens that fit into a sequence: whole blocks."""
        return self.blocks_per_sequence * self.key.shape[1]


def new_module_cache(
    batch_dims: Sequence[int], max_length: int, core: PagedAttention, dtype: Any, block_size: int
) -> ModuleCache:
    """Returns an empty cache of zeros, because unwritten slots must be finite.

    Raises:
        InvalidInput: a size below 1.
    """
    for name, size in (("max_length", max_length), ("block_size", block_size)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidInput(f"{name} is {size!r}; it must be an int of at least 1.")
    num_blocks = 1 + math.prod(batch_dims) * -(-max_length // block_size)
    shape = (num_blocks, block_size, core.num_kv_heads, core.head_dim)
    return ModuleCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(tuple(batch_dims), jnp.int32))


def check_module_cache(cache: ModuleCache, batch_dims: Sequence[int], core: PagedAttention) -> None:
    """Refuses a cache that a donated step consumed, and one of another module or batch.

    Raises:
        InvalidInput: the message has the value and the required value.
    """
    refuse_donated("the module's cache", cache, "go on with the module that the step returned, or call init_cache.")
    if cache.key.shape[2:] != (core.num_kv_heads, core.head_dim) or cache.seq_lens.shape != tuple(batch_dims):
        raise InvalidInput(
            f"the module's cache holds {cache.key.shape[2]} heads of {cache.key.shape[3]} for a batch of "
            f"{cache.seq_lens.shape}, and the inputs need {core.num_kv_heads} heads of {core.head_dim} for "
            f"{tuple(batch_dims)}; call init_cache with the inputs' batch."
        )


def decode_module_cache(
    core: PagedAttention,
    query: jax.Array,
    new: tuple[jax.Array, jax.Array] | None,
    cache: ModuleCache,
    *,
    lengths: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, ModuleCache]:
    """Appends each row's new tokens to its sequence and attends to the whole of it; any number of tokens at once.

    Args:
        core: causal for self-attention; otherwise the new keys replace the cached ones, and without new keys the cache
            is only read: cross attention.
        query: [batch..., length, num_heads, head_dim].
        new: keys and values, [batch..., key_length, num_kv_heads, head_dim].
        cache: see `ModuleCache`.
        lengths: int32[batch...], real tokens of each row of queries; None for all.
        key_lengths: the same of keys, in cross attention alone.
        **options: options of the core for this call.

    Returns:
        [batch..., length, num_heads, head_dim] and the cache. Rows of padding are 0; rows that no longer fit into
        the cache are NaN, because under jit nothing can be raised.

    Raises:
        InvalidInput: key_lengths of self-attention, or lengths that are none of the rows.
        RequestTooLong: the tokens do not fit; outside jit only.
    """
    if core.causal and key_lengths is not None:
        raise InvalidInput("key_lengths is given for self-attention with a cache; lengths says which tokens are new.")
    batch_dims, length, sequences = query.shape[:-3], query.shape[-3], cache.seq_lens.size
    lens = cache.seq_lens.reshape(-1)
    blocks, block_size = cache.blocks_per_sequence, cache.key.shape[1]
    lengths = flat_lengths("lengths", lengths, batch_dims, length)
    queries = Packing.of(sequences, length, real_tokens(lengths, length))
    before = lens if core.causal else jnp.zeros_like(lens)
    after, overflow, keys = lens, jnp.zeros_like(lens, bool), None
    tables = 1 + jnp.arange(sequences * blocks, dtype=jnp.int32).reshape(sequences, blocks)
    slots = jnp.zeros(0, jnp.int32)
    if new is not None:
        key_length = new[0].shape[-3]
        key_lengths = lengths if core.causal else flat_lengths("key_lengths", key_lengths, batch_dims, key_length)
        keys = Packing.of(sequences, key_length, real_tokens(key_lengths, key_length))
        after = before + jnp.diff(keys.start_loc)
        _check_room(cache, after)
        overflow = after > cache.max_length
        positions = before[:, None] + jnp.arange(key_length, dtype=jnp.int32)
        block = jnp.take_along_axis(tables, jnp.minimum(positions // block_size, blocks - 1), 1)
        slots = block * block_size + positions % block_size
        slots = keys.pack(jnp.where(overflow[:, None], PAD_SLOT_ID, slots).reshape(sequences, key_length))
        if keys.real is not None:
            slots = jnp.where(jnp.arange(slots.size) < keys.start_loc[-1], slots, PAD_SLOT_ID)
    metadata = AttentionMetadata(
        block_tables=tables,
        # A sequence that does not fit writes nothing and reads nothing.
        seq_lens=jnp.where(overflow, 0, after),
        query_start_loc=queries.start_loc,
        slot_mapping=slots,
        max_query_len=length,
    )
    # Attention takes one dtype: a wider or narrower cache decides it, 8 bits do not.
    dtype = cache.key.dtype if cache.key.dtype.itemsize > 1 else query.dtype
    key, value = (None, None) if new is None or keys is None else (keys.pack(_rows(x)).astype(dtype) for x in new)
    packed = queries.pack(_rows(query)).astype(dtype)
    out, (key, value) = core(packed, key, value, (cache.key, cache.value), metadata, **options)
    out = queries.unpack(out).astype(query.dtype).reshape(sequences, length, *out.shape[1:])
    out = jnp.where(overflow[:, None, None, None], jnp.nan, out)
    return out.reshape(*batch_dims, *out.shape[1:]), ModuleCache(key, value, after.reshape(cache.seq_lens.shape))


def _rows(array: jax.Array) -> jax.Array:
    return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])


def _check_room(cache: ModuleCache, after: jax.Array) -> None:
    # Traced arrays have no values.
    if isinstance(after, Tracer):
        return
    # Waited for on any device, as the ops wait for slots and lengths that follow from these; explicitly, which is no
    # matter to a transfer guard.
    found = jax.device_get(after)
    longest = int(found.max(initial=0))
    if longest > cache.max_length:
        raise RequestTooLong(
            f"sequence {found.argmax()} would hold {longest} tokens and the module's cache holds "
            f"{cache.max_length} of each; call init_cache with a longer input_shape."
        )
