"""Inputs of a model that each request brings, such as the number of its adapter: declared, checked and packed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from torch_core.base.checks import INT32_MAX, check_int, shown
from torch_core.base.errors import InvalidInput

#: Names and dtypes, or ranges of int32, in the order in which the values are packed.
InputDtypes: TypeAlias = tuple[tuple[str, str | range], ...]
_DTYPES = ("int32", "float32")


def declared(inputs: Any) -> InputDtypes:
    """Returns `PagedSpec.inputs` as pairs of a name and the name of a dtype, or a range.

    Raises:
        InvalidInput: a name that is no identifier, another dtype than int32 and float32, or a range that is empty,
            has steps, or is not of int32.
    """
    found = []
    for name, dtype in dict(inputs).items():
        if not isinstance(name, str) or not name.isidentifier():
            raise InvalidInput("inputs", f"has the name {shown(name)}", "names must be identifiers")
        if isinstance(dtype, range):
            if dtype.step != 1 or not dtype or dtype.start < -INT32_MAX - 1 or dtype[-1] > INT32_MAX:
                raise InvalidInput(f"inputs[{name!r}]", value=dtype, wanted="it must have int32 numbers, without steps")
            found.append((name, dtype))
            continue
        try:
            spelt = jnp.dtype(dtype).name
        except TypeError:
            spelt = shown(dtype)
        if spelt not in _DTYPES:
            raise InvalidInput(f"inputs[{name!r}]", f"is {spelt}", f"it must be {' or '.join(_DTYPES)}")
        found.append((name, spelt))
    return tuple(found)


def packed(given: Mapping[str, Any] | None, inputs: InputDtypes) -> np.ndarray:
    """Returns a request's values as int32[len(inputs)], the bits of floats among them.

    Raises:
        InvalidInput: an input is missing, unknown, of another type or out of range.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise InvalidInput("inputs", value=given, wanted="it must be a mapping from names to numbers")
    known = dict(inputs)
    if unknown := [name for name in given if name not in known]:
        wanted = f"this model has {', '.join(known) or 'none'} (PagedSpec.inputs)"
        raise InvalidInput("inputs", f"has {shown(unknown[0])}", wanted)
    if missing := [name for name in known if name not in given]:
        raise InvalidInput("inputs", f"lacks {missing[0]!r}", "this model needs it for each request (PagedSpec.inputs)")
    found = np.zeros(len(inputs), np.int32)
    for index, (name, dtype) in enumerate(inputs):
        value, argument = given[name], f"inputs[{name!r}]"
        if dtype != "float32":
            value = value.item() if isinstance(value, np.integer) else value
            allowed = dtype if isinstance(dtype, range) else range(-INT32_MAX - 1, INT32_MAX + 1)
            check_int(argument, value, allowed[0], allowed[-1])
            found[index] = value
        else:
            is_number = isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or abs(value) > np.finfo(np.float32).max:
                raise InvalidInput(argument, value=value, wanted="it must be a finite float32")
            found[index : index + 1].view(np.float32)[:] = value
    return found


def of_each(given: Any, count: int, name: str = "inputs") -> list[Any]:
    """Returns the value of each of `count` prompts, from one for all of them or a list with one for each.

    Raises:
        InvalidInput: another number of them.
    """
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        problem = f"has {len(given)} entries and there are {count} prompts"
        raise InvalidInput(name, problem, f"pass one or {count}")
    return list(given)


def unpacked(values: jax.Array, inputs: InputDtypes) -> dict[str, jax.Array]:
    """Returns the inputs by name, [num_seqs] each, of int32[num_seqs, len(inputs)]."""
    return {
        name: jax.lax.bitcast_convert_type(
            values[:, index], jnp.int32 if isinstance(dtype, range) else jnp.dtype(dtype)
        )
        for index, (name, dtype) in enumerate(inputs)
    }
