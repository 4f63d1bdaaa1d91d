"""What both backends serve, since one implementation is behind them."""

from __future__ import annotations

from typing import ClassVar

from torch_core.vllm.backend import AttentionBackend
from torch_core.vllm.paged_metadata import PagedAttentionMetadata
from torch_core.vllm.types import CACHE_DTYPES, AttentionType

__all__ = ["PagedAttentionBackend"]


class PagedAttentionBackend(AttentionBackend):
    """A backend whose layers are `PagedAttentionImpl`."""

    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = tuple(CACHE_DTYPES)
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = tuple(AttentionType)

    @staticmethod
    def get_metadata_cls() -> type[PagedAttentionMetadata]:
        """Returns `PagedAttentionMetadata`."""
        return PagedAttentionMetadata

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
