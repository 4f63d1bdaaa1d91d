"""The contract of a metadata builder: from a batch on the host to the metadata of one cache group's layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import KVCacheSpec, LatentCacheSpec, StateCacheSpec
from torch_core.metadata import CommonAttentionMetadata
from torch_core.vllm.buffers import check_common
from torch_core.vllm.config import BuilderConfig
from torch_core.vllm.types import AttentionCGSupport

#: The metadata of a step that a builder makes.
M = TypeVar("M")


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Builds the metadata of a step once for all layers of a cache group. Names follow vLLM's class of this name.

    Args:
        kv_cache_spec: the cache of the layers.
        layer_names: the layers, for messages.
        vllm_config: the remaining configuration.
        device: device of the tensors.

    Attributes:
        _cudagraph_support: batches that a CUDA graph can replay; use `get_cudagraph_support`.
        reorder_batch_threshold: the longest query that counts as a decode, when decodes must come first in the batch;
            None when the order does not matter.
        supports_update_block_table: `update_block_table` works.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    supports_update_block_table: ClassVar[bool] = False

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | LatentCacheSpec | StateCacheSpec,
        layer_names: Sequence[str],
        vllm_config: BuilderConfig,
        device: torch.device | str,
    ) -> None:
        self.kv_cache_spec: Any = kv_cache_spec
        self.layer_names = tuple(layer_names)
        self.vllm_config = vllm_config
        self.device = torch.device(device)
        if not isinstance(vllm_config, BuilderConfig):
            raise InvalidInput("vllm_config", f"is a {type(vllm_config).__name__}", "pass a BuilderConfig")
        vllm_config.context_parallel.refuse_both_kinds()
        self._set_up()

    def _set_up(self) -> None:
        """Checks the specification and the configuration further, and derives values from them; nothing by default."""

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: BuilderConfig | None = None, kv_cache_spec: KVCacheSpec | None = None
    ) -> AttentionCGSupport:
        """Returns which batches can be replayed from a CUDA graph, by a builder with this configuration."""
        del vllm_config, kv_cache_spec  # For builders whose answer depends on them.
        return cls._cudagraph_support

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        *,
        arrays: Mapping[str, Tensor] | None = None,
    ) -> M:
        """Returns the metadata of a step.

        Args:
            common_prefix_len: tokens of a prefix that all sequences share and that is attended once (cascade); 0 for
                none.
            common_attn_metadata: the batch.
            fast_build: prefer a quick build over quick attention; for drafts that are used once.
            arrays: the batch on the device already, by field name, from `upload` or `StepBuffers`; shared by the
                builders of all cache groups. None uploads it.
        """

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata, *, arrays: Mapping[str, Tensor] | None = None
    ) -> M:
        """Returns the metadata to capture a CUDA graph with; by default that of `build`."""
        return self.build(0, common_attn_metadata, **_given(arrays))

    def build_for_drafting(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        draft_index: int,
        *,
        arrays: Mapping[str, Tensor] | None = None,
    ) -> M:
        """Returns the metadata of a draft model's step: the `draft_index`-th token of a chain, or level of a tree."""
        del draft_index  # The batch says everything by default.
        return self.build(0, common_attn_metadata, fast_build=True, **_given(arrays))

    def update_block_table(self, metadata: M, blk_table: Tensor, slot_mapping: Tensor) -> M:
        """Returns the same metadata for another cache group, whose tables and slots alone differ.

        Raises:
            Unsupported: the builder cannot; see `supports_update_block_table`.
        """
        del metadata, blk_table, slot_mapping  # For builders that support it.
        wanted = "call build for each cache group"
        raise Unsupported("update_block_table", f"is not served by {type(self).__name__}", wanted)

    def use_cascade_attention(self, *args: Any, **options: Any) -> bool:
        """Returns whether attending a shared prefix once should pay; never, by default."""
        del args, options  # For builders that support it.
        return False

    def _check_cache(self, common: CommonAttentionMetadata) -> None:
        """Refuses a batch whose tables are for blocks of another size, or for another cache group, than the layers'."""
        check_common("common_attn_metadata", common)
        own, config = self.kv_cache_spec.block_size, self.vllm_config
        ranks = config.context_parallel.total_cp_world_size
        shared = "" if ranks == 1 else f" ({own} on each of {ranks} ranks, which share a block)"
        sizes = ("block_size", common.block_size, own * ranks, shared)
        for name, found, needed, more in (sizes, ("cache_group", common.cache_group, config.cache_group, "")):
            if found != needed:
                wanted = f"{self._layers()} have {needed}{more}. Build it with {name}={needed}"
                raise InvalidInput(name, f"of the metadata is {found}", wanted)

    def _layers(self) -> str:
        names = ", ".join(self.layer_names[:3]) or "these layers"
        return names if len(self.layer_names) <= 3 else f"{names} and {len(self.layer_names) - 3} more layers"

    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        """Sets the longest decode: a verified draft is one too when the kernels allow it.

        A decode of a step that verifies `n` drafted tokens has `1 + n` of them, `1 + 2 n` when drafts are made in
        parallel. Ranks that share sequences align only single tokens with their part of the cache. None, for a
        builder that takes any order, stays None but on such ranks.
        """
        threshold = reorder_batch_threshold
        if threshold is not None and supports_spec_as_decode:
            drafted = self.vllm_config.num_speculative_tokens * (2 if self.vllm_config.parallel_drafting else 1)
            threshold = max(threshold, 1 + drafted)
        if self.vllm_config.context_parallel.dcp_world_size > 1 and not supports_dcp_with_varlen:
            threshold = 1
        self.reorder_batch_threshold = threshold


def _given(arrays: Mapping[str, Tensor] | None) -> dict[str, Any]:
    # A builder that was written for vLLM does not know them.
    return {} if arrays is None else {"arrays": arrays}
