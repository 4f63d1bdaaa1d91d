"""From the rows of a step to the int32 arrays that every backend and JAX share; numpy only, no torch, no jax."""

from torch_core.metadata.buckets import Buckets, pad_to_bucket
from torch_core.metadata.build import build_common_metadata
from torch_core.metadata.check import check_metadata
from torch_core.metadata.common import CommonAttentionMetadata
from torch_core.metadata.layout import FieldLayout, PackedLayout, metadata_layout
from torch_core.metadata.rows import SequenceRow, SequenceRowLike
from torch_core.metadata.slots import compute_positions, compute_slot_mapping, compute_slot_mapping_start_idx
from torch_core.metadata.staging import StagingRing
from torch_core.metadata.table_cache import BlockTableCache

__all__ = [
    "BlockTableCache",
    "Buckets",
    "CommonAttentionMetadata",
    "FieldLayout",
    "PackedLayout",
    "SequenceRow",
    "SequenceRowLike",
    "StagingRing",
    "build_common_metadata",
    "check_metadata",
    "compute_positions",
    "compute_slot_mapping",
    "compute_slot_mapping_start_idx",
    "metadata_layout",
    "pad_to_bucket",
]
