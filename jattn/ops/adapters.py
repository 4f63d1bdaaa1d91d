"""Low-rank adapters on JAX arrays: the rows of each, by keywords, and in plain jnp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jattn.ops.arguments import documented
from jattn.ops.run import run
from jattn.ops.xla import JaxOp, register
from torch_core.adapters.call import LoraCall
from torch_core.adapters.tiles import row_tiles
from torch_core.base.errors import InvalidInput

# Up to this number of slots the tiles of rows are found by comparisons, once for all layers.
_TABLED_SLOTS = 64


class AdapterRows(NamedTuple):
    """The rows of each adapter, in the order of their slots; see `add_lora_linear`.

    Attributes:
        token_indices_sorted_by_lora_ids: int32[num_rows].
        lora_token_start_loc: int32[num_slots + 1].
        lora_tiles: int32[num_tiles, 32], or None.
    """

    token_indices_sorted_by_lora_ids: jax.Array
    lora_token_start_loc: jax.Array
    lora_tiles: jax.Array | None = None

    @classmethod
    def of(cls, slots: jax.Array, num_slots: int) -> AdapterRows:
        """Returns the rows of each slot; rows with a number outside of the slots have no adapter.

        Args:
            slots: int32[num_rows].
            num_slots: number of slots.

        Raises:
            InvalidInput: slots are no array of whole numbers with one axis.

        Example:
            >>> rows = AdapterRows.of(jnp.array([1, -1, 0, 1]), 2)
            >>> rows.token_indices_sorted_by_lora_ids.tolist(), rows.lora_token_start_loc.tolist()
            ([2, 0, 3, 1], [0, 1, 3])
            >>> rows.lora_tiles[:, :3].tolist()
            [[0, 0, 1], [1, 1, 3], [2, 3, 4]]
        """
        if getattr(slots, "ndim", None) != 1 or not jnp.issubdtype(slots.dtype, jnp.integer):
            raise InvalidInput("slots", value=slots, wanted="it must be an array of int32[num_rows]")
        slots = slots.astype(jnp.int32)
        slots = jnp.where((slots >= 0) & (slots < num_slots), slots, num_slots)
        slots, order = jax.lax.sort((slots, jnp.arange(slots.size, dtype=jnp.int32)), num_keys=1)
        # Unrolled it is one launch on a GPU; sums of counts would be 20.
        wanted = jnp.arange(num_slots + 1, dtype=jnp.int32)
        starts = jnp.searchsorted(slots, wanted, method="scan_unrolled").astype(jnp.int32)
        has_table = slots.size > 0 and num_slots <= _TABLED_SLOTS
        return cls(order, starts, row_tiles(order, starts, jnp) if has_table else None)


@documented(LoraCall)
def add_lora_linear(
    x: jax.Array,
    y: jax.Array | None,
    lora_a: jax.Array,
    lora_b: jax.Array,
    token_indices_sorted_by_lora_ids: jax.Array,
    lora_token_start_loc: jax.Array,
    lora_tiles: jax.Array | None = None,
    *,
    output_slices: tuple[int, ...] | None = None,
    num_heads: int = 1,
    activation: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Adds the low-rank adapter of each row's slot to a linear layer's results.

    A row without an adapter is not touched, and an adapter without rows is not read. Other adapters of the same shapes
    are other arrays: nothing is compiled again. Differentiable in `x`, `y`, `lora_a` and `lora_b`, by jnp.

    Args:
        output_slices: None for a single layer, which takes y if there are heads.

    Returns:
        The new y, in y's memory if y is not used again; or the result of `activation`. To write products alone (y=None)
        and have XLA's product of 16-bit numbers add them reads and writes less memory than to add them afterwards.

    Example:
        >>> x, y, rows = jnp.ones((2, 3)), jnp.zeros((2, 4)), AdapterRows.of(jnp.array([-1, 0]), 1)
        >>> add_lora_linear(x, y, jnp.ones((1, 1, 3)), jnp.ones((1, 4, 1)), *rows).tolist()
        [[0.0, 0.0, 0.0, 0.0], [3.0, 3.0, 3.0, 3.0]]
    """
    call = LoraCall(
        x=x,
        y=y,
        lora_a=lora_a,
        lora_b=lora_b,
        token_indices_sorted_by_lora_ids=token_indices_sorted_by_lora_ids,
        lora_token_start_loc=lora_token_start_loc,
        output_slices=_one_slice(y, lora_b, num_heads) if output_slices is None else output_slices,
        num_heads=num_heads,
        activation=activation,
        lora_tiles=lora_tiles,
    )
    return run(call, implementation)["y" if call.adds else "out"]


