"""The two backends, Triton for CUDA devices and torch for the CPU: one implementation, and what each of them serves."""

from __future__ import annotations

from typing import ClassVar

import torch

from torch_core.vllm.backend import AttentionBackend, always
from torch_core.vllm.builder import AttentionMetadataBuilder
from torch_core.vllm.paged_builder import PagedAttentionMetadataBuilder
from torch_core.vllm.paged_impl import PagedAttentionImpl
from torch_core.vllm.paged_metadata import PagedAttentionMetadata
from torch_core.vllm.types import CACHE_DTYPES, AttentionCGSupport, AttentionType, DeviceCapability

__all__ = [
    "TorchAttentionBackend",
    "TorchAttentionImpl",
    "TorchAttentionMetadata",
    "TorchAttentionMetadataBuilder",
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonAttentionMetadata",
    "TritonAttentionMetadataBuilder",
]

TorchAttentionMetadata = TritonAttentionMetadata = PagedAttentionMetadata
_MIN_HEAD_SIZE = 32


class TritonAttentionMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builds the Triton backend's metadata; any batch can be replayed, since the kernels read lengths on the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class TorchAttentionMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builds the torch backend's metadata; there are no graphs on the CPU, and cascade never pays there."""

    # The CPU has no idle multiprocessors to win back.
    use_cascade_attention = AttentionMetadataBuilder.use_cascade_attention


class TritonAttentionImpl(PagedAttentionImpl):
    """One layer's attention by Triton kernels; arguments as for `PagedAttentionImpl`, `head_size` at least 32."""

    min_head_size: ClassVar[int] = _MIN_HEAD_SIZE


class TorchAttentionImpl(PagedAttentionImpl):
    """One layer's attention by plain torch; arguments as for `PagedAttentionImpl`."""


class _PagedAttentionBackend(AttentionBackend):
    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = tuple(CACHE_DTYPES)
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = tuple(AttentionType)
    get_metadata_cls = always(PagedAttentionMetadata)
    supports_sink = supports_alibi_sqrt = supports_mm_prefix = supports_non_causal = always(True)


class TritonAttentionBackend(_PagedAttentionBackend):
    """Attention by this project's Triton and Gluon kernels; on CPU tensors plain torch runs, for tests."""

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32)
    supported_head_sizes: ClassVar[range | tuple[int, ...]] = range(_MIN_HEAD_SIZE, 257)
    min_capability: ClassVar[DeviceCapability | None] = DeviceCapability(8, 0)
    get_name = staticmethod(lambda: "TRITON_ATTN")
    get_impl_cls = staticmethod(lambda: TritonAttentionImpl)
    get_builder_cls = staticmethod(lambda: TritonAttentionMetadataBuilder)
    # Keys are split by a fixed chunk size, never by what else is in the batch.
    supports_batch_invariance = always(True)


class TorchAttentionBackend(_PagedAttentionBackend):
    """Attention by plain torch operations on the CPU."""

    device_type: ClassVar[str] = "cpu"
    get_name = staticmethod(lambda: "TORCH_ATTN")
    get_impl_cls = staticmethod(lambda: TorchAttentionImpl)
    get_builder_cls = staticmethod(lambda: TorchAttentionMetadataBuilder)
