"""How a call can be split over devices without a collective: by heads or channels, and by sequences with even rows.

The annotations of the call's fields say which axes may be split. Packed rows are addressed by cumulative offsets, which
XLA cannot split. They are split if the shapes prove that every sequence has the same number of rows; the device checks
the values that shapes do not determine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from torch_core.base.errors import Unsupported
from torch_core.launch.call import Call, array_fields

HEADS = ("num_heads", "num_kv_heads")
# A call has heads or channels, which are columns of an array of channels alone.
_CHANNELS = "num_channels"
_PARTS = (*HEADS, _CHANNELS, "num_columns")
_ROWS = ("num_seqs", "num_tokens", "num_keys", "num_values", "num_slots")
_BLOCKS = "num_blocks"


@dataclass(frozen=True)
class Split:
    """Over which mesh axes a call is split.

    Attributes:
        heads: axes that split heads, or channels.
        rows: axes that split sequences and their rows.
        blocks: axes that split the cache's blocks: a part's sequences live in its own.
    """

    heads: tuple[str, ...]
    rows: tuple[str, ...]
    blocks: tuple[str, ...]

    def spec(self, dims: Sequence[str], shape: Sequence[int]) -> PartitionSpec:
        """Returns how an array with these axes is split."""
        axes = {_BLOCKS: self.blocks, **dict.fromkeys(_ROWS, self.rows), **dict.fromkeys(_PARTS, self.heads)}
        # One head serves all.
        each = [() if dim in _PARTS and size == 1 else axes.get(dim, ()) for dim, size in zip(dims, shape, strict=True)]
        return PartitionSpec(*(found or None for found in each))

    def localised(self, call: Call[jax.Array]) -> tuple[Call[jax.Array], jax.Array | None]:
        """Returns one part's call with offsets, block ids and slots of its own; runs where mesh axes have names.

        Returns:
            The call, and whether its rows and blocks are this part's as the shapes promise; None if nothing tells.
        """
        if not self.rows and not self.blocks:
            return call, None
        index, arrays, fits = jax.lax.axis_index(self.rows or self.blocks), dict(call.arrays()), jnp.bool_(True)
        for name, rows_in in (("query_start_loc", getattr(call, "tokens_in", "query")), ("key_start_loc", "key")):
            if name in arrays:
                rows, parts = arrays[rows_in].shape[0], jax.lax.axis_size(self.rows)
                num_seqs = (arrays[name].shape[0] - 1) // parts
                starts, total = (x - index * rows for x in (arrays[name], arrays[name][-1]))
                starts = jax.lax.dynamic_slice_in_dim(starts, index * num_seqs, num_seqs + 1)
                empty = starts[1:] == starts[:-1]
                fits &= (empty | ((starts[:-1] >= 0) & (starts[1:] <= rows))).all()
                # No row here is another part's.
                fits &= (starts[0] <= 0) & (starts[-1] >= jnp.minimum(rows, total))
                arrays[name] = starts.clip(0, rows)
        if self.blocks:
            sizes = {
                dim: size for name in arrays for dim, size in zip(dims_of(call, name), arrays[name].shape, strict=True)
            }
            num_blocks, block_size = sizes[_BLOCKS], sizes.get("block_size", 1)
            if "block_tables" in arrays:
                tables = arrays["block_tables"] - index * num_blocks
                own = (tables >= 0) & (tables < num_blocks)
                live = jnp.arange(tables.shape[1]) * block_size < arrays["seq_lens"][:, None]
                # A block that was given back because no query sees it is the null block, wherever it was.
                fits &= (own | ~live | (arrays["block_tables"] == 0)).all()
                arrays["block_tables"] = jnp.where(own, tables, 0)
            else:
                name = "slot_mapping" if "slot_mapping" in arrays else "block_mapping"
                # A copy counts blocks, whose other axes have no name.
                units = num_blocks * block_size
                local = arrays[name] - index * units
                own = (arrays[name] >= 0) & (local >= 0) & (local < units)
                arrays[name] = jnp.where(own if own.ndim == 1 else own.all(1, keepdims=True), local, -1)
        return call.with_arrays(arrays), fits if call.splits_sequences else None

    def joined(self, call: Call[Any], name: str, result: jax.Array, fits: jax.Array | None) -> jax.Array:
        """Returns a part's result as the whole call's, or NaN if the part's values contradict the shapes."""
        if name in call.written:
            return result
        if name.startswith("d_"):
            dims, shape = dims_of(call, name), call.outputs()[name].shape
            shared = [dim in _PARTS and size == 1 for dim, size in zip(dims, shape, strict=True)]
            # The gradient of a head that all heads share, and of arrays that all sequences share.
            over = (self.heads if any(shared) else ()) + (() if set(dims) & set(_ROWS) else self.rows)
            if over:
                result = jax.lax.psum(result.astype(jnp.float32), over).astype(result.dtype)
        if fits is None:
            return result
        return jnp.where(fits, result, jnp.asarray(jnp.nan, result.dtype))