def _one_slice(y: Any, lora_b: Any, num_heads: Any) -> tuple[int]:
    """Returns the columns of a single layer; the call's checks refuse operands that have none."""
    shape = getattr(lora_b if y is None else y, "shape", ())
    parts = num_heads if y is not None and isinstance(num_heads, int) and num_heads > 0 else 1
    return (shape[1] // parts if len(shape) > 1 else 1,)


def _add_lora_linear(call: LoraCall[jax.Array]) -> dict[str, jax.Array]:
    """Computes a checked call.

    `jax.lax.ragged_dot` would multiply every row with every slot's matrices on a CPU. Here a slot without rows costs
    nothing: where rows are fewer than slots, each reads its own matrices; else every slot multiplies all rows, which
    keep the products of their own.
    """
    starts, places = call.lora_token_start_loc, jnp.arange(call.num_rows, dtype=jnp.int32)
    call = replace(call, x=jnp.repeat(call.x, call.rows_of_input, axis=0))
    of_places = jnp.searchsorted(starts[1:], places, side="right", method="compare_all").astype(jnp.int32)
    slots = jnp.full_like(of_places, call.num_slots)
    slots = slots.at[call.token_indices_sorted_by_lora_ids].set(of_places, mode="drop")
    wide = jnp.float64 if call.x.dtype == jnp.float64 else jnp.float32
    total = _by_row(call, slots, wide) if len(call.x) < call.num_slots else _by_slot(call, slots, wide)
    if call.y is None:
        return {"out": total.astype(call.x.dtype)}
    total = call.y.astype(wide) + total
    if call.activation is None:
        return {"y": total.astype(call.y.dtype)}
    gate, up = jnp.split(total, 2, axis=1)
    return {"out": (jax.nn.silu(gate) * up).astype(call.x.dtype)}


def _by_row(call: LoraCall[jax.Array], slots: jax.Array, wide: Any) -> jax.Array:
    """Returns the products of each row, 0 without a slot; the slots may be many, as those of experts are."""

    def one_row(operands: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, slot = operands

        def product() -> jax.Array:
            lora_a, lora_b = (jax.lax.dynamic_index_in_dim(each, slot, keepdims=False) for each in matrices)
            return _products(row[None], lora_a, lora_b, call, wide)[0]

        return jax.lax.cond(slot < call.num_slots, product, lambda: jnp.zeros(_columns(call), wide))

    matrices = call.lora_a, call.lora_b
    return jax.lax.map(one_row, (call.x, slots))


def _by_slot(call: LoraCall[jax.Array], slots: jax.Array, wide: Any) -> jax.Array:
    """Returns the same, slot by slot; no matrix is copied for each row."""

    def add(total: jax.Array, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        slot, count, lora_a, lora_b = operands

        def added() -> jax.Array:
            return jnp.where((slots == slot)[:, None], _products(call.x, lora_a, lora_b, call, wide), total)

        return jax.lax.cond(count > 0, added, lambda: total), None

    counts = jnp.diff(call.lora_token_start_loc)
    operands = (jnp.arange(call.num_slots, dtype=jnp.int32), counts, call.lora_a, call.lora_b)
    return jax.lax.scan(add, jnp.zeros((len(call.x), _columns(call)), wide), operands)[0]


def _products(x: jax.Array, lora_a: jax.Array, lora_b: jax.Array, call: LoraCall[jax.Array], wide: Any) -> jax.Array:
    """Returns the products of rows with one slot's matrices."""
    heads, size = call.num_heads, sum(call.output_slices)
    # Of each head, or the same for all.
    lora_a, lora_b = lora_a.reshape(call.first_heads, -1, lora_a.shape[1]), lora_b.reshape(-1, size, call.rank)
    lora_a, lora_b = (jnp.broadcast_to(each, (heads, *each.shape[1:])) for each in (lora_a, lora_b))
    parts = x.reshape(len(x), heads, -1)
    inner = jnp.einsum("thi,hri->thr", parts, lora_a, preferred_element_type=wide).astype(x.dtype)
    products, first = [], 0
    for index, columns in enumerate(call.output_slices):
        own, second = inner[..., index * call.rank : (index + 1) * call.rank], lora_b[:, first : first + columns]
        products.append(jnp.einsum("thr,hor->tho", own, second, preferred_element_type=wide))
        first += columns
    return jnp.concatenate(products, axis=-1).reshape(len(x), -1)


def _columns(call: LoraCall[jax.Array]) -> int:
    return call.num_heads * sum(call.output_slices)


register(JaxOp(call=LoraCall, jnp=_add_lora_linear, jnp_derivative=True))
