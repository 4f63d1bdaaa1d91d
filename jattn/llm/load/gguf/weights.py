"""The tensors of a GGUF file as the plan of a model asks for them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from jattn.llm.load.families import Family
from jattn.llm.load.plan import ParameterPlan
from jattn.llm.load.tensor_file import StoredTensor, TensorFile, Tensors


def gguf_tensors(file: TensorFile, plan: tuple[ParameterPlan, ...], family: Family) -> Tensors:
    """Returns the file's tensors by name, with the values and the number of axes that the model has.

    Weights of norms lose the family's offset, and a matrix of one row, which the file has as a list, is one again.
    """
    tensors = dict(file.tensors)
    offset = 0.0 if family.gguf is None else family.gguf.norm_offset
    for parameter in plan:
        for piece in parameter.pieces:
            stored = tensors.get(piece.name)
            if stored is None:
                continue
            if stored.shape == piece.shape[1:] and piece.shape[0] == 1:
                stored = replace(stored, shape=piece.shape)
            if offset and parameter.path[-1] == "weight":
                stored = _less(stored, offset)
            tensors[piece.name] = stored
    return dict.fromkeys(tensors, replace(file, tensors=tensors))


def _less(stored: StoredTensor, offset: float) -> StoredTensor:
    """Returns the tensor whose values are less by an offset, in float32."""
    dtype, wide = stored.dtype, np.dtype(np.float32)
    if dtype is None:
        return stored

    def unpack(packed: np.ndarray) -> np.ndarray:
        found = packed.view(dtype) if stored.unpack is None else stored.unpack(packed)
        return found.astype(wide) - wide.type(offset)

    size = math.prod(stored.shape) * dtype.itemsize if stored.packed is None else stored.packed
    return replace(stored, dtype=wide, packed=size, unpack=unpack)
