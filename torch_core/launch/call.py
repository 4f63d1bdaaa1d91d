"""Call: fields that are arrays with their shapes and dtypes in the annotations, options, one check, one map."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch_core.base.checks import check_positive
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import QUERY_DTYPES, ArraySpec

#: The type of an array: `torch.Tensor`, `jax.Array`, or `ArraySpec`.
A = TypeVar("A", bound=Any)


@dataclass(frozen=True, kw_only=True)
class Call(Generic[A]):
    """A call of one operation.

    Subclasses are frozen dataclasses. A field whose annotation is a jaxtyping one holds an array: the annotation is
    the only place where its shape and dtypes are, and `check`, `map` and `arrays` read it there. Array fields may be
    optional, and a scale may be a number. Every other field is an option.

    Raises:
        InvalidInput: ranks, shapes, dtypes, devices or options do not fit; the message names the argument and the fix.
            Where values are checked, outside jit or on the CPU, offsets, lengths, blocks or slots are out of range, or
            one is written twice.
        Unsupported: no implementation serves the call here, or not the one that was asked for.
    """

    #: The operation's name in errors, plans and profiles.
    name: ClassVar[str]

    def map(self, function: Callable[[Any], Any]) -> Any:
        """Returns the call with `function` applied to each array; numbers, options and absent arrays stay."""
        return self.with_arrays({name: function(array) for name, array in self.arrays().items()})

    def with_arrays(self, arrays: Mapping[str, Any]) -> Any:
        """Returns the call with other arrays in the named fields, and all other fields unchanged."""
        return self.of({**self.__dict__, **arrays})

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Any:
        """Returns a call with a value for every field, unchecked: the constructor takes five times as long."""
        call = object.__new__(cls)
        call.__dict__.update(values)
        return call

    def arrays(self) -> dict[str, A]:
        """Returns the arrays that are given, by field name, in the order of the fields."""
        values = self.__dict__
        return {
            name: value
            for name in array_fields(type(self))
            if (value := values[name]) is not None and not isinstance(value, (int, float))
        }

    def __post_init__(self) -> None:
        """Checks the options that are numbers: those that compare equal to others are not told apart later."""
        self.check_statics()

    def check_statics(self) -> None:
        """Checks options that must be plain Python values, for any arrays; runs when a call is created."""

    def check(self) -> None:
        """Checks shapes, dtypes and options; every implementation and the planner rely on this check.

        Raises:
            InvalidInput: a field does not fit; the message names the argument, its value and the required value.
        """
        sizes: dict[str, tuple[int, str]] = {}
        for field in array_fields(type(self)).values():
            value = getattr(self, field.name)
            if value is None:
                if not field.optional:
                    raise InvalidInput(field.name, "is missing", f"it must be {field}").under(self.name)
            elif isinstance(value, (int, float)) and field.number:
                check_positive(field.name, value)
            else:
                _check_array(field, value, sizes)
        self.check_options()

    def check_options(self) -> None:
        """Checks combinations of fields, and the options; shapes and dtypes of each array were checked before."""

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns the new arrays that the operation makes, in the order in which it returns them."""
        return {}

    @property
    def written(self) -> tuple[str, ...]:
        """The given arrays that the operation writes in place."""
        return ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: outputs are then zeros, an lse is -inf, and nothing is written."""
        return False

    @property
    def reads_cache(self) -> bool:
        """The call attends to a paged cache."""
        return False

    @property
    def splits_sequences(self) -> bool:
        """Devices can each take whole sequences, if `rows_of_a_sequence` promises that all have as many rows."""
        return False

    def rows_of_a_sequence(self) -> dict[str, int]:
        """Returns how many rows each sequence has on axes where the shapes promise that all have as many."""
        return {}

    def equal_axes(self) -> dict[str, str]:
        """Returns the axes that are split as another one is: an axis of the same length that counts the same rows."""
        return {}

    @property
    def work(self) -> int:
        """About how many multiply-adds, or elements to move, a call of specs is."""
        return 0

    def element_types(self) -> dict[str, str]:
        """Returns the element types that kernels load and store, by array, of a call of specs."""
        return {name: spec.dtype for name, spec in {**self.arrays(), **self.outputs()}.items()}

    def for_kernels(self, library: Any) -> Any:
        """Returns the call as kernels and CPU functions take it; by default itself.

        Args:
            library: `torch` or `jax.numpy`, whose arrays the call has; None for a call of specs.
        """
        return self

    def check_values(self) -> None:
        """Checks the values of index arrays, once shapes and dtypes are checked; the arrays are in the host's memory.

        On a device those values are out of reach: there they are checked when metadata is built.

        Raises:
            InvalidInput: offsets that fall or exceed their array, a length that its table row cannot hold, a block or
                slot that the cache does not have, copies that meet; with the first bad index.
        """


@dataclass(frozen=True, slots=True)
class ArrayField:
    """The axes and dtypes in an array's annotation.

    Attributes:
        name: name of the field.
        dims: for each axis a name, a name with "+1", or a number.
        dtypes: names of the allowed element types; None for any.
        optional: it may be None.
        number: it may be a number, of no axis.
    """

    name: str
    dims: tuple[str, ...]
    dtypes: tuple[str, ...] | None
    optional: bool
    number: bool

    def __str__(self) -> str:
        return f"[{', '.join(self.dims)}]"


@functools.cache
def array_fields(call_class: type[Call[Any]]) -> dict[str, ArrayField]:
    """Returns the array fields of a class of calls by name, in order.

    Example:
        >>> from torch_core.attention.call import PagedCall
        >>> print(array_fields(PagedCall)["block_tables"])
        [num_seqs, max_blocks]
    """
    found = {}
    for name, hint in typing.get_type_hints(call_class).items():
        parts = typing.get_args(hint) or (hint,)
        shaped = [part for part in parts if hasattr(part, "dim_str")]
        if shaped:
            dtypes = shaped[0].dtypes
            allowed = tuple(dtypes) if isinstance(dtypes, (tuple, list)) else None
            dims = tuple(shaped[0].dim_str.split())
            found[name] = ArrayField(name, dims, allowed, type(None) in parts, float in parts)
    return found


def dtype_name(array: Any) -> str:
    """Returns the name of an array's element type that numpy, torch, jax and `torch_core.base.specs` agree on.

    Example:
        >>> import numpy as np
        >>> dtype_name(np.zeros(1, np.int32)), dtype_name(ArraySpec((1,), "bfloat16"))
        ('int32', 'bfloat16')
    """
    dtype = array.dtype
    return dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]


def check_one_dtype(call: Call[Any], first: str, *others: str) -> str:
    """Returns the dtype of an array of floats, after a check that others, where given, have it too."""
    dtype = dtype_name(getattr(call, first))
    if dtype not in (*QUERY_DTYPES, "float64"):
        raise InvalidInput(first, f"is {dtype}", "it must be float32, bfloat16 or float16. Cast it")
    for name in others:
        array = getattr(call, name)
        if array is not None and dtype_name(array) != dtype:
            raise InvalidInput(name, f"is {dtype_name(array)}", f"beside {first} of {dtype} it is {dtype}")
    return dtype


def _check_array(field: ArrayField, array: Any, sizes: dict[str, tuple[int, str]]) -> None:
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    if shape is None or dtype is None:
        raise InvalidInput(field.name, f"is a {type(array).__name__}", f"it must be an array of shape {field}")
    shape = tuple(shape)
    if field.number and field.dims == ("1",):
        # One element, of any rank.
        if any(size != 1 for size in shape):
            raise InvalidInput(field.name, f"has shape {list(shape)}", "it must be a number or one element")
    elif len(shape) != len(field.dims) and "..." not in field.dims:
        raise InvalidInput(field.name, f"has shape {list(shape)}", f"it must have {len(field.dims)} axes: {field}")
    else:
        for dim, size, name, expected in _bound(field, shape, sizes):
            if size != expected:
                origin = f", that of {sizes[name][1]}" if name in sizes else ""
                fix = f"it must be {field} with {dim} = {expected}{origin}"
                raise InvalidInput(field.name, f"has shape {list(shape)}", fix)
    if field.dtypes is not None and dtype_name(array) not in field.dtypes:
        wanted = "a floating point type" if len(field.dtypes) > 2 else next(iter(field.dtypes))
        raise InvalidInput(field.name, f"is {dtype_name(array)}", f"it must be {wanted}. Cast it")


def _bound(
    field: ArrayField, shape: tuple[int, ...], sizes: dict[str, tuple[int, str]]
) -> Iterator[tuple[str, int, str, int]]:
    """Yields (axis, size, name, expected size) for each axis, binding the names that occur for the first time."""
    if "..." in field.dims:
        return
    for dim, size in zip(field.dims, shape, strict=True):
        match = re.fullmatch(r"([a-z_]+)(?:\+(\d+))?", dim)
        if match is None:
            yield f"axis {field.dims.index(dim)}", size, "", int(dim)
            continue
        name, more = match[1], int(match[2] or 0)
        if name not in sizes:
            if size < more:
                raise InvalidInput(field.name, f"has shape {list(shape)}", f"it must be {field}, at least [{more}]")
            sizes[name] = (size - more, field.name)
        yield dim, size, name, sizes[name][0] + more
