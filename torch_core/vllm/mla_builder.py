"""The builders of the metadata of multi-head latent attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Generic

import numpy as np
import torch
from torch import Tensor

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import PAD_SLOT_ID, ArraySpec, AttentionSpec, LatentCacheSpec
from torch_core.latent.call import LatentCall
from torch_core.launch.run import scratch_of
from torch_core.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from torch_core.vllm.buffers import upload
from torch_core.vllm.builder import AttentionMetadataBuilder, M
from torch_core.vllm.mla import MLACommonDecodeMetadata, MLACommonMetadata, MLACommonPrefillMetadata, MLAContextChunk
from torch_core.vllm.ranks import RankArrays
from torch_core.vllm.types import AttentionCGSupport


class MLACommonMetadataBuilder(AttentionMetadataBuilder[MLACommonMetadata], Generic[M]):
    """Builds `MLACommonMetadata`; decodes, drafts that are verified among them, come first in the batch.

    Args are those of `AttentionMetadataBuilder`; the specification is of latents, and the configuration says the sizes
    of the latent attention.

    Raises:
        InvalidInput: a cache of keys and values, or one of other sizes than the configuration's.
    """

    def _set_up(self) -> None:
        kv_cache_spec, vllm_config = self.kv_cache_spec, self.vllm_config
        dims = vllm_config.mla_dims
        if not isinstance(kv_cache_spec, LatentCacheSpec) or dims is None:
            wanted = "latent attention needs a LatentCacheSpec, and mla_dims in the configuration"
            raise InvalidInput("kv_cache_spec", f"is a {type(kv_cache_spec).__name__} and mla_dims is {dims}", wanted)
        if (dims.kv_lora_rank, dims.qk_rope_head_dim) != (kv_cache_spec.kv_lora_rank, kv_cache_spec.rope_dim):
            raise InvalidInput(
                "kv_cache_spec",
                f"has latents of {kv_cache_spec.kv_lora_rank} and rotary keys of {kv_cache_spec.rope_dim} elements",
                f"mla_dims says {dims.kv_lora_rank} and {dims.qk_rope_head_dim}",
            )
        self.latent_spec = kv_cache_spec
        self.mla_dims = dims
        self.num_heads = vllm_config.num_heads
        self.dcp_world_size = vllm_config.context_parallel.dcp_world_size
        self._ranks = RankArrays(vllm_config.context_parallel, kv_cache_spec.block_size)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._reserve_attn_logits_workspace()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        *,
        arrays: Mapping[str, Tensor] | None = None,
    ) -> MLACommonMetadata:
        """See `AttentionMetadataBuilder.build`; the build is always fast.

        Raises:
            InvalidInput: the batch is for another block size or cache group, is not causal, or has decodes after
                prefills; a shared prefix, which has no path of its own here.
        """
        del fast_build  # There is no slower build that would attend faster.
        common = common_attn_metadata
        self._check(common, common_prefix_len)
        on_device = upload(common, self.device) if arrays is None else arrays
        if self.dcp_world_size > 1:
            seq_lens, slots = self._ranks.of(on_device)
            on_device = {**on_device, "seq_lens": seq_lens, "slot_mapping": slots}
        split = split_decodes_and_prefills(common, self.reorder_batch_threshold or 1, require_uniform=True)
        # Padding belongs to the decodes of a batch without prefills: graphs are captured and replayed with it.
        whole = split.num_prefills == 0
        rows = common.num_seqs if whole else split.num_decodes
        tokens = common.num_tokens if whole else split.num_decode_tokens
        return MLACommonMetadata(
            num_reqs=common.num_reqs,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=on_device["query_start_loc"],
            slot_mapping=on_device["slot_mapping"],
            block_size=self.latent_spec.block_size,
            cache_group=common.cache_group,
            num_decodes=rows,
            num_decode_tokens=tokens,
            num_prefills=split.num_prefills,
            decode=self._decode(on_device, rows) if rows else None,
            prefill=None if whole else self._prefill(common, on_device, rows),
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata, *, arrays: Mapping[str, Tensor] | None = None
    ) -> MLACommonMetadata:
        """Returns metadata of empty decodes: a capture must neither take long nor write to the cache.

        Where ranks share sequences, `arrays` are needed, and `build` has to be called with them before each replay.

        Raises:
            InvalidInput: the batch has longer queries than decodes have; ranks that share sequences, and no arrays.
        """
        if common_attn_metadata.max_query_len > (self.reorder_batch_threshold or 1):
            wanted = f"graphs hold decodes of at most {self.reorder_batch_threshold} tokens. Run prefills without one"
            raise InvalidInput("max_query_len", value=common_attn_metadata.max_query_len, wanted=wanted)
        if self.dcp_world_size > 1:
            self._ranks.keep(arrays)
        metadata = self.build(0, common_attn_metadata, arrays=arrays)
        metadata.query_start_loc.zero_()
        metadata.slot_mapping.fill_(PAD_SLOT_ID)
        if metadata.decode is not None:
            metadata.decode.seq_lens.zero_()
        return metadata

    def _reserve_attn_logits_workspace(self) -> None:
        """Reserves scratch memory where kernels need some; nothing by default."""

    def _decode(self, on_device: Mapping[str, Tensor], rows: int) -> MLACommonDecodeMetadata:
        return MLACommonDecodeMetadata(
            block_table=on_device["block_tables"][:rows],
            seq_lens=on_device["seq_lens"][:rows],
            query_start_loc=on_device["query_start_loc"][: rows + 1],
            max_query_len=self.reorder_batch_threshold or 1,
        )

    def _prefill(
        self, common: CommonAttentionMetadata, on_device: Mapping[str, Tensor], first: int
    ) -> MLACommonPrefillMetadata:
        end = common.num_reqs
        context = common.compute_num_computed_tokens()[first:end]
        if self.dcp_world_size > 1 and context.any():
            raise InvalidInput(
                "num_computed_tokens",
                f"of sequence {first + int(context.argmax())} is {context.max()}",
                f"a cache that is spread over {self.dcp_world_size} ranks takes prompts in one piece, without a prefix",
            )
        starts = on_device["query_start_loc"][first : end + 1]
        return MLACommonPrefillMetadata(
            query_start_loc=starts - int(common.query_start_loc[first]),
            max_query_len=int(common.query_lens[first:end].max()),
            context=self._context(context, common.block_tables[first:end]),
        )

    def _context(self, lens: np.ndarray, tables: np.ndarray) -> tuple[MLAContextChunk, ...]:
        """Splits the context of all prefills at the same positions, as many tokens of each as the workspace holds."""
        block_size = self.latent_spec.block_size
        share = self.vllm_config.chunked_prefill_workspace_size // len(lens)
        step = max(block_size, share // block_size * block_size)
        chunks = []
        for start in range(0, int(lens.max()), step):
            counts = np.clip(lens - start, 0, step)
            starts = np.cumsum([0, *counts], dtype=np.int32)
            rows = np.repeat(np.arange(len(lens)), counts)
            positions = start + np.arange(starts[-1]) - starts[rows]
            slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
            slots, starts = (torch.from_numpy(array).to(self.device, non_blocking=True) for array in (slots, starts))
            chunks.append(MLAContextChunk(slots=slots, key_start_loc=starts, max_key_len=int(counts.max())))
        return tuple(chunks)

    def _check(self, common: CommonAttentionMetadata, common_prefix_len: int) -> None:
        if common_prefix_len:
            fix = "latent attention has no cascade: give 0"
            raise InvalidInput("common_prefix_len", value=common_prefix_len, wanted=fix)
        if not common.causal:
            raise InvalidInput("causal", value=False, wanted="latent attention serves causal decoders")
        self._check_cache(common)


class TritonMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Builds the metadata of `TritonMLABackend`, and reserves the scratch of the largest decode beforehand.

    Args are those of `MLACommonMetadataBuilder`.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def _reserve_attn_logits_workspace(self) -> None:
        """Reserves the partial results of batches up to `max_num_seqs`, so that a locked workspace never grows."""
        config = self.vllm_config
        workspace, most = config.workspace, config.max_num_seqs
        if workspace is None:
            return
        if most is None or config.max_model_len is None:
            wanted = "a workspace is reserved for them"
            raise InvalidInput("max_num_seqs", f"is {most} and max_model_len {config.max_model_len}", wanted)
        calls = (self._decode_call(num_seqs, config.max_model_len) for num_seqs in range(1, most + 1))
        needed = (scratch_of(call, self.device) for call in calls)
        workspace.get_simultaneous(*max(needed, key=lambda each: sum(math.prod(shape) for shape, _ in each)))

    def _decode_call(self, num_seqs: int, max_model_len: int) -> LatentCall[ArraySpec]:
        spec, query_len = self.latent_spec, self.reorder_batch_threshold or 1
        # A query may be wider than a quantised cache's elements.
        dtype = spec.dtype if spec.dtype in ("float32", "bfloat16", "float16") else "bfloat16"
        size = spec.kv_lora_rank + spec.rope_dim
        blocks = -(-max_model_len // spec.block_size)
        return LatentCall(
            # Ranks that share sequences gather the heads of all of them.
            query=ArraySpec((num_seqs * query_len, self.num_heads * self.dcp_world_size, size), dtype),
            latent_cache=ArraySpec(spec.shape(2), spec.dtype),
            kv_lora_rank=spec.kv_lora_rank,
            block_tables=ArraySpec((num_seqs, blocks), "int32"),
            seq_lens=ArraySpec((num_seqs,), "int32"),
            query_start_loc=ArraySpec((num_seqs + 1,), "int32"),
            spec=AttentionSpec(scale=1.0),
            max_query_len=query_len,
            with_lse=True,
        )


class TorchMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Builds the metadata of `TorchMLABackend`; there are neither graphs nor scratch on the CPU."""
