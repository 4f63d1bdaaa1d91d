"""Zero-copy views between JAX arrays and torch tensors: the same memory or a clear error, never a silent copy."""

from __future__ import annotations

import jax
import torch
from jax.core import Tracer

from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import row_major_strides

#: The dtypes that both sides alias through DLPack; both use the same name.
_SHARED_DTYPES = frozenset(
    {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int16", "int8", "uint8", "bool"}
)
# XLA's CPU backend copies a foreign buffer that is less aligned than this; on CUDA an entry parameter needs 16.
_ALIGNMENT = {"cpu": 64, "cuda": 16}


def to_torch(array: jax.Array) -> torch.Tensor:
    """Views a JAX array as a torch tensor over the same memory.

    The view is writable for torch, yet a `jax.Array` is immutable for JAX: write through it only if the array's
    owner expects that (`KVPool.as_torch`). A view also pins the memory, so drop it before the array is donated.

    Args:
        array: a concrete array on one CPU or CUDA device, of a dtype that both libraries share.

    Returns:
        A tensor with the array's shape, dtype, device and data pointer.

    Raises:
        InvalidInput: a tracer, a deleted array, an array spread over devices, or not a JAX array at all.
        Unsupported: a dtype or a device that torch cannot view.

    Example:
        >>> import jax.numpy as jnp
        >>> array = jnp.arange(4.0)
        >>> to_torch(array).data_ptr() == array.unsafe_buffer_pointer()
        True
    """
    if isinstance(array, Tracer):
        raise InvalidInput(
            "array is a tracer: a function under jit has no memory to share. Call to_torch outside jit, or use "
            "jattn.bridge.call_torch inside."
        )
    if not isinstance(array, jax.Array):
        raise InvalidInput("array", f"is a {type(array).__name__}", "to_torch needs a jax.Array")
    if array.is_deleted():
        wanted = "use the array that the call returned"
        raise InvalidInput("array", "was deleted (its buffer was donated to a jitted call)", wanted)
    device, *others = array.devices()
    if others:
        wanted = "a torch tensor lives on one. Pass array.addressable_shards[i].data"
        raise InvalidInput("array", f"is spread over {1 + len(others)} devices", wanted)
    _check_dtype("array", array.dtype.name)
    if device.platform not in ("cpu", "gpu"):
        wanted = "torch shares memory with 'cpu' and 'gpu' (CUDA) only"
        raise Unsupported("array", f"is on platform {device.platform!r}", wanted)
    if array.size == 0:
        torch_device = "cpu" if device.platform == "cpu" else f"cuda:{device.local_hardware_id}"
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=torch_device)
    tensor = torch.from_dlpack(array)
    if tensor.data_ptr() != array.unsafe_buffer_pointer():
        raise Unsupported("array", "could not be viewed without a copy", "its layout has no strided equivalent")
    return tensor


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Views a torch tensor as a JAX array over the same memory.

    JAX treats the array as immutable, so the tensor must not be written while JAX work on the array is in flight.
    The array keeps the memory alive.

    Args:
        tensor: a dense, contiguous tensor on CPU (64-byte aligned) or CUDA (16-byte aligned).

    Returns:
        An array with the tensor's shape, dtype, device and data pointer.

    Raises:
        InvalidInput: not a tensor, still tracked by autograd, sparse, not contiguous, or not aligned.
        Unsupported: a dtype that JAX would convert (int64, float64) or does not know, or a foreign device.

    Example:
        >>> tensor = torch.zeros(4, 8)
        >>> to_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()
        True
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput("tensor", f"is a {type(tensor).__name__}", "to_jax needs a torch.Tensor")
    if tensor.requires_grad:
        raise InvalidInput("tensor", "requires grad", "JAX cannot follow torch's autograd. Pass tensor.detach()")
    if tensor.device.type not in _ALIGNMENT:
        raise Unsupported("tensor", f"is on {tensor.device}", "jattn shares memory on cpu and cuda only")
    _check_dtype("tensor", str(tensor.dtype).removeprefix("torch."))
    if tensor.layout is not torch.strided:
        raise InvalidInput("tensor", f"has layout {tensor.layout}", "only a dense tensor has memory to share")
    if not tensor.is_contiguous():
        raise InvalidInput(
            f"tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}; the row-major strides "
            f"{row_major_strides(tuple(tensor.shape))} are required. Call tensor.contiguous() if a copy is meant."
        )
    alignment = _ALIGNMENT[tensor.device.type]
    if tensor.numel() and tensor.data_ptr() % alignment:
        raise InvalidInput(
            f"tensor starts {tensor.data_ptr() % alignment} bytes past a {alignment}-byte boundary, so JAX would copy "
            "it. Pass a tensor that owns its memory (tensor.clone()), not an offset view."
        )
    # from_dlpack records an event on torch's current stream of the current device and refuses any other device.
    if tensor.device.type == "cuda":
        with torch.cuda.device(tensor.device):
            array = jax.dlpack.from_dlpack(tensor)
    else:
        array = jax.dlpack.from_dlpack(tensor)
    if tensor.numel() and array.unsafe_buffer_pointer() != tensor.data_ptr():
        raise Unsupported("tensor", "could not be viewed without a copy", "JAX gave it memory of its own")
    return array


def _check_dtype(argument: str, name: str) -> None:
    if name in _SHARED_DTYPES:
        return
    hint = {
        "int64": " JAX would convert it to int32 in a copy; use int32.",
        "float64": " JAX would convert it to float32 in a copy; use float32.",
    }.get(name, "")
    raise Unsupported(
        f"{argument} has dtype {name}; torch and JAX share {', '.join(sorted(_SHARED_DTYPES))} without a copy.{hint}"
    )
