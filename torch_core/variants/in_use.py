"""The kernel variants that models use: one representative plan for each, to compile and to measure."""

from __future__ import annotations

from torch_core.attention.choose import plan_attention, plan_paged_attention
from torch_core.attention.merge.plan import plan_merge_states
from torch_core.blocks.copy.plan import plan_copy_blocks
from torch_core.blocks.write.plan import plan_write_kv_cache, plan_write_kv_cache_per_token_head
from torch_core.plan.compile import KernelVariant, kernel_variant
from torch_core.plan.plan import ArraySpec, DeviceLimits, OperationPlan
from torch_core.specs import AttentionSpec

__all__ = ["plans_in_use", "variants_in_use"]

_NUM_BLOCKS = 4096
_DECODE_SEQS = 64
_PREFILL_TOKENS = 8192


def plans_in_use() -> dict[str, OperationPlan]:
    """Returns representative plans by label: 32 query heads of size 128 over 8 key/value heads unless it says other.

    A label starts with the operation; the rest names what differs from bfloat16, block size 16 and causal.
    """
    return {
        "write": _write("bfloat16", "bfloat16"),
        "write one": _write("bfloat16", "bfloat16", tokens=1),
        "write fp8": _write("bfloat16", "float8_e4m3fn", scaled=True),
        "write head 80": _write("bfloat16", "bfloat16", head_size=80),
        "write per token and head int8": _write_per_token_head("int8"),
        "copy blocks": plan_copy_blocks(_cache("bfloat16"), ArraySpec((64, 2), "int32")),
        "merge": _merge(),
        "decode": _decode(),
        "decode long": _decode(num_seqs=1, table_tokens=65536),
        "decode one chunk": _decode(num_seqs=256, table_tokens=512),
        "decode fp8": _decode(cache_dtype="float8_e4m3fn", scaled=True),
        "decode speculative": _decode(query_len=4),
        "decode window sinks": _decode(spec=AttentionSpec(scale=0.088, window_left=4095), sinks=True),
        "decode head 64": _decode(head_size=64),
        "decode head 256": _decode(head_size=256, num_heads=8, num_kv_heads=4),
        "decode float32": _decode(dtype="float32", cache_dtype="float32"),
        "prefill": _prefill(),
        "prefill short queries": _prefill(max_query_len=512),
        "prefill head 64": _prefill(head_size=64),
        "prefill head 64 short queries": _prefill(head_size=64, max_query_len=512),
        "prefill head 256": _prefill(head_size=256, num_heads=8, num_kv_heads=4),
        "prefill float16 window sinks lse": _prefill(
            dtype="float16",
            cache_dtype="float16",
            spec=AttentionSpec(scale=0.088, window_left=4095),
            sinks=True,
            with_lse=True,
        ),
        "prefill chunks": _prefill(max_query_len=64),
        "prefill chunks head 64": _prefill(head_size=64, max_query_len=64),
        "prefill chunks head 256": _prefill(head_size=256, num_heads=16, num_kv_heads=4, max_query_len=64),
        "prefill chunks group 8 window sinks lse": _prefill(
            num_heads=64,
            spec=AttentionSpec(scale=0.088, window_left=4095),
            sinks=True,
            with_lse=True,
            max_query_len=64,
        ),
        "prefill not on Hopper": _prefill(limits=DeviceLimits(arch=80)),
        "prefill fp8": _prefill(cache_dtype="float8_e4m3fn", scaled=True),
        "prefill fp8 query": _prefill(dtype="float8_e4m3fn", cache_dtype="float8_e4m3fn"),
        "prefill fp8 query scaled": _prefill(dtype="float8_e4m3fn", cache_dtype="float8_e4m3fn", scaled=True),
        "prefill fp8 query head 64": _prefill(dtype="float8_e4m3fn", cache_dtype="float8_e4m3fn", head_size=64),
        "prefill fp8 query window sinks lse": _prefill(
            dtype="float8_e4m3fn",
            cache_dtype="float8_e4m3fn",
            spec=AttentionSpec(scale=0.088, window_left=4095),
            sinks=True,
            with_lse=True,
        ),
        "prefill soft cap window": _prefill(
            head_size=256,
            num_heads=8,
            num_kv_heads=4,
            spec=AttentionSpec(scale=0.0625, window_left=4095, logits_soft_cap=50.0),
        ),
        "dense": _dense(),
        "dense not on Hopper": _dense(limits=DeviceLimits(arch=80)),
        "dense encoder": _dense(spec=AttentionSpec(scale=0.088, causal=False)),
    }


