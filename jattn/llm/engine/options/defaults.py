"""The sizes of an engine that were not given: by the device's memory, and by the model's."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jattn.llm.engine.options.config import EngineConfig

#: Default of a server, and of an engine on a GPU without a given value.
SERVING_SIZES: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
#: The same where JAX may use `LARGE_DEVICE_BYTES` of a GPU or more. With an 8B model on an H100, steps of 8,192 tokens
#: gave 6 to 7% more tokens a second than steps of 2,048, and steps of 16,384 no more, which let running requests wait
#: twice as long.
LARGE_DEVICE_SIZES: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
LARGE_DEVICE_BYTES = 48 << 30
#: Tokens of a step there if the weights have fewer bytes, as vLLM's `LLM` has for every model (engine/arg_utils.py).
#: 512 requests (512 in, 128 out) of a Llama of 1B gave 2.7% more tokens a second on an H200 than with 8,192, and a step
#: still takes less time than one of 8,192 tokens of an 8B model.
SMALL_MODEL_TOKENS, SMALL_MODEL_BYTES = 16384, 4 << 30


def default_config(model: Any = None, **options: Any) -> EngineConfig:
    """Returns the config of an engine over a model with only these options: a GPU's steps have more room."""
    sizes = serving_sizes() if jax.default_backend() == "gpu" else {}
    # In fixed shapes one short prompt costs as much as a full step.
    if sizes == LARGE_DEVICE_SIZES and not options.get("fixed_shapes") and _is_small(model):
        sizes = sizes | {"max_num_batched_tokens": SMALL_MODEL_TOKENS}
    return EngineConfig(**{**sizes, **options})


def serving_sizes() -> dict[str, Any]:
    """Returns the default sizes of a server's steps, by the memory that JAX may use on the first device."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    return LARGE_DEVICE_SIZES if limit >= LARGE_DEVICE_BYTES else SERVING_SIZES


def _is_small(model: Any) -> bool:
    """Returns whether a module's weights are known to have few bytes, on all devices together."""
    if not isinstance(model, nnx.Module):
        return False
    weights = jax.tree.leaves(nnx.state(model, nnx.Param))
    # A number of Python's has no size.
    return sum(getattr(leaf, "nbytes", 0) for leaf in weights) < SMALL_MODEL_BYTES
