"""Runs Triton kernels in Triton's interpreter on CPU tensors, in a process that also compiles them.

Triton picks interpreter or compiler when a function is decorated, by an environment variable, for the whole process.
Here each decorated function gets an interpreted twin instead, made on first use, so that one test process can do both.
Helper kernels must be imported by name (`from torch_core.kernels.x import helper`): twins replace names of the
module that uses them. Slow by design: for tests and for debugging a kernel without a GPU.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder
from triton.runtime.jit import JITFunction

from torch_core.errors import Unsupported

__all__ = ["run_interpreted"]

_PATCHED = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.core.tensor_descriptor_base, tl.dtype)
_twins: dict[Any, InterpretedFunction] = {}


def run_interpreted(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """Runs one launch of a `@triton.jit` function in the interpreter.

    Args:
        kernel: the function, decorated with or without TRITON_INTERPRET=1.
        grid: one to three sizes.
        arguments: every parameter by name; tensors on the CPU, written in place.

    Raises:
        Unsupported: a Gluon kernel, which has no interpreter.
    """
    if isinstance(kernel, InterpretedFunction):
        kernel[grid](**arguments)
        return
    if kernel.is_gluon():
        raise Unsupported(f"kernel {kernel.__name__} is written in Gluon, which has no interpreter; run it on CUDA.")
    with _interpreted_language():
        _twin(kernel)[grid](**arguments)


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    # The interpreter patches triton.language and, for nested calls, leaves patches behind; a later compilation in this
    # process must find the language as it was.
    before = [(owner, dict(vars(owner))) for owner in _PATCHED]
    options = interpreter_builder.options
    try:
        for owner in (tl.standard, tl, tl.tensor):
            for name, value in list(vars(owner).items()):
                if isinstance(value, JITFunction):
                    setattr(owner, name, _twin(value))
        yield
    finally:
        interpreter_builder.options = options
        for owner, attributes in before:
            for name, value in list(vars(owner).items()):
                if name not in attributes:
                    delattr(owner, name)
                elif value is not attributes[name]:
                    setattr(owner, name, attributes[name])


def _twin(kernel: Any) -> Any:
    original = kernel.fn
    if original not in _twins:
        scope = dict(original.__globals__)
        function = types.FunctionType(
            original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
        )
        function.__kwdefaults__ = original.__kwdefaults__
        function.__annotations__ = original.__annotations__
        function.__module__ = original.__module__
        # Entered before the names are replaced, so that functions which call each other end.
        _twins[original] = InterpretedFunction(function)
        for name in original.__code__.co_names:
            if isinstance(scope.get(name), JITFunction):
                scope[name] = _twin(scope[name])
    return _twins[original]
