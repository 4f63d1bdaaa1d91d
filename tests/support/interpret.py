"""Runs Triton kernels in Triton's interpreter on CPU tensors, in a process that also compiles them.

Triton picks interpreter or compiler when a function is decorated, by an environment variable, for the whole process.
Here each decorated function gets an interpreted twin instead, made on first use, so that one test process can do both.
Helper kernels must be imported by name (`from torch_core.attention.x import helper`): twins replace names of the
module that uses them. Slow by design: for tests and for debugging a kernel without a GPU.

Five things of Triton's interpreter are replaced while it runs: conversions between float types, which truncate to
bfloat16 and carry wrongly in fp8 where the hardware rounds to nearest even; float arguments, which a kernel sees as
tensors when compiled; products of tiles, in which the bits of a row depend on its place on some processors; the larger
or smaller of a NaN and a number, which until 3.9 is NaN, and the number on a GPU; and a scalar condition that is spread
over a block, which becomes numbers, and those are no mask in 3.9. Three take most of its time for nothing and are left
out: the language is patched again in every call of a helper, sums are computed a second time to find overflows that it
does not report, and numpy's types are looked up in a table that is made each time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import triton

# The interpreter asks for it where the language is patched, which is too late for a first import.
import triton.experimental.gluon.language
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from torch_core.adapters.kernels.lora.kernel import read_ahead
from torch_core.all_reduce.words import stop_with_an_error
from torch_core.attention.kernels.split.pairs import widened
from torch_core.base.errors import Unsupported
from torch_core.device.dependent import let_next_begin, wait_for_previous
from torch_core.launch.plan import Descriptor, LaunchPlan, OperationPlan, Pointer, Scalar
from torch_core.launch.tensors import torch_dtype
from torch_core.rowwise.kernels.quantize.kernel import approximate_sigmoid

__all__ = ["run_interpreted", "run_interpreted_launch", "run_interpreted_operation"]

_TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_PATCHED = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.core.tensor_descriptor_base, tl.dtype)
_twins: dict[Any, InterpretedFunction] = {}


@triton.jit
def _widened_plainly(pairs, ELEMENT: tl.constexpr):
    low = pairs.to(tl.int8).to(ELEMENT, bitcast=True)
    high = (pairs >> 8).to(tl.int8).to(ELEMENT, bitcast=True)
    return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def _nothing():
    pass


@triton.jit
def _not_ahead(address, SIZE: tl.constexpr):
    pass


@triton.jit
def _sigmoid(x):
    return tl.sigmoid(x)


# Functions of inline assembly, which the interpreter cannot run, and what computes the same without.
_PLAIN = {
    widened.fn: _widened_plainly.fn,
    stop_with_an_error.fn: _nothing.fn,
    let_next_begin.fn: _nothing.fn,
    wait_for_previous.fn: _nothing.fn,
    read_ahead.fn: _not_ahead.fn,
    approximate_sigmoid.fn: _sigmoid.fn,
}


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


def run_interpreted_operation(plan: OperationPlan, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs the launches of a plan in order; outputs and scratch that are not given are made. Returns the outputs."""
    tensors = dict(buffers)
    for name, spec in (*plan.outputs, *plan.scratch):
        if name not in tensors:
            tensors[name] = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    for launch in plan.launches:
        run_interpreted_launch(launch, tensors)
    return {name: tensors[name] for name, _ in plan.outputs}


