"""Paged attention for JAX and Flax from one torch and Triton core.

The public names load on first use, so that `import jattn` costs nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Type checkers read these imports, Python reads `_NAMES`; `tests/rules` checks that the two are equal.
if TYPE_CHECKING:
    from jattn.bridge import to_jax as to_jax
    from jattn.bridge import to_torch as to_torch
    from jattn.bridge import typed_errors as typed_errors
    from jattn.llm.engine import LLM as LLM
    from jattn.llm.engine import EngineConfig as EngineConfig
    from jattn.llm.engine import RequestOutput as RequestOutput
    from jattn.llm.engine import SamplingParams as SamplingParams
    from jattn.llm.engine import generate as generate
    from jattn.llm.load import load_model as load_model
    from jattn.llm.load import save_model as save_model
    from jattn.metadata import AttentionMetadata as AttentionMetadata
    from jattn.nn import MultiHeadAttention as MultiHeadAttention
    from jattn.nn import MultiHeadLatentAttention as MultiHeadLatentAttention
    from jattn.nn import PagedAttention as PagedAttention
    from jattn.nn import attention_fn as attention_fn
    from jattn.ops import attention as attention
    from jattn.ops import attention_with_lse as attention_with_lse
    from jattn.ops import dropout_seeds as dropout_seeds
    from jattn.ops import indexer_topk as indexer_topk
    from jattn.ops import merge_states as merge_states
    from jattn.ops import mla_attention as mla_attention
    from jattn.ops import mla_attention_with_lse as mla_attention_with_lse
    from jattn.ops import paged_attention as paged_attention
    from jattn.ops import paged_attention_with_lse as paged_attention_with_lse
    from jattn.ops import sparse_mla_attention as sparse_mla_attention
    from jattn.ops import sparse_mla_attention_with_lse as sparse_mla_attention_with_lse
    from jattn.ops import token_logprobs as token_logprobs
    from jattn.ops import write_kv_cache as write_kv_cache
    from jattn.ops import write_latent_cache as write_latent_cache
    from jattn.pool import KVPool as KVPool
    from torch_core.base.errors import CacheCorruption as CacheCorruption
    from torch_core.base.errors import EngineAsleep as EngineAsleep
    from torch_core.base.errors import EngineClosed as EngineClosed
    from torch_core.base.errors import InvalidInput as InvalidInput
    from torch_core.base.errors import JattnError as JattnError
    from torch_core.base.errors import OutOfBlocks as OutOfBlocks
    from torch_core.base.errors import Overloaded as Overloaded
    from torch_core.base.errors import PoolLost as PoolLost
    from torch_core.base.errors import RequestTooLong as RequestTooLong
    from torch_core.base.errors import Unsupported as Unsupported
    from torch_core.base.specs import KVCacheSpec as KVCacheSpec
    from torch_core.base.specs import LatentCacheSpec as LatentCacheSpec
    from torch_core.metadata import SequenceRow as SequenceRow

__version__ = "0.2.0"

_NAMES = {
    "jattn.bridge": ["to_jax", "to_torch", "typed_errors"],
    "jattn.llm.engine": ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "generate"],
    "jattn.llm.load": ["load_model", "save_model"],
    "jattn.metadata": ["AttentionMetadata"],
    "jattn.nn": ["MultiHeadAttention", "MultiHeadLatentAttention", "PagedAttention", "attention_fn"],
    "jattn.ops": [
        "attention", "attention_with_lse", "dropout_seeds", "indexer_topk", "merge_states", "mla_attention",
        "mla_attention_with_lse", "paged_attention", "paged_attention_with_lse", "sparse_mla_attention",
        "sparse_mla_attention_with_lse", "token_logprobs", "write_kv_cache", "write_latent_cache",
    ],
    "jattn.pool": ["KVPool"],
    "torch_core.base.errors": [
        "CacheCorruption", "EngineAsleep", "EngineClosed", "InvalidInput", "JattnError", "OutOfBlocks", "Overloaded",
        "PoolLost", "RequestTooLong", "Unsupported",
    ],
    "torch_core.base.specs": ["KVCacheSpec", "LatentCacheSpec"],
    "torch_core.metadata": ["SequenceRow"],
}  # fmt: skip
_HOME_OF = {name: home for home, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'jattn' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
