"""The short causal convolution of layers with a state, on JAX arrays: by keywords, and in jnp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import bridge
from jattn.ops.arguments import documented
from jattn.ops.chunks import slots_of
from jattn.ops.deferred import advance
from jattn.ops.xla import JaxOp, register
from torch_core.state.conv_call import OUTS, CausalConvCall


@documented(CausalConvCall)
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    query_start_loc: jax.Array,
    *,
    bias: jax.Array | None = None,
    conv_states: jax.Array | None = None,
    cache_indices: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    num_kept_tokens: jax.Array | None = None,
    activation: str | None = None,
    first_column: int | None = None,
    out_sizes: tuple[int, ...] | None = None,
    defer_states: bool = False,
    implementation: str | None = None,
) -> tuple[Any, Any]:
    """Convolves each channel with its last `width` tokens, over ragged sequences, from and to their state slots.

    One call takes prompts, chunks of prompts and decoded tokens together; a sequence's results are the same bits in
    one call or in several. The states are replaced in place if the caller donated them to the jitted step; otherwise
    XLA copies them first. Use the returned array and never the old one. Differentiable in `x`, `weight`, `bias` and
    `conv_states`, by jnp, with sums in a fixed order. Channels can be split over devices.

    Returns:
        The results, float[num_tokens, num_channels], 0 in rows of padding, or a tuple of arrays of `out_sizes`; and the
        states with the new ones in them, None without states.

    Example:
        >>> import jax.numpy as jnp
        >>> x, weight, starts = jnp.array([[3.0], [4.0]]), jnp.array([[10.0, 1.0]]), jnp.array([0, 2])
        >>> out, states = causal_conv1d(x, weight, starts, conv_states=jnp.array([[[2.0]]]))
        >>> out.tolist(), states.tolist()
        ([[23.0], [34.0]], [[[4.0]]])
    """
    call = CausalConvCall(
        x=x,
        weight=weight,
        query_start_loc=query_start_loc,
        bias=bias,
        conv_states=conv_states,
        cache_indices=cache_indices,
        has_initial_state=has_initial_state,
        num_kept_tokens=num_kept_tokens,
        activation=activation,
        first_column=first_column,
        out_sizes=out_sizes,
    )
    if first_column is None and out_sizes is None:
        return advance(call, implementation, defer_states)
    call.check()
    if not bridge.may_be_split(x):
        return advance(call, implementation, defer_states)
    # Other columns, and parts of the results, are not split as the channels are.
    out, states = advance(replace(call.of_channels(), out_sizes=None), implementation, defer_states)
    return out if out_sizes is None else _parts(out, out_sizes), states


def _parts(out: jax.Array, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.split(out, np.cumsum(sizes)[:-1], axis=-1))


def _causal_conv1d(call: CausalConvCall[jax.Array]) -> dict[str, jax.Array]:
    """Computes a checked call.

    Every sequence's inputs follow its state in one array, so one shift of that array serves all sequences. All indices
    are unique: the transpose of a read is a write, never a sum whose order could vary.
    """
    call = call.of_channels()
    past, (num_tokens, num_channels) = call.width - 1, call.x.shape
    wide = jnp.float64 if call.x.dtype == jnp.float64 else jnp.float32
    starts = call.query_start_loc
    seqs, tokens = (jnp.arange(count, dtype=jnp.int32) for count in (call.num_seqs, num_tokens))
    lens, first = jnp.diff(starts), starts[:-1] + past * seqs
    num_rows = num_tokens + past * call.num_seqs
    is_token = tokens < starts[-1]
    # Padding is past the end, each row at a place of its own.
    rows = tokens + jnp.where(is_token, past * (jnp.searchsorted(starts[1:], tokens, side="right") + 1), num_rows)
    history = first[:, None] + jnp.arange(past, dtype=jnp.int32)[None]
    inputs = jnp.zeros((num_rows, num_channels), wide)
    inputs = inputs.at[rows].set(call.x.astype(wide), mode="drop", unique_indices=True)
    found: dict[str, jax.Array] = {}
    if call.conv_states is not None:
        states, absent = call.conv_states, call.conv_states.shape[0] + seqs
        slots, is_kept, known = slots_of(call)
        read = states.at[jnp.where(known, slots, absent)].get(mode="fill", fill_value=0, unique_indices=True)
        inputs = inputs.at[history].set(read.astype(wide), unique_indices=True)
        lasts = lens if call.num_kept_tokens is None else call.num_kept_tokens
        new = inputs.at[history + lasts[:, None]].get(unique_indices=True).astype(states.dtype)
        kept = jnp.where(is_kept, slots, absent)
        found["conv_states"] = states.at[kept].set(new, mode="drop", unique_indices=True)
    sums = jnp.zeros((), wide) if call.bias is None else call.bias.astype(wide)[None]
    for tap in range(call.width):
        sums = sums + call.weight[None, :, tap].astype(wide) * inputs[tap : num_rows - past + tap]
    out = sums.at[rows - past].get(mode="fill", fill_value=0, unique_indices=True)
    if call.activation == "silu":
        out = jax.nn.silu(out)
    out = out.astype(call.x.dtype)
    parts = (out,) if call.out_sizes is None else _parts(out, call.out_sizes)
    return {**dict(zip(OUTS, parts, strict=False)), **found}


register(JaxOp(call=CausalConvCall, jnp=_causal_conv1d, jnp_derivative=True))
