"""Weights as small integers in words of 32 bits, with scales and zero points: AWQ, GPTQ and compressed-tensors.

A weight is `(number - zero point) * scale`. One row or group of inputs shares the two (Lin et al. 2023,
arXiv:2306.00978; Frantar et al. 2022, arXiv:2210.17323).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jattn.llm.load.packing import Packing
from jattn.llm.load.plan import INT4_KERNEL, INT4_SCALE, ParameterPlan, TensorPlan
from jattn.llm.load.tensor_file import (
    STORED_DTYPES,
    StoredTensor,
    TensorFile,
    Tensors,
    check_scale,
    read_tensor,
    short_name,
)
from jattn.llm.models.quantized import group_rows
from torch_core.base.errors import InvalidInput, Unsupported

_WORD = np.dtype("<i4")
_WEIGHT, _BIAS = ".weight", ".bias"
_CODES = {"I32": _WORD, "I64": np.dtype("<i8")}
#: Elements of a matrix that are converted at once.
_AT_ONCE = 1 << 22


def named_tensors(tensors: Tensors, packing: Packing) -> set[str]:
    """Returns the names of all tensors, and those of the weights that are packed."""
    end = packing.format.values
    return {*tensors} | {name.removesuffix(end) + _WEIGHT for name in tensors if name.endswith(end)}


def unpacked_tensors(tensors: Tensors, plan: tuple[ParameterPlan, ...], packing: Packing) -> Tensors:
    """Returns the tensors with those of packed weights in place of their parts.

    Weights of 4 bits whose groups are in order become the two tensors that `parts_of` in plan.py names; the others are
    float32. Biases of zeros that some writers of GPTQ add are left out.

    Raises:
        InvalidInput: a part is missing, or its shape or dtype is not that of the format.
    """
    found = dict(tensors)
    expected = {piece.name for parameter in plan for piece in parameter.pieces}
    for parameter in plan:
        for piece in parameter.pieces:
            module = piece.name.removesuffix(_WEIGHT)
            if piece.name in tensors or module + packing.format.values not in tensors:
                continue
            matrix = _Matrix(tensors, module, piece, packing, transposed=parameter.transposed)
            for name in matrix.parts:
                del found[name]
            bias = module + _BIAS
            if bias in found and bias not in expected and not np.any(read_tensor(found[bias], bias)):
                del found[bias]
            found |= matrix.tensors()
    return found


class _Matrix:
    """One packed weight, whose parts have the format's shapes and dtypes."""

    def __init__(self, tensors: Tensors, module: str, piece: TensorPlan, packing: Packing, *, transposed: bool) -> None:
        self._tensors, self._piece, self._packing, self._module = tensors, piece, packing, module
        self._is_out_in, form = transposed, packing.format
        inputs, outputs = reversed(piece.shape) if transposed else piece.shape
        self._size = inputs, outputs
        self._group_size = min(packing.group_size or inputs, inputs)
        self._num_groups = -(-inputs // self._group_size)
        by_group = (self._num_groups, outputs)
        self.parts = [
            self._checked(form.values, ("I32",), self._words(self._size, form.values_axis)),
            self._checked(form.scales, tuple(STORED_DTYPES), by_group),
        ]
        self._has_zeros = form.needs_zeros or module + form.zeros in tensors
        if self._has_zeros:
            self.parts.append(self._checked(form.zeros, ("I32",), self._words(by_group, form.zeros_axis)))
        self._has_groups = bool(form.groups) and module + form.groups in tensors
        if self._has_groups:
            self.parts.append(self._checked(form.groups, ("I32",), (inputs,)))
        if form.shape:
            self.parts.append(self._checked(form.shape, ("I64",), (2,)))

    def tensors(self) -> Tensors:
        """Returns the tensors in place of the parts; their bytes are read, and checked, when they are."""
        file, wide = self._tensors[self.parts[0]], np.dtype(np.float32)
        if not self._is_in_order():
            return self._virtual(file, self._piece.name, self._piece.shape, wide, self._dequantized)
        inputs, outputs = self._size
        kernel, scale = self._piece.name + INT4_KERNEL, self._piece.name + INT4_SCALE
        shapes = (inputs // 2, outputs), (2 * self._num_groups, outputs)
        scales = self._tensors[self.parts[1]]
        return self._virtual(file, kernel, shapes[0], np.dtype(np.uint8), self._pairs) | self._virtual(
            scales, scale, shapes[1], wide, lambda: np.concatenate([self._scales(), self._zeros()]), part=1
        )

    def _is_in_order(self) -> bool:
        inputs, _ = self._size
        if self._packing.bits != 4 or inputs % 2 or group_rows(inputs, self._num_groups) != self._group_size:
            return False
        return not self._has_groups or np.array_equal(self._groups(), np.arange(inputs) // self._group_size)

    def _virtual(
        self,
        file: TensorFile,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        make: Callable[[], np.ndarray],
        part: int = 0,
    ) -> Tensors:
        of = self.parts[part]
        stored = file.tensors[of]
        size = math.prod(stored.shape) * (_CODES.get(stored.code) or STORED_DTYPES[stored.code]).itemsize
        virtual = StoredTensor(shape, dtype, stored.offset, stored.code, size, lambda packed: make())
        return {name: replace(file, tensors={name: virtual})}

    def _pairs(self) -> np.ndarray:
        """Returns the numbers as uint8[in / 2, out], that of an even input in the lower four bits."""
        numbers = self._numbers()
        return numbers[0::2] | numbers[1::2] << 4

    def _dequantized(self) -> np.ndarray:
        numbers, scales, zeros, groups = self._numbers(), self._scales(), self._zeros(), self._groups()
        found = np.empty(self._piece.shape, np.float32)
        target = found.T if self._is_out_in else found
        rows = max(1, _AT_ONCE // self._size[1])
        for first in range(0, self._size[0], rows):
            part = slice(first, first + rows)
            target[part] = (numbers[part] - zeros[groups[part]]) * scales[groups[part]]
        return found

    def _numbers(self) -> np.ndarray:
        form = self._packing.format
        if form.shape:
            stored, (inputs, outputs) = self._read(form.shape), self._size
            if stored.tolist() != [outputs, inputs]:
                wanted = f"it must be {[outputs, inputs]}"
                raise InvalidInput(self._module + form.shape, value=stored.tolist(), wanted=wanted)
        return self._unpacked(form.values, self._size, form.values_axis)

    def _scales(self) -> np.ndarray:
        name = self.parts[1]
        scales = self._read(self._packing.format.scales)
        check_scale(self._tensors[name], name, scales)
        return (scales.T if self._packing.format.transposed else scales).astype(np.float32)

    def _zeros(self) -> np.ndarray:
        """Returns the zero points as float32[groups, out]."""
        form, shape = self._packing.format, (self._num_groups, self._size[1])
        if not self._has_zeros:
            return np.full(shape, 1 << self._packing.bits - 1, np.float32)
        return self._unpacked(form.zeros, shape, form.zeros_axis).astype(np.float32) + self._packing.zero_offset

    def _groups(self) -> np.ndarray:
        if not self._has_groups:
            return np.arange(self._size[0]) // self._group_size
        groups, name = self._read(self._packing.format.groups), self._module + self._packing.format.groups
        bad = np.flatnonzero((groups < 0) | (groups >= self._num_groups))
        if bad.size:
            wanted = f"there are {self._num_groups} groups"
            raise InvalidInput(f"tensor {short_name(name)}", f"has {groups[bad[0]]} at {bad[0]}", wanted)
        return np.asarray(groups)

    def _unpacked(self, end: str, shape: tuple[int, int], axis: int) -> np.ndarray:
        """Returns uint8 numbers of this shape from words along an axis."""
        form, bits = self._packing.format, self._packing.bits
        words = np.asarray(self._read(end))
        words = np.moveaxis(words.T if form.transposed else words, axis, -1)
        parts = np.ascontiguousarray(words).view(np.uint8)[..., None]
        numbers = parts >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
        if form.order is not None:
            numbers = numbers.reshape(*words.shape, -1)[..., form.order]
        return np.moveaxis(numbers.reshape(*words.shape[:-1], -1)[..., : shape[axis]], -1, axis)

    def _words(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        each = 32 // self._packing.bits
        return tuple(-(-size // each) if place == axis else size for place, size in enumerate(shape))

    def _checked(self, end: str, codes: tuple[str, ...], shape: tuple[int, ...]) -> str:
        name = self._module + end
        if name not in self._tensors:
            raise InvalidInput(f"the weights lack {name!r}, a part of the packed {self._piece.name!r}.")
        file = self._tensors[name]
        stored, where = file.tensors[name], f"{file.path.name}: tensor {short_name(name)}"
        if stored.code not in codes:
            raise Unsupported(where, f"is {stored.code}", f"the format has {', '.join(codes)} there")
        shape = shape[::-1] if self._packing.format.transposed else shape
        if stored.shape != shape:
            raise InvalidInput(where, f"has shape {stored.shape}", f"the config asks for {shape}")
        return name

    def _read(self, end: str) -> np.ndarray:
        name = self._module + end
        file = self._tensors[name]
        stored = file.tensors[name]
        dtype = _CODES.get(stored.code, stored.dtype)
        return read_tensor(replace(file, tensors={name: replace(stored, dtype=dtype)}), name)
