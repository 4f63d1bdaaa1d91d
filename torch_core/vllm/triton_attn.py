"""The Triton backend: CUDA devices; on CPU tensors the same logic runs plain torch, for tests."""

from __future__ import annotations

from typing import ClassVar

import torch

from torch_core.vllm.paged_backend import PagedAttentionBackend
from torch_core.vllm.paged_builder import PagedAttentionMetadataBuilder
from torch_core.vllm.paged_impl import PagedAttentionImpl
from torch_core.vllm.paged_metadata import PagedAttentionMetadata
from torch_core.vllm.types import CACHE_DTYPES, AttentionCGSupport, DeviceCapability

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

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


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
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        device_capability: DeviceCapability | None,
    ) -> str | None:
        """Returns why an fp8 cache cannot be served by an older device."""
        del head_size, dtype, block_size, use_mla, has_sink, use_sparse
        stored = CACHE_DTYPES.get(kv_cache_dtype or "auto")
        if stored is None or not stored.is_floating_point or stored.itemsize > 1:
            return None
        if device_capability is None or device_capability >= _FP8_CAPABILITY:
            return None
        return (
            f"kv_cache_dtype {kv_cache_dtype!r} needs compute capability {_FP8_CAPABILITY}; the device has "
            f"{device_capability}"
        )
