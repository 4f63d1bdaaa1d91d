"""The batch-invariant mode of an engine: it switches the model, or refuses what would break the promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.models import Decoder, set_batch_invariant
from torch_core.base.errors import Unsupported


def switched(model: Any, config: EngineConfig) -> EngineConfig:
    """Returns the config of an engine over a model; in the mode if either asks for it, and then the model is too.

    Raises:
        Unsupported: another option breaks the promise, or a module of the model does.
    """
    if not (config.batch_invariant or getattr(model, "batch_invariant", False)):
        return config
    config = replace(config, batch_invariant=True)
    if config.kv_cache_dtype not in ("auto", model.paged_spec.dtype):
        wanted = "with batch_invariant it is 'auto': a training pass does not round keys to 8 bits"
        raise Unsupported("kv_cache_dtype", value=config.kv_cache_dtype, wanted=wanted)
    if config.decode_context_parallel_size > 1:
        wanted = "with batch_invariant it is 1: each device sums over its own keys"
        raise Unsupported("decode_context_parallel_size", value=config.decode_context_parallel_size, wanted=wanted)
    if config.tensor_parallel_size > 1 and not isinstance(model, Decoder):
        wanted = "with batch_invariant it is 1 for a module of your own: XLA chooses the order of its sums over devices"
        raise Unsupported("tensor_parallel_size", value=config.tensor_parallel_size, wanted=wanted)
    set_batch_invariant(model)
    return config
