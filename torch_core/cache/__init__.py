"""The shared block allocator: block tables, prefix sharing and step accounting, in the standard library alone."""

from __future__ import annotations

from torch_core.cache.config import NULL_BLOCK, CacheConfig, CacheGroup, LayerGroups, StateConfig, group_layers
from torch_core.cache.manager import CacheManager
from torch_core.cache.records import (
    BlockCopy,
    BlockSwap,
    CacheStats,
    CommittedStep,
    StateCopy,
    StateSwap,
    StepPlan,
    StepRow,
    StepRows,
)

__all__ = [
    "NULL_BLOCK",
    "BlockCopy",
    "BlockSwap",
    "CacheConfig",
    "CacheGroup",
    "CacheManager",
    "CacheStats",
    "CommittedStep",
    "LayerGroups",
    "StateConfig",
    "StateCopy",
    "StateSwap",
    "StepPlan",
    "StepRow",
    "StepRows",
    "group_layers",
]
