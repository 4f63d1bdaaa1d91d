"""Low-rank adapters on JAX arrays: the rows of each, by keywords, and in plain jnp."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jattn.ops.arguments import documented
from jattn.ops.run import run
from jattn.ops.xla import JaxOp, register
from torch_core.adapters.call import LoraCall


class AdapterRows(NamedTuple):
    """The rows of each adapter, in the order of their slots; see `add_lora_linear`.

    Attributes:
        token_indices_sorted_by_lora_ids: int32[num_rows].
        lora_token_start_loc: int32[num_slots + 1].
    """

    token_indices_sorted_by_lora_ids: jax.Array
    lora_token_start_loc: jax.Array

    @classmethod
    def of(cls, slots: jax.Array, num_slots: int) -> AdapterRows:
        """Returns the rows of each slot; rows with a number outside of the slots have no adapter.

        Args:
            slots: int32[num_rows].
            num_slots: number of slots.

        Example:
            >>> rows = AdapterRows.of(jnp.array([1, -1, 0, 1]), 2)
            >>> rows.token_indices_sorted_by_lora_ids.tolist(), rows.lora_token_start_loc.tolist()
            ([2, 0, 3, 1], [0, 1, 3])
        """
        slots = jnp.where((slots >= 0) & (slots < num_slots), slots, num_slots)
        counts = (slots[:, None] == jnp.arange(num_slots)).sum(0, dtype=jnp.int32)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        return cls(jnp.argsort(slots, stable=True).astype(jnp.int32), starts)


@documented(LoraCall)
def add_lora_linear(
    x: jax.Array,
    y: jax.Array | None,
    lora_a: jax.Array,
    lora_b: jax.Array,
    token_indices_sorted_by_lora_ids: jax.Array,
    lora_token_start_loc: jax.Array,
    *,
    output_slices: tuple[int, ...] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Adds the low-rank adapter of each row's slot to a linear layer's results.

    A row without an adapter is not touched, and an adapter without rows is not read. Other adapters of the same shapes
    are other arrays: nothing is compiled again. Differentiable in `x`, `y`, `lora_a` and `lora_b`, by jnp.

    Args:
        output_slices: None for a single layer.

    Returns:
        The new y. It takes y's memory if y is not used again. To write products alone (y=None) and have XLA's product
        of 16-bit numbers add them reads and writes less memory than to add them afterwards.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; outside jit also starts that fall, or a row that occurs twice.
        Unsupported: the implementation cannot run here.

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
        output_slices=(lora_b.shape[1],) if output_slices is None else output_slices,
    )
    return run(call, implementation)["out" if y is None else "y"]


def _add_lora_linear(call: LoraCall[jax.Array]) -> dict[str, jax.Array]:
    """Computes a checked call: slot after slot, all rows by the slot's matrices, of which its own are kept.

    `jax.lax.ragged_dot` would multiply every row with every slot's matrices on a CPU. Here a slot without rows costs
    nothing, and no matrix is copied for each row.
    """
    x, slices, starts = call.x, call.output_slices, call.lora_token_start_loc
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    places = jnp.arange(len(x), dtype=jnp.int32)
    of_places = (places[:, None] >= starts[None, 1:]).sum(1, dtype=jnp.int32)
    slots = jnp.full_like(of_places, call.num_slots)
    slots = slots.at[call.token_indices_sorted_by_lora_ids].set(of_places, mode="drop")

    def add(total: jax.Array, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        slot, count, lora_a, lora_b = operands

        def added() -> jax.Array:
            inner = jnp.einsum("ti,ri->tr", x, lora_a, preferred_element_type=wide).astype(x.dtype)
            products, first = [], 0
            for index, size in enumerate(slices):
                own = inner[:, index * call.rank : (index + 1) * call.rank]
                matrix = lora_b[first : first + size]
                products.append(jnp.einsum("tr,or->to", own, matrix, preferred_element_type=wide))
                first += size
            return jnp.where((slots == slot)[:, None], jnp.concatenate(products, axis=1), total)

        return jax.lax.cond(count > 0, added, lambda: total), None

    operands = (jnp.arange(call.num_slots, dtype=jnp.int32), jnp.diff(starts), call.lora_a, call.lora_b)
    total, _ = jax.lax.scan(add, jnp.zeros((len(x), call.lora_b.shape[1]), wide), operands)
    if call.y is None:
        return {"out": total.astype(x.dtype)}
    return {"y": (call.y.astype(wide) + total).astype(call.y.dtype)}


register(JaxOp(call=LoraCall, jnp=_add_lora_linear, jnp_derivative=True))
