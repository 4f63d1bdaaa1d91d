"""The Triton backend: CUDA devices; on CPU tensors the same logic runs plain torch, for tests."""

from __future__ import annotations

from typing import ClassVar

import torch

from torch_core.vllm.config import AttentionSelectorConfig
from torch_core.vllm.paged_backend import PagedAttentionBackend
from torch_core.vllm.paged_builder import PagedAttentionMetadataBuilder
from torch_core.vllm.paged_impl import PagedAttentionImpl
from torch_core.vllm.paged_metadata import PagedAttentionMetadata
from torch_core.vllm.types import (
    CACHE_DTYPES,
    AttentionCGSupport,
    DeviceCapability,
    DeviceInfo,
)

__all__ = [
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonAttentionMetadata",
    "TritonAttentionMetadataBuilder",
]

TritonAttentionMetadata = PagedAttentionMetadata

_MIN_HEAD_SIZE = 32
_FP8_CAPABILITY = DeviceCapability(8, 9)


class TritonAttentionMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builds the Triton backend's metadata; any batch can be replayed, since the kernels read lengths on the device."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class TritonAttentionImpl(PagedAttentionImpl):
    """One layer's attention by Triton kernels; arguments as for `PagedAttentionImpl`, `head_size` at least 32."""

    min_head_size: ClassVar[int] = _MIN_HEAD_SIZE


class TritonAttentionBackend(PagedAttentionBackend):
    """Attention by this project's Triton and Gluon kernels."""

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32)
    supported_head_sizes: ClassVar[range | tuple[int, ...]] = range(_MIN_HEAD_SIZE, 257)
    min_capability: ClassVar[DeviceCapability | None] = DeviceCapability(8, 0)

    @staticmethod
    def get_name() -> str:
        """Returns "TRITON_ATTN"."""
        return "TRITON_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """Returns `TritonAttentionImpl`."""
        return TritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        """Returns `TritonAttentionMetadataBuilder`."""
        return TritonAttentionMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Returns True: keys are split by a fixed chunk size, never by what else is in the batch."""
        return True

    @classmethod
    def supports_combination(cls, config: AttentionSelectorConfig, device: DeviceInfo) -> str | None:
        """Returns why an fp8 cache cannot be served by an older device."""
        dtype = CACHE_DTYPES.get(config.kv_cache_dtype)
        if dtype is None or not dtype.is_floating_point or dtype.itemsize > 1 or device.capability is None:
            return None
        if device.capability >= _FP8_CAPABILITY:
            return None
        return (
            f"kv_cache_dtype {config.kv_cache_dtype!r} needs compute capability {_FP8_CAPABILITY}; the device has "
            f"{device.capability}"
        )
