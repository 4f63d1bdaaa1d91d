"""Functions of Gluon that Triton 3.8 and 3.9 renamed, by their newest names, for every release of the window."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

#: Starts a copy through a TMA descriptor into shared memory.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

#: Starts copies through a tensor of pointers into shared memory.
async_gather = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

#: Waits for all threads of the warps that run a function.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Returns shared memory as a matrix of another type, shape and layout of as many bytes."""
    if _IS_PUBLIC:
        return memory.reinterpret(dtype, [ROWS, COLUMNS], layout)
    else:  # noqa: RET505 - each release compiles one branch
        return memory._reinterpret(dtype, [ROWS, COLUMNS], layout)


@gluon.jit
def reinterpret_shape(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same for a shape of any number of axes."""
    if _IS_PUBLIC:
        return memory.reinterpret(dtype, shape, layout)
    else:  # noqa: RET505 - each release compiles one branch
        return memory._reinterpret(dtype, shape, layout)
