"""The attention backend contract of vLLM's engine as a library: backends, their choice, builders and graph capture."""

from torch_core.vllm.backend import AttentionBackend
from torch_core.vllm.backends import (
    BACKENDS,
    TorchAttentionBackend,
    TorchAttentionImpl,
    TorchAttentionMetadata,
    TorchAttentionMetadataBuilder,
    TorchMLABackend,
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
    TritonMLABackend,
    get_backend,
    select_backend,
    subclass_attention_backend,
    subclass_attention_backend_with_overrides,
)
from torch_core.vllm.buffers import ENCODER_FIELDS, StepBuffers, WorkspaceManager, upload
from torch_core.vllm.builder import AttentionMetadataBuilder
from torch_core.vllm.capture import CommonAttentionState, StepGraphs
from torch_core.vllm.config import AttentionSelectorConfig, BuilderConfig
from torch_core.vllm.impl import AttentionImpl, AttentionImplBase, AttentionLayer, AttentionScales, MLAAttentionImpl
from torch_core.vllm.legacy import (
    CommonMetadataBuilder,
    compute_slot_mapping,
    compute_slot_mapping_start_idx,
    get_num_prefill_decode_query_kv_tokens,
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
    is_block_tables_empty,
)
from torch_core.vllm.mla import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonPrefillMetadata,
    MLAContextChunk,
    MLADims,
    compute_num_kv_splits,
    get_mla_dims,
)
from torch_core.vllm.mla_builder import MLACommonMetadataBuilder, TorchMLAMetadataBuilder, TritonMLAMetadataBuilder
from torch_core.vllm.mla_impl import TorchMLAImpl, TritonMLAImpl
from torch_core.vllm.paged_builder import PagedAttentionMetadataBuilder
from torch_core.vllm.paged_impl import PagedAttentionImpl
from torch_core.vllm.paged_metadata import PagedAttentionMetadata
from torch_core.vllm.ranks import DistributedGroup, PromptShare
from torch_core.vllm.states import (
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
    Mamba1AttentionMetadata,
    Mamba1AttentionMetadataBuilder,
    Mamba2AttentionMetadata,
    Mamba2AttentionMetadataBuilder,
    ShortConvAttentionMetadata,
    ShortConvAttentionMetadataBuilder,
)
from torch_core.vllm.types import (
    CACHE_DTYPES,
    FP8_STATIC_TENSOR,
    PACKED_LATENTS,
    AttentionCGSupport,
    AttentionType,
    ContextGroup,
    ContextParallel,
    DeviceCapability,
    DeviceInfo,
    KVCacheLayoutType,
    MultipleOf,
    QuantKey,
    is_quantized_kv_cache,
    is_valid_kv_cache_layout,
)

__all__ = [
    "BACKENDS", "CACHE_DTYPES", "ENCODER_FIELDS", "FP8_STATIC_TENSOR", "PACKED_LATENTS", "AttentionBackend",
    "AttentionCGSupport", "AttentionImpl", "AttentionImplBase", "AttentionLayer", "AttentionMetadataBuilder",
    "AttentionScales", "AttentionSelectorConfig", "AttentionType", "BuilderConfig", "CommonAttentionState",
    "CommonMetadataBuilder", "ContextGroup", "ContextParallel", "DeviceCapability", "DeviceInfo", "DistributedGroup",
    "GDNAttentionMetadata", "GDNAttentionMetadataBuilder", "KVCacheLayoutType", "LinearAttentionMetadata",
    "LinearAttentionMetadataBuilder", "MLAAttentionImpl", "MLACommonDecodeMetadata", "MLACommonMetadata",
    "MLACommonMetadataBuilder", "MLACommonPrefillMetadata", "MLAContextChunk", "MLADims", "Mamba1AttentionMetadata",
    "Mamba1AttentionMetadataBuilder", "Mamba2AttentionMetadata",
    "Mamba2AttentionMetadataBuilder", "MultipleOf", "PagedAttentionImpl", "PagedAttentionMetadata",
    "PagedAttentionMetadataBuilder", "PromptShare", "QuantKey", "ShortConvAttentionMetadata",
    "ShortConvAttentionMetadataBuilder", "StepBuffers", "StepGraphs", "TorchAttentionBackend", "TorchAttentionImpl",
    "TorchAttentionMetadata", "TorchAttentionMetadataBuilder", "TorchMLABackend", "TorchMLAImpl",
    "TorchMLAMetadataBuilder", "TritonAttentionBackend", "TritonAttentionImpl", "TritonAttentionMetadata",
    "TritonAttentionMetadataBuilder", "TritonMLABackend", "TritonMLAImpl", "TritonMLAMetadataBuilder",
    "WorkspaceManager", "compute_num_kv_splits", "compute_slot_mapping", "compute_slot_mapping_start_idx",
    "get_backend", "get_mla_dims", "get_num_prefill_decode_query_kv_tokens", "get_seq_len_block_table_args",
    "is_all_cross_attn_metadata_set", "is_all_encoder_attn_metadata_set", "is_block_tables_empty",
    "is_quantized_kv_cache", "is_valid_kv_cache_layout", "select_backend", "subclass_attention_backend",
    "subclass_attention_backend_with_overrides", "upload",
]  # fmt: skip
