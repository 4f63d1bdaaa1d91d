"""The builder of the metadata that the paged implementations read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
from torch import Tensor

from torch_core.base.checks import check_heads
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import DTYPE_BYTES, PAD_SLOT_ID, KVCacheSpec, LatentCacheSpec
from torch_core.metadata import (
    CommonAttentionMetadata,
    common_prefix_length,
    prefix_piece_tokens,
    use_cascade_attention,
)
from torch_core.vllm.buffers import upload
from torch_core.vllm.builder import AttentionMetadataBuilder
from torch_core.vllm.config import BuilderConfig
from torch_core.vllm.paged_metadata import PagedAttentionMetadata
from torch_core.vllm.ranks import RankArrays, prompt_share
from torch_core.vllm.types import AttentionCGSupport, AttentionType

_CACHED = (AttentionType.DECODER, AttentionType.ENCODER_DECODER)


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    """Builds `PagedAttentionMetadata`; the layers' kernels take any mix of rows, so the order is free."""

    supports_update_block_table: ClassVar[bool] = True

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: BuilderConfig | None = None, kv_cache_spec: KVCacheSpec | None = None
    ) -> AttentionCGSupport:
        """Returns single-token decodes for ranks that share sequences; `build` derives their arrays before a replay."""
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if vllm_config is None or vllm_config.context_parallel.total_cp_world_size == 1:
            return support
        return min(support, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, key=lambda kind: kind.value)

    def _set_up(self) -> None:
        kv_cache_spec = self.kv_cache_spec
        if not isinstance(kv_cache_spec, KVCacheSpec):
            others = "Those with a state have the builders of torch_core.vllm.states"
            if isinstance(kv_cache_spec, LatentCacheSpec):
                others = "Latent ones have TritonMLAMetadataBuilder"
            wanted = f"{type(self).__name__} is for layers of keys and values. {others}"
            raise InvalidInput("kv_cache_spec", f"is a {type(kv_cache_spec).__name__}", wanted)
        check_heads("num_heads", self.vllm_config.num_heads, kv_cache_spec.num_kv_heads)
        self._ranks = RankArrays(self.vllm_config.context_parallel, kv_cache_spec.block_size)

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

        Args are those of it, and on the device `mm_prefix_range`, int32 [num_seqs, ranges, 2] (bidirectional spans) and
        `seq_causal`, bool [num_seqs] (overrides the batch's `causal` for each sequence).

        Raises:
            InvalidInput: the batch is for another block size or cache group, lacks the encoder's fields, or does not
                share this prefix.
        """
        del fast_build  # There is no slower build that would attend faster.
        common = common_attn_metadata
        self._check(common, common_prefix_len)
        on_device = upload(common, self.device) if arrays is None else arrays
        seq_lens = common.seq_lens[: common.num_reqs]
        is_decode = common.query_lens[: common.num_reqs] == 1
        num_decodes = int(np.count_nonzero(is_decode))
        parallel = self.vllm_config.context_parallel
        local_seq_lens, slots, share = None, on_device["slot_mapping"], None
        if parallel.total_cp_world_size > 1:
            local_seq_lens, slots = self._ranks.of(on_device)
        if parallel.pcp_world_size > 1 and common.max_query_len > 1:
            place = {"pcp_world_size": parallel.pcp_world_size, "pcp_rank": parallel.pcp_rank}
            share = prompt_share(common, **place, device=self.device)
        encoder = common.encoder
        metadata = PagedAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=on_device["query_start_loc"],
            max_seq_len=common.max_seq_len,
            seq_lens=on_device["seq_lens"],
            block_table=on_device["block_tables"],
            slot_mapping=slots,
            block_size=self.kv_cache_spec.block_size if self.vllm_config.attn_type in _CACHED else common.block_size,
            cache_group=common.cache_group,
            causal=common.causal and self.vllm_config.attn_type is AttentionType.DECODER,
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
            num_prefills=common.num_reqs - num_decodes,
            num_prefill_tokens=common.num_actual_tokens - num_decodes,
            max_prefill_seq_len=int(seq_lens.max(initial=0, where=~is_decode)),
            max_decode_seq_len=int(seq_lens.max(initial=0, where=is_decode)),
            encoder_seq_lens=on_device.get("encoder_seq_lens"),
            max_encoder_seq_len=None if encoder is None else encoder.max_encoder_seq_len,
            cross_block_tables=on_device.get("cross_block_tables"),
            cross_slot_mapping=on_device.get("cross_slot_mapping"),
            num_encoder_tokens=None if encoder is None else encoder.num_encoder_tokens,
            dcp_local_seq_lens=local_seq_lens,
            prompt_share=share,
            mm_prefix_range=mm_prefix_range,
            seq_causal=seq_causal,
        )
        if not common_prefix_len:
            return metadata
        heads = {"num_query_heads": self.vllm_config.num_heads, "num_kv_heads": self.kv_cache_spec.num_kv_heads}
        return metadata.with_shared_prefix(common_prefix_len, prefix_piece_tokens(common.num_tokens, **heads))

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata, *, arrays: Mapping[str, Tensor] | None = None
    ) -> PagedAttentionMetadata:
        """Returns metadata whose sequences are all empty: a capture must neither take long nor write to the cache.

        Its numbers are those of the padded batch, which bound every step that is replayed. Where ranks share sequences,
        `arrays` are needed, and `build` has to be called with them before each replay.

        Raises:
            InvalidInput: as `build`; ranks that share sequences, and no arrays.
        """
        if self.vllm_config.context_parallel.total_cp_world_size > 1:
            self._ranks.keep(arrays)
        metadata = self.build(0, common_attn_metadata, arrays=arrays)
        metadata.seq_lens.zero_()
        if metadata.dcp_local_seq_lens is not None:
            metadata.dcp_local_seq_lens.zero_()
        metadata.query_start_loc.zero_()
        metadata.slot_mapping.fill_(PAD_SLOT_ID)
        for tensor, empty in ((metadata.encoder_seq_lens, 0), (metadata.cross_slot_mapping, PAD_SLOT_ID)):
            if tensor is not None:
                tensor.fill_(empty)
        rows, tokens = metadata.seq_lens.shape[0], metadata.slot_mapping.shape[0]
        kind = "decode" if rows == tokens else "prefill"
        counts = {f"num_{kind}s": rows, f"num_{kind}_tokens": tokens, f"max_{kind}_seq_len": metadata.max_seq_len}
        if metadata.cross_block_tables is not None and metadata.cross_slot_mapping is not None:
            counts["num_encoder_tokens"] = metadata.cross_slot_mapping.shape[0]
            counts["max_encoder_seq_len"] = metadata.cross_block_tables.shape[1] * metadata.block_size
        return replace(metadata, num_actual_tokens=tokens, **counts)

    def update_block_table(
        self, metadata: PagedAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> PagedAttentionMetadata:
        """Returns the metadata with the tables and slots of this builder's cache group; cascade fields are dropped."""
        return replace(
            metadata,
            block_table=blk_table,
            slot_mapping=slot_mapping,
            block_size=self.kv_cache_spec.block_size,
            cache_group=self.vllm_config.cache_group,
            common_prefix_len=0,
            shared_prefix=None,
        )

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: np.ndarray, num_query_heads: int | None = None,
        num_kv_heads: int | None = None, use_alibi: bool = False, use_sliding_window: bool = False,
        use_local_attention: bool = False, num_sms: int = 0, dcp_world_size: int = 1,
    ) -> bool:  # fmt: skip
        """Returns whether attending the shared prefix once should be faster; see `torch_core.metadata`.

        Values of the configuration need not be passed again. Cascade is never chosen if results must not depend on the
        batch, because a shared prefix does, or if the keys are not the batch's own.
        """
        spec, config = self.kv_cache_spec, self.vllm_config
        if config.batch_invariant or config.attn_type is not AttentionType.DECODER:
            return False
        return use_cascade_attention(
            common_prefix_len,
            query_lens,
            num_query_heads=num_query_heads or config.num_heads,
            num_kv_heads=num_kv_heads or spec.num_kv_heads,
            head_size=spec.head_size,
            bytes_per_element=DTYPE_BYTES[spec.dtype],
            num_sms=num_sms,
            use_alibi=use_alibi or config.use_alibi,
            use_sliding_window=use_sliding_window or config.sliding_window is not None,
            use_local_attention=use_local_attention or config.attention_chunk is not None,
            dcp_world_size=max(dcp_world_size, config.context_parallel.total_cp_world_size),
            costs=config.cascade_costs,
        )

    def _check(self, common: CommonAttentionMetadata, common_prefix_len: int) -> None:
        kind, ranks = self.vllm_config.attn_type, self.vllm_config.context_parallel.total_cp_world_size
        block_size = self.kv_cache_spec.block_size * ranks
        if kind in _CACHED:
            self._check_cache(common)
        if kind is AttentionType.ENCODER_DECODER and common.encoder is None:
            wanted = f"cross attention of {self._layers()} needs it. Build it with encoder_rows"
            raise InvalidInput("encoder", "of the metadata is None", wanted)
        shared = common_prefix_len
        if shared and kind is not AttentionType.DECODER:
            wanted = f"{kind.value} attention does not read the cache of the prefix: use 0"
            raise InvalidInput("common_prefix_len", value=shared, wanted=wanted)
        if shared and (shared < 0 or shared % block_size or shared > _shared_context(common)):
            wanted = (
                f"it must be a multiple of the block size, {block_size}, and at most {_shared_context(common)}, the "
                "tokens that all sequences had before the step, in the same blocks"
            )
            raise InvalidInput("common_prefix_len", value=shared, wanted=wanted)


def _shared_context(common: CommonAttentionMetadata) -> int:
    # A sequence alone shares its context with itself.
    return common_prefix_length(common) if common.num_reqs != 1 else int(common.compute_num_computed_tokens()[0])