def dims_of(call: Call[Any], name: str) -> tuple[str, ...]:
    """Returns the names of the axes of an operand or a result."""
    fields = array_fields(type(call))
    if name == "lse" and name not in fields:
        return dims_of(call, "out" if "out" in fields else "out_a")[:2]
    if name == "d_initial":
        # Of the states of a batch, not of the slots.
        return ("num_seqs", *fields["states"].dims[1:])
    # A gradient has the axes of its operand.
    field = fields.get(name, fields.get(name.removeprefix("d_")))
    if field is None:
        shape, rows = call.outputs()[name].shape, _num_rows(call)
        return tuple("num_tokens" if axis == 0 and size == rows else f"axis {axis}" for axis, size in enumerate(shape))
    dims = field.dims
    if "..." not in dims:
        return dims
    # Blocks that are copied whole: heads are where all caches have them, and latents have none.
    ndim = len(call.arrays()[name].shape)
    heads = ndim - 2 if ndim > 3 else None
    return (dims[0], *("num_kv_heads" if axis == heads else f"axis {axis}" for axis in range(1, ndim)))


def _num_rows(call: Call[Any]) -> int | None:
    """Returns the tokens of a call, of which some have results that are no operand's twins; None without tokens."""
    dims = {name: field.dims[0] for name, field in array_fields(type(call)).items()}
    return next((array.shape[0] for name, array in call.arrays().items() if dims[name] == "num_tokens"), None)


def split_of(call: Call[Any], mesh: Any, found: Mapping[str, PartitionSpec]) -> Split:
    """Returns how a call has to be split, given how its operands are.

    An operand that is whole on every device is split there, unless it is written: that would move it.

    Args:
        call: call with specs as arrays.
        mesh: the devices.
        found: the sharding of each operand.

    Raises:
        Unsupported: along other axes, in different ways, or rows that are not even.
    """
    heads: dict[str, tuple[str, ...]] = {}
    rows: dict[str, tuple[str, ...]] = {}
    blocks: dict[str, tuple[str, ...]] = {}
    shapes = {name: array.shape for name, array in call.arrays().items()}
    for name, spec in found.items():
        for dim, size, axes in zip(
            dims_of(call, name), shapes[name], _axes_of(mesh, spec, len(shapes[name])), strict=True
        ):
            if dim in _PARTS and size > 1:
                heads[name] = axes
            elif dim == _BLOCKS:
                blocks[name] = axes
            elif axes and dim in _ROWS:
                rows[name] = axes
            elif axes and dim not in _PARTS:
                raise Unsupported(
                    f"{call.name}: {name} is split along {dim} by mesh axis {', '.join(axes)}; an op splits itself "
                    f"along heads or channels and along even sequences. {_UNDO}"
                )
    by_rows, by_blocks = _rows_split(call, mesh, rows, blocks, shapes)
    return Split(_heads_split(call, mesh, heads, {*by_rows, *by_blocks}, shapes), by_rows, by_blocks)


