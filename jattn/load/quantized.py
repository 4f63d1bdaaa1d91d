"""Weights that are stored in fewer bits: which tensors belong together, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jattn.load.plan import TensorPlan
from jattn.load.safetensors_file import QUANTIZED_DTYPES, SafetensorsFile
from torch_core.errors import Unsupported

__all__ = ["dequantized", "parts_of"]

_BLOCK = 128
_MXFP4_GROUP = 32
#: What the four bits of an MXFP4 number mean (OCP Microscaling Formats 1.0, E2M1), the sign in the highest.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def parts_of(piece: TensorPlan, tensors: dict[str, SafetensorsFile]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that hold a planned one and their shapes; only itself where it is not quantised.

    MXFP4 is gpt-oss's: `name_blocks` uint8[..., out, in / 32, 16], two numbers in a byte, and `name_scales`
    uint8[..., out, in / 32], of a tensor [..., in, out]. FP8 is DeepSeek's and Qwen 3's: an E4M3 tensor [out, in]
    beside `weight_scale_inv` for each block of 128 x 128.

    Raises:
        Unsupported: a weight in a type that needs scales which are not there.
    """
    name, shape = piece.name, piece.shape
    if name not in tensors and f"{name}_blocks" in tensors:
        *front, inputs, outputs = shape
        groups = (*front, outputs, inputs // _MXFP4_GROUP)
        return {f"{name}_blocks": (*groups, _MXFP4_GROUP // 2), f"{name}_scales": groups}
    if name not in tensors or tensors[name].tensors[name].dtype not in QUANTIZED_DTYPES.values():
        return {name: shape}
    scale = f"{name}_scale_inv"
    if scale not in tensors or len(shape) != 2:
        raise Unsupported(
            f"{tensors[name].path.name}: tensor {name!r} has dtype {tensors[name].tensors[name].dtype} and no "
            f"{scale!r} beside it; this build reads fp8 with scales by blocks of {_BLOCK} and MXFP4."
        )
    return {name: shape, scale: (-(-shape[0] // _BLOCK), -(-shape[1] // _BLOCK))}


def dequantized(piece: TensorPlan, read: Callable[[str], Any], parts: dict[str, tuple[int, ...]], xp: Any) -> Any:
    """Returns a planned tensor of several parts as float32.

    Args:
        piece: the planned tensor.
        read: gives a part by its name, as an array of `xp`.
        parts: of `parts_of`.
        xp: numpy or jax.numpy: where the arithmetic runs.
    """
    if piece.name in parts:
        weight, scale = (read(name) for name in parts)
        scale = xp.repeat(xp.repeat(scale, _BLOCK, 0), _BLOCK, 1)[: piece.shape[0], : piece.shape[1]]
        return weight.astype(np.float32) * scale.astype(np.float32)
    blocks, scales = (read(name) for name in parts)
    pairs = xp.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], _MXFP4_GROUP)
    values = xp.asarray(_E2M1)[pairs] * xp.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)
