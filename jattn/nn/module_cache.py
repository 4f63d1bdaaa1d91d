"""Paged caches that a module holds itself, with a warning for lost updates."""

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


class PagedCache(nnx.Cache):
    """A cache variable of `jattn.nn.MultiHeadAttention`; the filter `nnx.Cache` matches it too.

    It warns if an update stays inside a traced function. If `f` in `jax.jit(f)(module)` does not return the module, the
    update is lost, and later steps would attend to a stale cache.
    """

    __slots__ = ("_held", "_unread")

    # Code that carries a value out of a trace (a pytree, nnx's transformations, a user) reads it under this name.
    @property
    def _raw_value(self) -> Any:
        object.__setattr__(self, "_unread", False)
        return self._held

    @_raw_value.setter
    def _raw_value(self, value: Any) -> None:
        object.__setattr__(self, "_held", value)

    def peek(self) -> jax.Array:
        """Returns the value without marking the last update as read."""
        return self._held

    def put(self, value: jax.Array) -> None:
        """Sets the value, and marks a traced one as an update that nothing has read yet."""
        if isinstance(self._held, np.ndarray):
            # The array was read from a file, and nnx would write into its memory.
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


class CacheFixes(NamedTuple):
    """The fixes that a module's messages about its cache name.

    Attributes:
        deleted: for a cache that was donated.
        batch: for a cache of another batch or other heads.
        full: for a cache that is too short.
    """

    deleted: str
    batch: str
    full: str


#: Of `jattn.nn.MultiHeadAttention`.
NNX_FIXES = CacheFixes(
    deleted="go on with the module that the step returned, or call init_cache.",
    batch="call init_cache with the inputs' batch. If a state was loaded, leave flax's cache out of it: "
    "nnx.state(module, nnx.Not(nnx.Cache)).",
    full="call init_cache with a longer input_shape.",
)


class ModuleCache(NamedTuple):
    """The arrays of a module's cache.

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
        """Number of consecutive blocks of each sequence."""
        return (self.key.shape[0] - 1) // max(1, self.seq_lens.size)

    @property
    def max_length(self) -> int:
        """Capacity of a sequence in tokens, a multiple of the block size."""
        return self.blocks_per_sequence * self.key.shape[1]


def new_module_cache(
    batch_dims: Sequence[int], max_length: int, core: PagedAttention, dtype: Any, block_size: int
) -> ModuleCache:
    """Returns an empty cache. It holds zeros, because the contents of unwritten slots must be finite."""
    for name, size in (("max_length", max_length), ("block_size", block_size)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidInput(name, f"is {size!r}", "it must be an int of at least 1")
    num_blocks = 1 + math.prod(batch_dims) * -(-max_length // block_size)
    shape = (num_blocks, block_size, core.num_kv_heads, core.head_dim)
    return ModuleCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(tuple(batch_dims), jnp.int32))


def check_module_cache(
    cache: ModuleCache, batch_dims: Sequence[int], core: PagedAttention, fixes: CacheFixes = NNX_FIXES
) -> None:
    """Checks that a cache is not deleted and belongs to this module and batch."""
    refuse_donated("the module's cache", cache, fixes.deleted)
    if cache.key.shape[2:] != (core.num_kv_heads, core.head_dim) or cache.seq_lens.shape != tuple(batch_dims):
        raise InvalidInput(
            f"the module's cache holds {cache.key.shape[2]} heads of {cache.key.shape[3]} for a batch of "
            f"{cache.seq_lens.shape}, and the inputs need {core.num_kv_heads} heads of {core.head_dim} for "
            f"{tuple(batch_dims)}; {fixes.batch}"
        )


def decode_module_cache(
    core: PagedAttention,
    query: jax.Array,
    new: tuple[jax.Array, jax.Array] | None,
    cache: ModuleCache,
    *,
    lengths: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    max_length: int | None = None,
    fixes: CacheFixes = NNX_FIXES,
    **options: Any,
) -> tuple[jax.Array, ModuleCache]:
    """Appends the new tokens of each row to its sequence, and attends to the whole sequence.

    A causal core is self-attention. Any other is cross attention: `new` keys and values [batch..., key_length,
    num_kv_heads, head_dim] replace those in the cache, and without them the cache is only read. A sequence has at most
    `max_length` tokens, or those of its blocks. The query is
    [batch..., length, num_heads, head_dim]; `options` are keywords of the core's call. In the output, rows of padding
    are 0. Rows that do not fit into the cache are NaN, because a traced function cannot raise; outside jit they raise
    RequestTooLong.
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
        max_length = cache.max_length if max_length is None else max_length
        _check_room(after, max_length, fixes)
        overflow = after > max_length
        positions = before[:, None] + jnp.arange(key_length, dtype=jnp.int32)[None]
        block = jnp.take_along_axis(tables, jnp.minimum(positions // block_size, blocks - 1), 1)
        slots = block * block_size + positions % block_size
        slots = keys.pack(jnp.where(overflow[:, None], PAD_SLOT_ID, slots).reshape(sequences, key_length))
        if keys.real is not None:
            slots = jnp.where(jnp.arange(slots.size, dtype=jnp.int32) < keys.start_loc[-1], slots, PAD_SLOT_ID)
    metadata = AttentionMetadata(
        block_tables=tables,
        # A sequence that does not fit writes nothing and reads nothing.
        seq_lens=jnp.where(overflow, 0, after),
        query_start_loc=queries.start_loc,
        slot_mapping=slots,
        max_query_len=length,
    )
    # Attention takes one dtype: that of the cache, unless the cache has 8 bits.
    dtype = cache.key.dtype if cache.key.dtype.itemsize > 1 else query.dtype
    key, value = (None, None) if new is None or keys is None else (keys.pack(_rows(x)).astype(dtype) for x in new)
    packed = queries.pack(_rows(query)).astype(dtype)
    out, (key, value) = core(packed, key, value, (cache.key, cache.value), metadata, **options)
    out = queries.unpack(out).astype(query.dtype).reshape(sequences, length, *out.shape[1:])
    out = jnp.where(overflow[:, None, None, None], jnp.nan, out)
    return out.reshape(*batch_dims, *out.shape[1:]), ModuleCache(key, value, after.reshape(cache.seq_lens.shape))


def _rows(array: jax.Array) -> jax.Array:
    return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])


def _check_room(after: jax.Array, max_length: int, fixes: CacheFixes) -> None:
    # A traced array has no values.
    if isinstance(after, Tracer):
        return
    # The host waits for the lengths, as the ops wait for slots. An explicit transfer passes a transfer guard.
    lengths = jax.device_get(after)
    longest = int(lengths.max(initial=0))
    if longest > max_length:
        raise RequestTooLong(
            f"sequence {lengths.argmax()} would hold {longest} tokens and the module's cache holds "
            f"{max_length} of each; {fixes.full}"
        )