def variants_in_use() -> dict[str, tuple[KernelVariant, bool]]:
    """Returns each distinct compiled kernel with whether it is hot, labelled by plan and kernel."""
    variants: dict[str, tuple[KernelVariant, bool]] = {}
    seen: set[KernelVariant] = set()
    for label, plan in plans_in_use().items():
        for launch in plan.launches:
            variant = kernel_variant(launch, plan.specs)
            if variant not in seen:
                seen.add(variant)
                variants[f"{label}: {launch.name}"] = (variant, launch.hot)
    return variants


def _cache(dtype: str, num_kv_heads: int = 8, head_size: int = 128) -> ArraySpec:
    return ArraySpec((_NUM_BLOCKS, 2, 16, num_kv_heads, head_size), dtype)


def _write(
    dtype: str, cache_dtype: str, *, tokens: int = _PREFILL_TOKENS, head_size: int = 128, scaled: bool = False
) -> OperationPlan:
    new = ArraySpec((tokens, 8, head_size), dtype)
    scale = ArraySpec((1,), "float32") if scaled else None
    slots = ArraySpec((tokens,), "int32")
    return plan_write_kv_cache(new, new, _cache(cache_dtype, head_size=head_size), slots, scale, scale)


def _write_per_token_head(cache_dtype: str) -> OperationPlan:
    new = ArraySpec((_PREFILL_TOKENS, 8, 128), "bfloat16")
    scales = ArraySpec((_NUM_BLOCKS, 16, 8), "float32")
    slots = ArraySpec((_PREFILL_TOKENS,), "int32")
    return plan_write_kv_cache_per_token_head(new, new, _cache(cache_dtype), scales, scales, slots)


def _merge() -> OperationPlan:
    out, lse = ArraySpec((_PREFILL_TOKENS, 32, 128), "bfloat16"), ArraySpec((_PREFILL_TOKENS, 32), "float32")
    return plan_merge_states(out, lse, out, lse)


def _decode(
    *,
    num_seqs: int = _DECODE_SEQS,
    table_tokens: int = 4096,
    query_len: int = 1,
    dtype: str = "bfloat16",
    cache_dtype: str = "bfloat16",
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_size: int = 128,
    spec: AttentionSpec | None = None,
    scaled: bool = False,
    sinks: bool = False,
) -> OperationPlan:
    scale = ArraySpec((1,), "float32") if scaled else None
    return plan_paged_attention(
        ArraySpec((num_seqs * query_len, num_heads, head_size), dtype),
        _cache(cache_dtype, num_kv_heads, head_size),
        ArraySpec((num_seqs, table_tokens // 16), "int32"),
        ArraySpec((num_seqs,), "int32"),
        ArraySpec((num_seqs + 1,), "int32"),
        spec=spec or AttentionSpec(scale=0.088),
        max_query_len=query_len,
        k_scale=scale,
        v_scale=scale,
        sinks=ArraySpec((num_heads,), "float32") if sinks else None,
    )


def _prefill(
    *,
    dtype: str = "bfloat16",
    cache_dtype: str = "bfloat16",
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_size: int = 128,
    spec: AttentionSpec | None = None,
    scaled: bool = False,
    sinks: bool = False,
    with_lse: bool = False,
    max_query_len: int = _PREFILL_TOKENS,
    limits: DeviceLimits | None = None,
) -> OperationPlan:
    scale = ArraySpec((1,), "float32") if scaled else None
    return plan_paged_attention(
        ArraySpec((_PREFILL_TOKENS, num_heads, head_size), dtype),
        _cache(cache_dtype, num_kv_heads, head_size),
        ArraySpec((1, _PREFILL_TOKENS // 16), "int32"),
        ArraySpec((1,), "int32"),
        ArraySpec((2,), "int32"),
        spec=spec or AttentionSpec(scale=0.088),
        max_query_len=max_query_len,
        with_lse=with_lse,
        q_scale=scale if dtype == "float8_e4m3fn" else None,
        k_scale=scale,
        v_scale=scale,
        sinks=ArraySpec((num_heads,), "float32") if sinks else None,
        limits=limits,
    )


def _dense(
    *, head_size: int = 128, spec: AttentionSpec | None = None, limits: DeviceLimits | None = None
) -> OperationPlan:
    key = ArraySpec((_PREFILL_TOKENS, 8, head_size), "bfloat16")
    starts = ArraySpec((2,), "int32")
    return plan_attention(
        ArraySpec((_PREFILL_TOKENS, 32, head_size), "bfloat16"),
        key,
        key,
        starts,
        starts,
        spec=spec or AttentionSpec(scale=0.088),
        max_query_len=_PREFILL_TOKENS,
        limits=limits,
    )
