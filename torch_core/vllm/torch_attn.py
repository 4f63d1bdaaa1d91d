"""The torch backend: the CPU, with the same contract as the Triton backend."""

from __future__ import annotations

from typing import ClassVar

import torch

from torch_core.vllm.builder import AttentionMetadataBuilder
from torch_core.vllm.paged_backend import PagedAttentionBackend
from torch_core.vllm.paged_builder import PagedAttentionMetadataBuilder
from torch_core.vllm.paged_impl import PagedAttentionImpl
from torch_core.vllm.paged_metadata import PagedAttentionMetadata

__all__ = [
    "TorchAttentionBackend",
    "TorchAttentionImpl",
    "TorchAttentionMetadata",
    "TorchAttentionMetadataBuilder",
]

TorchAttentionMetadata = PagedAttentionMetadata


class TorchAttentionMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builds the torch backend's metadata; there are no graphs on the CPU, and cascade never pays there."""

    # The CPU has no idle multiprocessors to win back.
    use_cascade_attention = AttentionMetadataBuilder.use_cascade_attention


class TorchAttentionImpl(PagedAttentionImpl):
    """One layer's attention by plain torch; arguments as for `PagedAttentionImpl`."""


class TorchAttentionBackend(PagedAttentionBackend):
    """Attention by plain torch operations on the CPU."""

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    device_type: ClassVar[str] = "cpu"

    @staticmethod
    def get_name() -> str:
        """Returns "TORCH_ATTN"."""
        return "TORCH_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TorchAttentionImpl]:
        """Returns `TorchAttentionImpl`."""
        return TorchAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TorchAttentionMetadataBuilder]:
        """Returns `TorchAttentionMetadataBuilder`."""
        return TorchAttentionMetadataBuilder
