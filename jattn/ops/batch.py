"""The examples of a vmap: as more sequences of one call of dense attention, without a loop or a copy, or one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.call import DenseCall
from torch_core.launch.call import array_fields

# The first axes of arrays per sequence or token; arrays with other axes belong to all sequences.
_ROWS, _SEQS, _STARTS = ("num_tokens", "num_keys"), "num_seqs", "num_seqs+1"


def one_by_one(function: Callable[..., Any], in_batched: Sequence[bool], operands: Sequence[jax.Array]) -> Any:
    """Returns a function's results for all examples, one after the other; operands that all share are not copied."""

    def one(moved: list[jax.Array]) -> Any:
        left = iter(moved)
        return function(*(next(left) if moves else x for x, moves in zip(operands, in_batched, strict=True)))

    return jax.lax.map(one, [x for x, moves in zip(operands, in_batched, strict=True) if moves])


def folds(call: DenseCall[Any], arrays: Mapping[str, jax.Array], batched: Mapping[str, bool]) -> bool:
    """Whether the examples may become one call: the arrays that all sequences share are equal, or have no gradient."""
    axes = _first_axes(call, arrays)
    shared = [name for name, axis in axes.items() if axis not in (*_ROWS, _SEQS, _STARTS)]
    return not any(batched[name] for name in shared) and not (isinstance(call, DenseBackwardCall) and shared)


def fold(
    call: DenseCall[Any], arrays: Mapping[str, jax.Array], batched: Mapping[str, bool], axis_size: int
) -> DenseCall[jax.Array]:
    """Returns the call of all examples, one after the other.

    An example may end with padding, but the packed rows of a call may have no gap: its padding becomes two sequences
    more, one of query rows without a key and one of keys without a query.

    Args:
        call: without its arrays.
        arrays: arrays of the examples; those that are `batched` have the examples as first axis.
        batched: whether each array differs from example to example.
        axis_size: the examples.
    """
    every = {name: x if batched[name] else jnp.broadcast_to(x, (axis_size, *x.shape)) for name, x in arrays.items()}
    num_tokens, num_keys = every["query"].shape[1], every["key"].shape[1]
    queries, keys = every["query_start_loc"], every["key_start_loc"]
    folded = {
        "query_start_loc": _starts(queries, jnp.full_like(queries[:, :1], num_tokens), num_tokens),
        "key_start_loc": _starts(keys, keys[:, -1:], num_keys),
    }
    for name, axis in _first_axes(call, arrays).items():
        padding = [(0, 0), (0, 2 if axis == _SEQS else 0), *[(0, 0)] * (every[name].ndim - 2)]
        if axis in (*_ROWS, _SEQS):
            folded[name] = jnp.pad(every[name], padding).reshape(-1, *every[name].shape[2:])
    bounds = {"max_query_len": max(call.max_query_len, num_tokens)}
    if call.max_key_len is not None:
        bounds["max_key_len"] = max(call.max_key_len, num_keys)
    return replace(call, **bounds).with_arrays({**arrays, **folded})


def _first_axes(call: DenseCall[Any], arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    return {name: array_fields(type(call))[name].dims[0] for name in arrays}


def _starts(starts: jax.Array, more: jax.Array, rows: int) -> jax.Array:
    """Joins offsets of examples of `rows` rows; `more` is where the second of their two last sequences starts."""
    shifts = jnp.arange(starts.shape[0], dtype=starts.dtype)[:, None] * rows
    joined = (jnp.concatenate([starts, more], axis=1) + shifts).reshape(-1)
    return jnp.append(joined, jnp.asarray(starts.shape[0] * rows, starts.dtype))
