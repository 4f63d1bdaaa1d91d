"""What each implementation serves: one table that the code reads to refuse, the tests walk and the docs print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.call import SCORE_FIELDS, AttentionCall, PagedCall, TableCall
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import Unsupported
from torch_core.base.specs import FP8_DTYPES, QUERY_DTYPES, ArraySpec
from torch_core.experts.call import ExpertsCall
from torch_core.experts.routing_call import RouteCall
from torch_core.latent.call import LatentCall
from torch_core.launch.call import Call, dtype_name

__all__ = ["IMPLEMENTATIONS", "SERVES", "Served", "refuse_unserved", "serves_table", "unserved"]

#: "triton": Triton kernels on CUDA, from torch and from JAX alike. "torch": plain torch on a CPU. "xla": plain jnp.
IMPLEMENTATIONS = ("triton", "torch", "xla")
_MAX_HEAD_SIZE = 256
_MAX_LORA_RANK = 512
_MAX_ROPE_DIM = 128
# Caches, and what is written to them.
_STORED = ("kv_cache", "key_cache", "value_cache", "latent_cache", "key", "kv_c", "k_pe", "qkv")
_LATENT_BIASES = (*SCORE_FIELDS, "seq_causal")
_MAX_BLOCK_SIZE = 256
_CONTIGUOUS = (
    *SCORE_FIELDS, "sinks", "seq_causal", "slot_mapping", "block_mapping", "dropout_seeds", "topk_weights", "topk_ids",
    "gate_up_bias", "down_bias", "bias", "correction_bias",
)  # fmt: skip
_ALL: Mapping[str, str] = dict.fromkeys(IMPLEMENTATIONS, "yes")


class Served(NamedTuple):
    """A row of the table.

    Attributes:
        feature: what it is about.
        text: for each implementation what it serves, for people.
        limit: takes a call and an implementation; what of the call the implementation does not serve, or None.
    """

    feature: str
    text: Mapping[str, str]
    limit: Callable[[Call[Any], str], str | None] = lambda call, implementation: None


def refuse_unserved(call: Call[Any], implementation: str, *, named: str | None = None) -> None:
    """Refuses a checked call that an implementation does not serve.

    Args:
        call: checked.
        implementation: whose column of the table counts.
        named: the implementation that the caller knows of, where it is another one: "torch" on CUDA.

    Raises:
        Unsupported: with what is not served, and by whom it is.
    """
    reason = unserved(call, implementation)
    if reason is not None:
        named = named or implementation
        others = [other for other in IMPLEMENTATIONS if other != named and unserved(call, other) is None]
        fix = f"implementation {' or '.join(map(repr, others))} does" if others else "no implementation does"
        why = "" if named == implementation else f" On CUDA {named!r} launches the kernels of {implementation!r}."
        raise Unsupported(f"{call.name}: {reason}, which implementation {named!r} does not serve; {fix}.{why}")


def unserved(call: Call[Any], implementation: str) -> str | None:
    """Returns what of a checked call an implementation does not serve; None where it serves the call."""
    return next(filter(None, (row.limit(call, implementation) for row in SERVES)), None)


def serves_table() -> str:
    """Returns the table in Markdown."""
    lines = [f"| feature | {' | '.join(IMPLEMENTATIONS)} |", "|---" * (1 + len(IMPLEMENTATIONS)) + "|"]
    lines += [f"| {row.feature} | {' | '.join(row.text[name] for name in IMPLEMENTATIONS)} |" for row in SERVES]
    return "\n".join(lines) + "\n"


def _query_dtype(call: Call[Any], implementation: str) -> str | None:
    if isinstance(call, AttentionCall):
        name, found = "query", dtype_name(call.query)
        served = (*QUERY_DTYPES, *(FP8_DTYPES if isinstance(call, TableCall) else ()))
    elif isinstance(call, MergeCall):
        name, found, served = "out_a", dtype_name(call.out_a), QUERY_DTYPES
    elif isinstance(call, (ExpertsCall, RouteCall)):
        name, found, served = "hidden_states", dtype_name(call.hidden_states), QUERY_DTYPES
    else:
        return None
    if found in served or (found == "float64" and implementation == "xla"):
        return None
    return f"{name} is {found}"


def _cache_dtype(call: Call[Any], implementation: str) -> str | None:
    stores = isinstance(call, TableCall) or call.name in ("write_kv_cache", "write_latent_cache", "rotate_and_write")
    arrays = call.arrays() if stores else {}
    wide = next((name for name in _STORED if name in arrays and dtype_name(arrays[name]) == "float64"), None)
    if implementation != "xla" and wide is not None:
        return f"{wide} is float64"
    mixed = isinstance(call, TableCall) and dtype_name(call.query) in FP8_DTYPES and call.key_dtype == "float32"
    return "query is fp8 and the cache float32" if mixed and implementation == "triton" else None


def _head_size(call: Call[Any], implementation: str) -> str | None:
    if implementation != "triton" or not isinstance(call, AttentionCall):
        return None
    if isinstance(call, LatentCall):
        rope_dim = call.head_size - call.kv_lora_rank
        limits = (("kv_lora_rank", call.kv_lora_rank, _MAX_LORA_RANK), ("the rotary key", rope_dim, _MAX_ROPE_DIM))
    else:
        sizes = {name: getattr(call, name) for name in ("head_size", "value_head_size")}
        limits = tuple((name, size, _MAX_HEAD_SIZE) for name, size in sizes.items())
    return next((f"{name} is {size} and its limit {limit}" for name, size, limit in limits if size > limit), None)


def _latent_biases(call: Call[Any], implementation: str) -> str | None:
    if implementation != "triton" or not isinstance(call, LatentCall):
        return None
    return next((f"{name} is given" for name in _LATENT_BIASES if getattr(call, name) is not None), None)


def _block_size(call: Call[Any], implementation: str) -> str | None:
    if implementation == "triton" and isinstance(call, TableCall) and call.block_size > _MAX_BLOCK_SIZE:
        return f"block_size is {call.block_size} and its limit {_MAX_BLOCK_SIZE}"
    return None


def _strides(call: Call[Any], implementation: str) -> str | None:
    # Only the specs that a plan is made for say how an array lies.
    if implementation != "triton":
        return None
    for name, spec in call.arrays().items():
        strides = spec.strides if isinstance(spec, ArraySpec) and spec.size else None
        if strides is None:
            continue
        free = call.name == "copy_blocks" or name.startswith("lse") or name.endswith("scale_cache")
        if name in _CONTIGUOUS or (strides[-1] != 1 and not free):
            wanted = "all axes contiguous" if name in _CONTIGUOUS else "a last stride of 1"
            return f"{name} has strides {strides} and not {wanted}"
    scales = [getattr(call, name, None) for name in ("k_scale_cache", "v_scale_cache")]
    layouts = {scale.element_strides for scale in scales if isinstance(scale, ArraySpec)}
    if isinstance(call, PagedCall) and len(layouts) > 1:
        return "k_scale_cache and v_scale_cache have different strides"
    return None


def _derivative(call: Call[Any], implementation: str) -> str | None:
    if not isinstance(call, DenseBackwardCall) or implementation == "xla":
        return None
    biases = [name for name in ("relative_bias", "qq_bias") if getattr(call, name) is not None]
    return f"{biases[0]} has a derivative" if biases else None


#: The rows, as the docs print them.
SERVES: tuple[Served, ...] = (
    Served(
        "query dtype",
        {
            "triton": "float32, bfloat16, float16; paged also fp8 (e4m3, e5m2), scaled",
            "torch": "the same",
            "xla": "the same, and float64",
        },
        _query_dtype,
    ),
    Served(
        "key/value dtype",
        {
            "triton": "the query's; paged also fp8 and int8 with any query, 16 bits with an fp8 query",
            "torch": "the same",
            "xla": "the same, and float64",
        },
        _cache_dtype,
    ),
    Served(
        "head size",
        {
            "triton": f"1 to {_MAX_HEAD_SIZE}; values may differ; latents up to {_MAX_LORA_RANK} + {_MAX_ROPE_DIM}",
            "torch": "any; values may differ",
            "xla": "the same",
        },
        _head_size,
    ),
    Served(
        "biases, bidirectional ranges and a causal flag per sequence over latents",
        {"triton": "no", "torch": "yes", "xla": "yes"},
        _latent_biases,
    ),
    Served("block size", {"triton": f"1 to {_MAX_BLOCK_SIZE}", "torch": "any", "xla": "any"}, _block_size),
    Served(
        "strides",
        {"triton": "any with the last axis contiguous", "torch": "any", "xla": "contiguous, as all of XLA's"},
        _strides,
    ),
    Served("one cache, or a key cache and a value cache", _ALL),
    Served("scales of keys and values: per tensor (number or array); per token and head", _ALL),
    Served("causal, windows to both sides, attention_chunk, together too", _ALL),
    Served("causal flag per sequence (seq_causal), bidirectional ranges (mm_prefix_range)", _ALL),
    Served("biases by distance (ALiBi, its root form, relative_bias) and between new tokens (qq_bias)", _ALL),
    Served("logits_soft_cap, sinks, together too", _ALL),
    Served("layers of experts (fused_experts): every activation of ACTIVATIONS, biases, ids of other devices", _ALL),
    Served("routers (route_experts): softmax and sigmoid, groups of experts, a correction bias", _ALL),
    Served("dropout of dense attention, forward and backward, the same weights in all", _ALL),
    Served("log-sum-exp output, float32, natural logarithm", _ALL),
    Served("output dtype: the query's, bfloat16 for an fp8 query, another one, scaled fp8", _ALL),
    Served(
        "kv_chunk_size",
        {"triton": "fixes the chunks of keys", "torch": "changes nothing", "xla": "changes nothing"},
    ),
    Served(
        "reverse derivatives",
        {
            "triton": "of queries, keys, values, ALiBi slopes and sinks, dense and paged; not beside other biases",
            "torch": "the same",
            "xla": "of everything, forward ones too",
        },
        _derivative,
    ),
    Served("vmap", {"triton": "dense in one call, others one after the other", "torch": "the same", "xla": "yes"}),
)
