"""The attention backend contract of vLLM's engine as a library: backends, their choice, builders and graph capture."""

from torch_core.vllm.backend import AttentionBackend
from torch_core.vllm.builder import AttentionMetadataBuilder
from torch_core.vllm.capture import CommonAttentionState, StepGraphs
from torch_core.vllm.config import AttentionSelectorConfig, BuilderConfig
from torch_core.vllm.impl import (
    AttentionImpl,
    AttentionImplBase,
    AttentionLayer,
    AttentionScales,
    MLAAttentionImpl,
)
from torch_core.vllm.layers import (
    PerLayerParameters,
    create_fast_prefill_custom_backend,
    get_per_layer_parameters,
    infer_global_hyperparameters,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
    subclass_attention_metadata,
)
from torch_core.vllm.legacy import (
    CommonMetadataBuilder,
    get_num_prefill_decode_query_kv_tokens,
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
    is_block_tables_empty,
)
from torch_core.vllm.mla import MLADims, get_mla_dims
from torch_core.vllm.paged_impl import PagedAttentionImpl
from torch_core.vllm.paged_metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder
from torch_core.vllm.registry import (
    BACKENDS,
    get_backend,
    select_backend,
    subclass_attention_backend,
    subclass_attention_backend_with_overrides,
)
from torch_core.vllm.torch_attn import (
    TorchAttentionBackend,
    TorchAttentionImpl,
    TorchAttentionMetadata,
    TorchAttentionMetadataBuilder,
)
from torch_core.vllm.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from torch_core.vllm.types import (
    CACHE_DTYPES,
    FP8_STATIC_TENSOR,
    AttentionCGSupport,
    AttentionType,
    ContextParallel,
    DeviceCapability,
    DeviceInfo,
    KVCacheLayoutType,
    MultipleOf,
    QuantKey,
    is_quantized_kv_cache,
    is_valid_kv_cache_layout,
    kv_cache_torch_dtype,
)
from torch_core.vllm.upload import StepBuffers, upload

__all__ = [
    "BACKENDS",
    "CACHE_DTYPES",
    "FP8_STATIC_TENSOR",
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionImplBase",
    "AttentionLayer",
    "AttentionMetadataBuilder",
    "AttentionScales",
    "AttentionSelectorConfig",
    "AttentionType",
    "BuilderConfig",
    "CommonAttentionState",
    "CommonMetadataBuilder",
    "ContextParallel",
    "DeviceCapability",
    "DeviceInfo",
    "KVCacheLayoutType",
    "MLAAttentionImpl",
    "MLADims",
    "MultipleOf",
    "PagedAttentionImpl",
    "PagedAttentionMetadata",
    "PagedAttentionMetadataBuilder",
    "PerLayerParameters",
    "QuantKey",
    "StepBuffers",
    "StepGraphs",
    "TorchAttentionBackend",
    "TorchAttentionImpl",
    "TorchAttentionMetadata",
    "TorchAttentionMetadataBuilder",
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonAttentionMetadata",
    "TritonAttentionMetadataBuilder",
    "create_fast_prefill_custom_backend",
    "get_backend",
    "get_mla_dims",
    "get_num_prefill_decode_query_kv_tokens",
    "get_per_layer_parameters",
    "get_seq_len_block_table_args",
    "infer_global_hyperparameters",
    "is_all_cross_attn_metadata_set",
    "is_all_encoder_attn_metadata_set",
    "is_block_tables_empty",
    "is_quantized_kv_cache",
    "is_valid_kv_cache_layout",
    "kv_cache_torch_dtype",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "select_backend",
    "subclass_attention_backend",
    "subclass_attention_backend_with_overrides",
    "subclass_attention_metadata",
    "upload",
]
