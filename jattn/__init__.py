"""Paged attention for JAX and Flax from one torch and Triton core.

The public names load on first use, so that `import jattn` costs nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_core.errors import (
    CacheCorruption,
    InvalidInput,
    JattnError,
    OutOfBlocks,
    PoolLost,
    RequestTooLong,
    Unsupported,
)
from torch_core.specs import KVCacheSpec

if TYPE_CHECKING:
    from jattn.bridge import to_jax, to_torch, typed_errors
    from jattn.engine import LLM, EngineConfig, RequestOutput, SamplingParams, generate
    from jattn.load import load_model, save_model
    from jattn.metadata import AttentionMetadata
    from jattn.nn import PagedAttention
    from jattn.ops import (
        attention,
        attention_with_lse,
        merge_states,
        paged_attention,
        paged_attention_with_lse,
        write_kv_cache,
    )
    from jattn.pool import KVPool

__all__ = [
    "LLM",
    "AttentionMetadata",
    "CacheCorruption",
    "EngineConfig",
    "InvalidInput",
    "JattnError",
    "KVCacheSpec",
    "KVPool",
    "OutOfBlocks",
    "PagedAttention",
    "PoolLost",
    "RequestOutput",
    "RequestTooLong",
    "SamplingParams",
    "Unsupported",
    "attention",
    "attention_with_lse",
    "generate",
    "load_model",
    "merge_states",
    "paged_attention",
    "paged_attention_with_lse",
    "save_model",
    "to_jax",
    "to_torch",
    "typed_errors",
    "write_kv_cache",
]
__version__ = "0.1.0"

_HOMES = {
    "jattn.bridge": ("to_jax", "to_torch", "typed_errors"),
    "jattn.engine": ("LLM", "EngineConfig", "RequestOutput", "SamplingParams", "generate"),
    "jattn.load": ("load_model", "save_model"),
    "jattn.metadata": ("AttentionMetadata",),
    "jattn.nn": ("PagedAttention",),
    "jattn.ops": (
        "attention",
        "attention_with_lse",
        "merge_states",
        "paged_attention",
        "paged_attention_with_lse",
        "write_kv_cache",
    ),
    "jattn.pool": ("KVPool",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'jattn' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
