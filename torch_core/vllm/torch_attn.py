"""The torch backend: the CPU, with the same contract as the Triton backend."""

from __future__ import annotations

from typing import ClassVar

import torch

from torch_core.vllm.backend import AttentionBackend
from torch_core.vllm.paged_impl import PagedAttentionImpl
from torch_core.vllm.paged_metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder
from torch_core.vllm.types import CACHE_DTYPES, AttentionType

__all__ = [
    "TorchAttentionBackend",
    "TorchAttentionImpl",
    "TorchAttentionMetadata",
    "TorchAttentionMetadataBuilder",
]

TorchAttentionMetadata = PagedAttentionMetadata


class TorchAttentionMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builds the torch backend's metadata; there are no graphs on the CPU, and cascade never pays there."""

    def use_cascade_attention(self, common_prefix_len: int, query_lens: object, *, num_sms: int) -> bool:
        """Returns False."""
        del common_prefix_len, query_lens, num_sms  # The CPU has no idle multiprocessors to win back.
        return False


class TorchAttentionImpl(PagedAttentionImpl):
    """One layer's attention by plain torch; arguments as for `PagedAttentionImpl`."""


class TorchAttentionBackend(AttentionBackend):
    """Attention by plain torch operations on the CPU."""

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = tuple(CACHE_DTYPES)
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = tuple(AttentionType)
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

    @classmethod
    def supports_sink(cls) -> bool:
        """Returns True."""
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """Returns True."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Returns True."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Returns True."""
        return True