def run_interpreted_launch(launch: LaunchPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Runs one launch of a plan on the buffers, which it writes in place."""
    values: dict[str, Any] = dict(launch.constexprs)
    for name, argument in launch.arguments:
        if isinstance(argument, Pointer):
            values[name] = tensors[argument.buffer]
        elif isinstance(argument, Descriptor):
            shape, strides, box = list(argument.shape), list(argument.strides), list(argument.box)
            values[name] = TensorDescriptor(tensors[argument.buffer], shape, strides, box)
        elif isinstance(argument, Scalar):
            values[name] = argument.value
        else:
            values[name] = None
    run_interpreted(launch.kernel, launch.grid, values)


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    # The interpreter patches triton.language and, for nested calls, leaves patches behind; a later compilation in this
    # process must find the language as it was.
    before = [(owner, dict(vars(owner))) for owner in _PATCHED]
    options = interpreter_builder.options
    convert_float, implicit_cvt = interpreter._convert_float, interpreter._implicit_cvt
    patch_lang, patch_lang_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    get_np_dtype = interpreter._get_np_dtype
    try:
        interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
        interpreter._patch_lang = functools.partial(_patch_lang, patch_lang, set())
        interpreter._get_np_dtype = functools.partial(_np_dtype, get_np_dtype, {})
        interpreter_builder.create_dot = functools.partial(_dot, interpreter_builder)
        for name, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
            setattr(interpreter_builder, name, functools.partial(interpreter_builder.binary_op, op=function))
        interpreter_builder.create_splat = functools.partial(_splat, interpreter_builder.create_splat)
        interpreter._patch_lang_tensor = functools.partial(_patch_lang_tensor, patch_lang_tensor)
        interpreter._convert_float = _convert_float
        interpreter._implicit_cvt = lambda argument: (
            _float_tensor(argument) if isinstance(argument, float) else implicit_cvt(argument)
        )
        for owner in (tl.standard, tl, tl.tensor):
            for name, value in list(vars(owner).items()):
                if isinstance(value, JITFunction):
                    setattr(owner, name, _twin(value))
        # Infinities are ordinary values of an online softmax; the device computes with them silently.
        with np.errstate(all="ignore"):
            yield
    finally:
        interpreter._convert_float, interpreter._implicit_cvt = convert_float, implicit_cvt
        interpreter._patch_lang, interpreter._patch_lang_tensor = patch_lang, patch_lang_tensor
        interpreter._get_np_dtype = get_np_dtype
        for name in ("create_dot", "create_splat", "create_maxnumf", "create_minnumf"):
            delattr(interpreter_builder, name)
        interpreter_builder.options = options
        for owner, attributes in before:
            for name, value in list(vars(owner).items()):
                if name not in attributes:
                    delattr(owner, name)
                elif value is not attributes[name]:
                    setattr(owner, name, attributes[name])


def _patch_lang(original: Any, patched: set[int], function: Any) -> Any:
    modules = _language_of(function)
    if modules <= patched:
        # Of a helper, whose call does not restore what it patches.
        return None
    patched |= modules
    return original(function)


@functools.cache
def _language_of(function: Any) -> frozenset[int]:
    """Modules of the language that a function uses, by their ids."""
    return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)


def _np_dtype(original: Any, known: dict[str, Any], dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in known:
        known[name] = original(dtype.scalar)
    return known[name]


def _patch_lang_tensor(original: Any, tensor: Any, scope: Any) -> None:
    # numpy 2.4 refuses int() of the one-element arrays that the interpreter uses for scalars (loop bounds).
    original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _splat(original: Any, ret_ty: Any, arg: Any) -> Any:
    # What compares int32 has int32's type here.
    is_condition = arg.data.dtype == np.bool_
    return original(ret_ty, interpreter.TensorHandle(arg.data, tl.int1) if is_condition else arg)


def _dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    # The interpreter would multiply the bit patterns of bfloat16; fp32 holds every product's factors exactly.
    operands = [
        interpreter.TensorHandle(_convert_float(x.data, x.dtype, tl.float32, None).view(np.float32), tl.float32)
        if x.dtype.scalar == tl.bfloat16
        else x
        for x in (a, b)
    ]
    # Row by row, as a matrix unit has them: OpenBLAS adds the last rows of a tile in another order on some processors.
    places = ((..., None, slice(None)), (..., None, slice(None), slice(None)), (..., None, slice(None)))
    rows = [interpreter.TensorHandle(x.data[place], x.dtype) for x, place in zip((*operands, d), places, strict=True)]
    result = type(builder).create_dot(builder, *rows, input_precision, max_num_imprecise_acc)
    return interpreter.TensorHandle(result.data[..., 0, :], result.dtype)


def _twin(kernel: Any) -> Any:
    original = _PLAIN.get(kernel.fn, kernel.fn)
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


def _convert_float(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    # As the hardware's cvt.rn.satfinite: to nearest even, finite values beyond fp8's range become its largest.
    bits = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    values = torch.from_numpy(bits.copy()).view(_TORCH_DTYPES[source.name])
    if target.primitive_bitwidth == 8:
        largest = torch.finfo(_TORCH_DTYPES[target.name]).max
        values = values.float().clamp(-largest, largest)
    converted = values.to(_TORCH_DTYPES[target.name]).view(torch.uint8).numpy()
    return converted.view(_BITS[target.primitive_bitwidth]).reshape(np.shape(data))


def _float_tensor(value: float) -> Any:
    return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
