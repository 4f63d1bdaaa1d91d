"""From the rows of a step to the int32 arrays that every backend and JAX share; numpy only, no torch, no jax."""

from torch_core.metadata.batch import (
    BatchSplit,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    split_prefill_chunks,
)
from torch_core.metadata.buckets import Buckets
from torch_core.metadata.build import build_common_metadata
from torch_core.metadata.cache_groups import build_group_metadata, group_fields, group_layout
from torch_core.metadata.cascade import (
    CascadeCosts,
    PrefixGroups,
    common_prefix_length,
    prefix_groups,
    prefix_piece_tokens,
    use_cascade_attention,
)
from torch_core.metadata.check import check_metadata
from torch_core.metadata.common import CommonAttentionMetadata, EncoderMetadata
from torch_core.metadata.context_parallel import get_dcp_local_seq_lens, get_dcp_local_slots
from torch_core.metadata.encoder import EncoderRow, build_dense_metadata, encoder_layout
from torch_core.metadata.layout import FieldLayout, PackedLayout, metadata_layout
from torch_core.metadata.rows import SequenceRow, SequenceRowLike
from torch_core.metadata.slots import state_layout
from torch_core.metadata.tables import BlockTableCache

__all__ = [
    "BatchSplit", "BlockTableCache", "Buckets", "CascadeCosts", "CommonAttentionMetadata", "EncoderMetadata",
    "EncoderRow", "FieldLayout", "PackedLayout", "PrefixGroups", "SequenceRow", "SequenceRowLike",
    "build_common_metadata", "build_dense_metadata", "build_group_metadata", "check_metadata", "common_prefix_length",
    "encoder_layout", "get_dcp_local_seq_lens", "get_dcp_local_slots", "group_fields", "group_layout",
    "make_kv_sharing_fast_prefill_common_attn_metadata",
    "make_local_attention_virtual_batches", "metadata_layout", "prefix_groups", "prefix_piece_tokens",
    "reorder_batch_to_split_decodes_and_prefills", "split_decodes_and_prefills", "split_prefill_chunks",
    "state_layout", "use_cascade_attention",
]  # fmt: skip