_UNDO = (
    "Undo that split of its operands and results (jax.lax.with_sharding_constraint, or jax.sharding.reshard along "
    "Explicit axes), or call it inside jax.shard_map with each device's own sequences and blocks "
    "(AttentionMetadata.build_sharded)."
)


def _heads_split(
    call: Call[Any], mesh: Any, heads: dict[str, tuple[str, ...]], others: set[str], shapes: Mapping[str, Any]
) -> tuple[str, ...]:
    sizes = {
        name: next(
            size for dim, size in zip(dims_of(call, name), shapes[name], strict=True) if dim in _PARTS and size > 1
        )
        for name in heads
    }
    ways = {axes for name, axes in heads.items() if axes or name in call.written}
    axes = max(ways, default=())
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if len(ways) > 1 or any(size % parts for size in sizes.values()) or set(axes) & others:
        parts_are = "channels" if any(_CHANNELS in dims_of(call, name) for name in heads) else "heads"
        given = ", ".join(
            f"{name} ({sizes[name]} {parts_are}) by {' and '.join(axes) or 'none'}" for name, axes in heads.items()
        )
        limit = {
            "heads": "the key/value heads; where those are fewer than devices, repeat them",
            "channels": "the number of channels",
        }
        raise Unsupported(
            f"{call.name}: {parts_are} are split by mesh axes as follows: {given}. Split all alike, by axes that split "
            f"nothing else and whose sizes divide {limit[parts_are]}."
        )
    return axes


def _rows_split(
    call: Call[Any],
    mesh: Any,
    rows: dict[str, tuple[str, ...]],
    blocks: dict[str, tuple[str, ...]],
    shapes: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    ways = {*rows.values(), *filter(None, blocks.values())}
    if not ways:
        return (), ()
    given = ", ".join(f"{name} by {' and '.join(axes) or 'none'}" for name, axes in {**rows, **blocks}.items())
    wholes = [name for name, axes in blocks.items() if not axes]
    if len(ways) > 1 or 0 < len(wholes) < len(blocks) or any(name in call.written for name in wholes):
        raise Unsupported(
            f"{call.name}: sequences and blocks are split by mesh axes as follows: {given}. Split all alike; what is "
            "written must be split as the rows are, since a whole copy on each device would get other devices' rows "
            f"nowhere. {_UNDO}"
        )
    axes = next(iter(ways))
    parts = math.prod(mesh.shape[axis] for axis in axes)
    by_blocks = axes if any(blocks.values()) else ()
    if "query_start_loc" in shapes and not call.splits_sequences:
        raise Unsupported(
            f"{call.name}: sequences are split by mesh axes as follows: {given}; this op's are not cut, since its "
            f"results could not say that they are less even than the shapes promise. {_UNDO}"
        )
    if not rows and not call.splits_sequences:
        # Each device takes the rows of its own blocks.
        return (), by_blocks
    counted = {
        dim: size
        for name in shapes
        for dim, size in zip(dims_of(call, name), shapes[name], strict=True)
        if dim in _ROWS
    }
    even = {"num_seqs", *call.rows_of_a_sequence()}
    if not call.splits_sequences:
        # Rows of their own, as many on every axis; a merge may know how many of them have two states.
        plain = len(set(counted.values())) == 1 and getattr(call, "num_tokens_a", None) is None
        even = set(counted) if plain else set()
    uneven = [f"{dim} = {size}" for dim, size in counted.items() if dim not in even or size % parts]
    if uneven:
        raise Unsupported(
            f"{call.name}: sequences are split by mesh axes as follows: {given}; {', '.join(uneven)} cannot be cut "
            f"into {parts} even parts of whole sequences. Every sequence must have max_query_len query rows "
            f"(num_tokens == num_seqs * max_query_len; keys likewise), as many sequences on each device. {_UNDO}"
        )
    return axes, by_blocks


def _axes_of(mesh: Any, spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes of more than one device that split each axis of an array."""
    named = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in (*spec, *[None] * (ndim - len(spec)))]
    return [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in named]
