"""Refuses calls that an implementation does not serve, by the rows that each op registers; and the limits they share.

`torch_core.serves` collects the rows of all ops into the table that the docs print.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_core.base.errors import Unsupported
from torch_core.base.specs import QUERY_DTYPES, ArraySpec
from torch_core.launch.call import Call, dtype_name
from torch_core.launch.op import Served, op_of

#: "triton": Triton kernels on CUDA, from torch and from JAX. "torch": plain torch on a CPU. "xla": plain jnp.
IMPLEMENTATIONS = ("triton", "torch", "xla")
#: The text of a row that every implementation serves.
ALL: dict[str, str] = dict.fromkeys(IMPLEMENTATIONS, "yes")


def refuse_unserved(call: Call[Any], implementation: str, *, named: str | None = None) -> None:
    """Refuses a checked call that an implementation does not serve.

    Args:
        call: checked.
        implementation: column of the table.
        named: the implementation that the caller knows of, if it is another one: "torch" on CUDA.

    Raises:
        Unsupported: names the part of the call that is not served, and the implementations that serve it.
    """
    reason = unserved(call, implementation)
    if reason is not None:
        named = named or implementation
        others = [other for other in IMPLEMENTATIONS if other != named and unserved(call, other) is None]
        fix = f"implementation {' or '.join(map(repr, others))} does" if others else "no implementation does"
        why = "" if named == implementation else f" On CUDA {named!r} launches the kernels of {implementation!r}."
        raise Unsupported(f"{call.name}: {reason}, which implementation {named!r} does not serve; {fix}.{why}")


def unserved(call: Call[Any], implementation: str) -> str | None:
    """Returns the part of a checked call that an implementation does not serve; None if it serves the call."""
    for row in op_of(call).serves:
        reason = None if row.limit is None else row.limit(call, implementation)
        if reason is not None:
            return reason
    return None


def compute_dtype(name: str, served: tuple[str, ...] = QUERY_DTYPES) -> Served:
    """Returns the row of the dtype that an op computes in, that of its array `name`; jnp serves float64 too."""

    def limit(call: Call[Any], implementation: str) -> str | None:
        found = dtype_name(getattr(call, name))
        if found in served or (found == "float64" and implementation == "xla"):
            return None
        return f"{name} is {found}"

    text = {
        "triton": "float32, bfloat16, float16; paged also fp8 (e4m3, e5m2), scaled",
        "torch": "the same",
        "xla": "the same, and float64",
    }
    return Served("query dtype", text, limit)


def float64_limit(*names: str) -> Callable[[Call[Any], str], str | None]:
    """Returns the limit of arrays that are a cache, or are written to one: float64 is jnp's alone."""

    def limit(call: Call[Any], implementation: str) -> str | None:
        if implementation == "xla":
            return None
        arrays = call.arrays()
        wide = next((name for name in names if name in arrays and dtype_name(arrays[name]) == "float64"), None)
        return None if wide is None else f"{wide} is float64"

    return limit


def strides(*, contiguous: tuple[str, ...] = (), free: tuple[str, ...] = ()) -> Served:
    """Returns the row of strides for an op; only the specs that a plan is made for have strides.

    Args:
        contiguous: arrays that kernels read without strides.
        free: arrays whose last axis may have any stride.
    """

    def limit(call: Call[Any], implementation: str) -> str | None:
        if implementation != "triton":
            return None
        for name, spec in call.arrays().items():
            found = spec.strides if isinstance(spec, ArraySpec) and spec.size else None
            if found is not None and (name in contiguous or (found[-1] != 1 and name not in free)):
                wanted = "all axes contiguous" if name in contiguous else "a last stride of 1"
                return f"{name} has strides {found} and not {wanted}"
        return None

    text = {"triton": "any with the last axis contiguous", "torch": "any", "xla": "contiguous, as all of XLA's"}
    return Served("strides", text, limit)
