"""The metadata that the paged implementations read, and its builder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from torch_core.calls import SharedPrefix, shared_prefix
from torch_core.errors import InvalidInput
from torch_core.metadata import (
    CommonAttentionMetadata,
    get_dcp_local_seq_lens,
    mask_slots_of_other_ranks,
    prefix_piece_tokens,
    use_cascade_attention,
)
from torch_core.specs import DTYPE_BYTES, PAD_SLOT_ID, KVCacheSpec
from torch_core.vllm.builder import AttentionMetadataBuilder
from torch_core.vllm.config import BuilderConfig
from torch_core.vllm.types import AttentionCGSupport, AttentionType, ContextParallel
from torch_core.vllm.upload import upload

__all__ = ["PagedAttentionMetadata", "PagedAttentionMetadataBuilder"]

_CACHED = (AttentionType.DECODER, AttentionType.ENCODER_DECODER)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedAttentionMetadata:
    """What the layers of one cache group read in one step. Tensors are int32 on the device; padded rows are empty.

    Field names are those of vLLM's `TritonAttentionMetadata`, and of its older metadata for encoder-decoder models.

    Attributes:
        num_actual_tokens: new tokens without padding.
        max_query_len: bound on the query lengths.
        query_start_loc: [num_seqs + 1].
        max_seq_len: bound on `seq_lens`.
        seq_lens: [num_seqs].
        block_table: [num_seqs, max_blocks].
        slot_mapping: [num_tokens].
        block_size: tokens of a block of the cache that the tables are for.
        cache_group: the allocator's group of layers.
        causal: whether queries see no later key.
        num_decodes: rows with one new token.
        num_decode_tokens: their tokens.
        num_prefills: the other rows.
        num_prefill_tokens: their tokens.
        common_prefix_len: tokens of a prefix that is attended once for all sequences; 0 for none.
        shared_prefix: the batch split at that prefix.
        encoder_seq_lens: [num_seqs]; keys of cross attention.
        max_encoder_seq_len: bound on them.
        cross_block_tables: [num_seqs, max_encoder_blocks].
        cross_slot_mapping: [encoder tokens]; where this step's encoder keys are written.
        num_encoder_tokens: how many of them are real.
        dcp_local_seq_lens: [num_seqs]; the part of `seq_lens` on this rank.
        mm_prefix_range: [num_seqs, ranges, 2]; spans that see each other in both directions.
        seq_causal: bool [num_seqs]; which sequences are causal, where they differ.
        scheduler_metadata: always None: the kernels plan on the device.
        prefix_scheduler_metadata: always None.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    cache_group: int = 0
    causal: bool = True
    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    common_prefix_len: int = 0
    shared_prefix: SharedPrefix[Tensor] | None = None
    encoder_seq_lens: Tensor | None = None
    max_encoder_seq_len: int | None = None
    cross_block_tables: Tensor | None = None
    cross_slot_mapping: Tensor | None = None
    num_encoder_tokens: int | None = None
    dcp_local_seq_lens: Tensor | None = None
    mm_prefix_range: Tensor | None = None
    seq_causal: Tensor | None = None
    scheduler_metadata: None = None
    prefix_scheduler_metadata: None = None

    @property
    def use_cascade(self) -> bool:
        """A shared prefix is attended once."""
        return self.shared_prefix is not None

    @property
    def cu_prefix_query_lens(self) -> Tensor | None:
        """See `SharedPrefix`; None without one."""
        return None if self.shared_prefix is None else self.shared_prefix.cu_prefix_query_lens

    def update_shared_prefix(self) -> None:
        """Splits the batch anew, in place, after other lengths and tables were uploaded into the same tensors.

        A step that is captured in a graph calls this first; otherwise its replays attend with the split of the step
        that was captured. The prefix stays as long as it is. Without a shared prefix nothing happens.
        """
        if self.shared_prefix is not None:
            # The prefix's own tables are a view of the first row, and its lengths constant.
            fresh = _split(self, self.shared_prefix.max_prefix_query_len)
            for name in ("cu_prefix_query_lens", "suffix_block_table", "suffix_kv_lens"):
                getattr(self.shared_prefix, name).copy_(getattr(fresh, name))

    @property
    def prefix_kv_lens(self) -> Tensor | None:
        """See `SharedPrefix`; None without one."""
        return None if self.shared_prefix is None else self.shared_prefix.prefix_kv_lens

    @property
    def suffix_kv_lens(self) -> Tensor | None:
        """See `SharedPrefix`; None without one."""
        return None if self.shared_prefix is None else self.shared_prefix.suffix_kv_lens


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Builds `PagedAttentionMetadata`; the layers' kernels take any mix of rows, so the order is free."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    supports_update_block_table: ClassVar[bool] = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: Sequence[str],
        config: BuilderConfig,
        device: torch.device | str,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, config, device)
        config.context_parallel.refuse_spread_prompts()

    @classmethod
    def get_cudagraph_support(
        cls, config: BuilderConfig | None = None, kv_cache_spec: KVCacheSpec | None = None
    ) -> AttentionCGSupport:
        """Returns never for ranks that share sequences, whose lengths `build` derives from the batch's."""
        if config is not None and config.context_parallel.dcp_world_size > 1:
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(config, kv_cache_spec)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        *,
        arrays: Mapping[str, Tensor] | None = None,
        mm_prefix_range: Tensor | None = None,
        seq_causal: Tensor | None = None,
    ) -> PagedAttentionMetadata:
        """See `AttentionMetadataBuilder.build`; the build is always fast.

        Args:
            common_prefix_len: as there.
            common_attn_metadata: as there.
            fast_build: as there.
            arrays: as there.
            mm_prefix_range: int32 [num_seqs, ranges, 2] on the device; bidirectional spans.
            seq_causal: bool [num_seqs] on the device; overrides the batch's `causal` for each sequence.

        Raises:
            InvalidInput: the batch is for another block size or cache group, lacks the encoder's fields, or shares no
                such prefix.
        """
        del fast_build  # There is no slower build that would attend faster.
        common = common_attn_metadata
        self._check(common, common_prefix_len)
        on_device = upload(common, self.device) if arrays is None else arrays
        query_lens = common.query_lens[: common.num_reqs]
        num_decodes = int(np.count_nonzero(query_lens == 1))
        parallel = self.config.context_parallel
        local_seq_lens = None
        if parallel.dcp_world_size > 1:
            _check_local_slots(common, parallel)
            local_seq_lens = get_dcp_local_seq_lens(
                on_device["seq_lens"],
                dcp_world_size=parallel.dcp_world_size,
                dcp_rank=parallel.dcp_rank,
                interleave_size=parallel.interleave_size,
            )
        encoder = common.encoder
        metadata = PagedAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=on_device["query_start_loc"],
            max_seq_len=common.max_seq_len,
            seq_lens=on_device["seq_lens"],
            block_table=on_device["block_tables"],
            slot_mapping=on_device["slot_mapping"],
            block_size=common.block_size,
            cache_group=common.cache_group,
            causal=common.causal and self.config.attn_type is AttentionType.DECODER,
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
            num_prefills=common.num_reqs - num_decodes,
            num_prefill_tokens=common.num_actual_tokens - num_decodes,
            encoder_seq_lens=on_device.get("encoder_seq_lens"),
            max_encoder_seq_len=None if encoder is None else encoder.max_encoder_seq_len,
            cross_block_tables=on_device.get("cross_block_tables"),
            cross_slot_mapping=on_device.get("cross_slot_mapping"),
            num_encoder_tokens=None if encoder is None else encoder.num_encoder_tokens,
            dcp_local_seq_lens=local_seq_lens,
            mm_prefix_range=mm_prefix_range,
            seq_causal=seq_causal,
        )
        return self._with_cascade(metadata, common_prefix_len) if common_prefix_len else metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata, *, arrays: Mapping[str, Tensor] | None = None
    ) -> PagedAttentionMetadata:
        """Returns metadata whose sequences are all empty: a capture must neither take long nor write to the cache."""
        metadata = self.build(0, common_attn_metadata, arrays=arrays)
        metadata.seq_lens.zero_()
        metadata.query_start_loc.zero_()
        metadata.slot_mapping.fill_(PAD_SLOT_ID)
        for tensor, empty in ((metadata.encoder_seq_lens, 0), (metadata.cross_slot_mapping, PAD_SLOT_ID)):
            if tensor is not None:
                tensor.fill_(empty)
        return metadata

    def update_block_table(
        self, metadata: PagedAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> PagedAttentionMetadata:
        """Returns the metadata with the tables and slots of this builder's cache group; cascade fields are dropped."""
        return replace(
            metadata,
            block_table=blk_table,
            slot_mapping=slot_mapping,
            block_size=self.kv_cache_spec.block_size,
            cache_group=self.config.cache_group,
            common_prefix_len=0,
            shared_prefix=None,
        )

    def use_cascade_attention(self, common_prefix_len: int, query_lens: np.ndarray, *, num_sms: int) -> bool:
        """Returns whether attending the shared prefix once should be faster; see `torch_core.metadata`.

        Never where results must not depend on the batch: whether a prefix is shared does. Nor where the keys are not
        the batch's own.
        """
        spec, config = self.kv_cache_spec, self.config
        if config.batch_invariant or config.attn_type is not AttentionType.DECODER:
            return False
        return use_cascade_attention(
            common_prefix_len,
            query_lens,
            num_query_heads=config.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            bytes_per_element=DTYPE_BYTES[spec.dtype],
            num_sms=num_sms,
            use_alibi=config.use_alibi,
            use_sliding_window=config.sliding_window is not None,
            use_local_attention=config.attention_chunk is not None,
            dcp_world_size=config.context_parallel.dcp_world_size,
            costs=config.cascade_costs,
        )

    def _check(self, common: CommonAttentionMetadata, common_prefix_len: int) -> None:
        kind, block_size = self.config.attn_type, self.kv_cache_spec.block_size
        if kind in _CACHED and common.block_size != block_size:
            raise InvalidInput(
                f"the metadata is for blocks of {common.block_size} tokens; the cache of {self._layers()} has blocks "
                f"of {block_size}. Build it with block_size={block_size}."
            )
        if kind in _CACHED and common.cache_group != self.config.cache_group:
            raise InvalidInput(
                f"the metadata is for cache group {common.cache_group}; {self._layers()} are in group "
                f"{self.config.cache_group}. Build it with cache_group={self.config.cache_group}."
            )
        if kind is AttentionType.ENCODER_DECODER and common.encoder is None:
            raise InvalidInput(
                f"the metadata has no encoder fields, which cross attention of {self._layers()} needs. Build it with "
                "encoder_rows."
            )
        shared = common_prefix_len
        if shared and kind is not AttentionType.DECODER:
            raise InvalidInput(
                f"common_prefix_len is {shared}; {kind.value} attention does not read the cache of the prefix: use 0."
            )
        if shared < 0 or shared % block_size or (shared and shared > _shortest_context(common)):
            raise InvalidInput(
                f"common_prefix_len is {shared}; it must be a multiple of the block size, {block_size}, and at most "
                f"the shortest context of the batch, {_shortest_context(common)}."
            )

    def _layers(self) -> str:
        names = ", ".join(self.layer_names[:3]) or "these layers"
        return names if len(self.layer_names) <= 3 else f"{names} and {len(self.layer_names) - 3} more layers"

    def _with_cascade(self, metadata: PagedAttentionMetadata, prefix: int) -> PagedAttentionMetadata:
        piece_tokens = prefix_piece_tokens(
            metadata.slot_mapping.shape[0],
            num_query_heads=self.config.num_heads,
            num_kv_heads=self.kv_cache_spec.num_kv_heads,
        )
        metadata = replace(metadata, common_prefix_len=prefix)
        return replace(metadata, shared_prefix=_split(metadata, piece_tokens))


def _split(metadata: PagedAttentionMetadata, piece_tokens: int) -> SharedPrefix[Tensor]:
    # Made on the device from what is there: a second upload would cost more than these small kernels.
    split = shared_prefix(
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        num_tokens=metadata.slot_mapping.shape[0],
        block_size=metadata.block_size,
        common_prefix_len=metadata.common_prefix_len,
        piece_tokens=piece_tokens,
        library=torch,
        device=metadata.seq_lens.device,
    )
    return replace(split, suffix_block_table=split.suffix_block_table.contiguous())


def _check_local_slots(common: CommonAttentionMetadata, place: ContextParallel) -> None:
    """Refuses slots that are not this rank's: keys would be written where no rank reads them."""
    ranks = {
        "dcp_world_size": place.dcp_world_size,
        "dcp_rank": place.dcp_rank,
        "interleave_size": place.interleave_size,
    }
    num_tokens, block_size = common.num_actual_tokens, common.block_size
    positions, slots = common.positions[:num_tokens], common.slot_mapping[:num_tokens]
    before = get_dcp_local_seq_lens(positions, **ranks)
    rows = np.repeat(np.arange(common.num_reqs), common.query_lens[: common.num_reqs])
    own = common.block_tables[rows, before // block_size] * block_size + before % block_size
    wanted = mask_slots_of_other_ranks(own, positions, **ranks)
    if (slots != wanted).any():
        first = int((slots != wanted).argmax())
        raise InvalidInput(
            f"slot_mapping[{first}] is {slots[first]}; the slot of that token on rank {place.dcp_rank} of "
            f"{place.dcp_world_size} is {wanted[first]}. The slots of a batch are those of one cache that holds all "
            "tokens: give each rank its own (mask_slots_of_other_ranks)."
        )


def _shortest_context(common: CommonAttentionMetadata) -> int:
    context = common.compute_num_computed_tokens()[: common.num_reqs]
    return int(context.min()) if context.size else 0
