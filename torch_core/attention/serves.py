"""Attention's rows in the table of supported features."""

from __future__ import annotations

from typing import Any

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.call import SCORE_FIELDS, AttentionCall, PagedCall, TableCall
from torch_core.base.specs import FP8_DTYPES, MAX_HEAD_SIZE, ArraySpec
from torch_core.launch.call import dtype_name
from torch_core.launch.op import Served
from torch_core.launch.serves import ALL, float64_limit, strides

_MAX_BLOCK_SIZE = 256
#: Sizes of latents, whose head is the latent and the rotary key.
MAX_LORA_RANK = 512
MAX_ROPE_DIM = 128
#: Arrays that kernels read without strides.
CONTIGUOUS = (*SCORE_FIELDS, "sinks", "seq_causal", "dropout_seeds")


def too_large(implementation: str, *sizes: tuple[str, int, int]) -> str | None:
    """Returns which of (name, size, limit) the Triton kernels do not serve; None if they serve all."""
    if implementation != "triton":
        return None
    return next((f"{name} is {size} and its limit {limit}" for name, size, limit in sizes if size > limit), None)


def key_dtype(*stored: str) -> Served:
    """Returns the row of key and value dtypes for an op with these caches and arrays that it writes to them."""
    text = {
        "triton": "the query's; paged also fp8 and int8 with any query, 16 bits with an fp8 query",
        "torch": "the same",
        "xla": "the same, and float64",
    }
    return Served("key/value dtype", text, float64_limit(*stored))


def cached_key_dtype(*caches: str) -> Served:
    """Returns that row for attention to a cache."""
    row = key_dtype(*caches)

    def limit(call: TableCall[Any], implementation: str) -> str | None:
        mixed = dtype_name(call.query) in FP8_DTYPES and call.key_dtype == "float32"
        own = "query is fp8 and the cache float32" if mixed and implementation == "triton" else None
        return float64_limit(*caches)(call, implementation) or own

    return row._replace(limit=limit)


def head_size_limit(call: AttentionCall[Any], implementation: str) -> str | None:
    """Returns which head size of a call an implementation does not serve; None if it serves both."""
    sizes = {"head_size": call.head_size, "value_head_size": call.value_head_size}
    return too_large(implementation, *((name, size, MAX_HEAD_SIZE) for name, size in sizes.items()))


def _block_size(call: TableCall[Any], implementation: str) -> str | None:
    return too_large(implementation, ("block_size", call.block_size, _MAX_BLOCK_SIZE))


def _batch_invariant(call: AttentionCall[Any], implementation: str) -> str | None:
    if not call.batch_invariant:
        return None
    is_latent = call.values_are_keys
    if implementation == "torch" or (implementation == "triton" and is_latent):
        return f"batch_invariant is given{' with latents' if is_latent else ''}"
    clash = "dropout" if call.drops else "segment_ids" if getattr(call, "segment_ids", None) is not None else None
    return None if clash is None else f"batch_invariant is given with {clash}"


def _paged_strides(call: PagedCall[Any], implementation: str) -> str | None:
    if implementation != "triton":
        return None
    scales = (call.k_scale_cache, call.v_scale_cache)
    layouts = {scale.element_strides for scale in scales if isinstance(scale, ArraySpec)}
    own = "k_scale_cache and v_scale_cache have different strides" if len(layouts) > 1 else None
    free = strides(contiguous=CONTIGUOUS, free=("k_scale_cache", "v_scale_cache"))
    return free.limit(call, implementation) or own  # type: ignore[misc]


def _derivative(call: DenseBackwardCall[Any], implementation: str) -> str | None:
    biases = [name for name in ("relative_bias", "qq_bias") if getattr(call, name) is not None]
    return f"{biases[0]} has a derivative" if biases and implementation != "xla" else None


HEAD_SIZE = Served(
    "head size",
    {
        "triton": f"1 to {MAX_HEAD_SIZE}; values may differ; latents up to {MAX_LORA_RANK} + {MAX_ROPE_DIM}",
        "torch": "any; values may differ",
        "xla": "the same",
    },
    head_size_limit,
)
BLOCK_SIZE = Served("block size", {"triton": f"1 to {_MAX_BLOCK_SIZE}", "torch": "any", "xla": "any"}, _block_size)
BATCH_INVARIANT = Served(
    "batch_invariant",
    {
        "triton": "paged and dense, not of latents; without dropout and segments",
        "torch": "no",
        "xla": "paged, dense and latents; without dropout and segments",
    },
    _batch_invariant,
)
PAGED_STRIDES = strides()._replace(limit=_paged_strides)
DERIVATIVE = Served(
    "reverse derivatives",
    {
        "triton": "of queries, keys, values, ALiBi slopes and sinks, dense and paged; not together with other biases",
        "torch": "the same",
        "xla": "of everything, forward ones too",
    },
    _derivative,
)
#: Rows without a limit.
EVERYWHERE = (
    Served("one cache, or a key cache and a value cache", ALL),
    Served("scales of keys and values: per tensor (number or array); per token and head", ALL),
    Served("causal, windows to both sides, attention_chunk, together too", ALL),
    Served("causal flag per sequence (seq_causal), bidirectional ranges (mm_prefix_range)", ALL),
    Served("biases by distance (ALiBi, its root form, relative_bias) and between new tokens (qq_bias)", ALL),
    Served("logits_soft_cap, sinks, together too", ALL),
    Served("segments of packed rows (segment_ids), dense; without dropout and arrays of whole sequences", ALL),
    Served("dropout of dense attention, forward and backward, the same weights in all", ALL),
    Served("log-sum-exp output, float32, natural logarithm", ALL),
    Served("output dtype: the query's, bfloat16 for an fp8 query, another one, scaled fp8", ALL),
    Served(
        "kv_chunk_size", {"triton": "fixes the chunks of keys", "torch": "changes nothing", "xla": "changes nothing"}
    ),
    Served("vmap", {"triton": "dense in one call, others one after the other", "torch": "the same", "xla": "yes"}),
)
