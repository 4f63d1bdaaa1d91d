"""Weights that are stored in fewer bits: the tensors that belong together, and the kernel built from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jattn.llm.load.plan import TensorPlan
from jattn.llm.load.safetensors_file import QUANTIZED_DTYPES, SafetensorsFile
from jattn.llm.models.quantized import group_rows
from torch_core.base.errors import Unsupported

_BLOCK = 128
_MXFP4_GROUP = 32


def parts_of(piece: TensorPlan, tensors: dict[str, SafetensorsFile]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that hold a planned one and their shapes; only itself if it is not quantised.

    MXFP4 is gpt-oss's: `name_blocks` uint8[..., out, in / 32, 16], two numbers in a byte, and `name_scales`
    uint8[..., out, in / 32], of a tensor [..., in, out]. FP8 is an E4M3 tensor [out, in] with its scales: DeepSeek's
    and Qwen 3's `weight_scale_inv` for each block of 128 x 128, or compressed-tensors' `weight_scale` for each of them,
    for each output or for the tensor.
    """
    name, shape = piece.name, piece.shape
    if name not in tensors and f"{name}_blocks" in tensors:
        *front, inputs, outputs = shape
        groups = (*front, outputs, inputs // _MXFP4_GROUP)
        return {f"{name}_blocks": (*groups, _MXFP4_GROUP // 2), f"{name}_scales": groups}
    if name not in tensors or tensors[name].tensors[name].dtype not in QUANTIZED_DTYPES.values():
        return {name: shape}
    scale = next((scale for scale in (f"{name}_scale_inv", f"{name}_scale") if scale in tensors), None)
    if scale is None or len(shape) != 2:
        raise Unsupported(
            f"{tensors[name].path.name}: tensor {name!r} has dtype {tensors[name].tensors[name].dtype} and no "
            f"'{name}_scale_inv' beside it; this build reads fp8 with scales by tensor, by output or by blocks of "
            f"{_BLOCK}, and MXFP4."
        )
    blocks, found = (-(-shape[0] // _BLOCK), -(-shape[1] // _BLOCK)), tensors[scale].tensors[scale].shape
    return {name: shape, scale: found if found in ((), (1,), (shape[0], 1)) else blocks}


def kernel_and_scale(
    piece: TensorPlan, read: Callable[[str], Any], parts: dict[str, tuple[int, ...]], xp: Any, *, transposed: bool
) -> tuple[Any, Any]:
    """Returns a planned tensor of several parts as `jattn.llm.models.quantized.dequantize` takes it: [..., in, out].

    Args:
        piece: the planned tensor.
        read: gives a part by its name, as an array of `xp`.
        parts: result of `parts_of`.
        xp: numpy or jax.numpy: where it is put in order.
        transposed: whether an E4M3 tensor is [out, in]; it is [in, out] otherwise.
    """
    kernel, scale = (read(name) for name in parts)
    if piece.name not in parts:
        return kernel.reshape(*scale.shape[:-1], -1).swapaxes(-1, -2), scale.swapaxes(-1, -2)
    scale = scale.astype("float32")
    scale = scale.reshape(1, 1) if scale.ndim < 2 else scale
    if transposed:
        kernel, scale = kernel.T, scale.T
    outputs = kernel.shape[-1]
    return kernel, xp.repeat(scale, group_rows(outputs, scale.shape[-1]), -1)[:, :outputs]
