"""The kernel variants that models use: one representative plan for each, to compile and to measure."""

from __future__ import annotations

from typing import Any

from torch_core.calls import CopyCall, DenseCall, MergeCall, PagedCall, WriteCall
from torch_core.plan.compile import KernelVariant, kernel_variant
from torch_core.plan.plan import DeviceLimits, OperationPlan
from torch_core.planner import plan_call
from torch_core.specs import ArraySpec, AttentionSpec

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
        "write per token and head int8": _write("bfloat16", "int8", per_token_head=True),
        "copy blocks": _copy(),
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


def _copy() -> OperationPlan:
    return plan_call(CopyCall(kv_cache=_cache("bfloat16"), block_mapping=ArraySpec((64, 2), "int32")))


def _write(
    dtype: str,
    cache_dtype: str,
    *,
    tokens: int = _PREFILL_TOKENS,
    head_size: int = 128,
    scaled: bool = False,
    per_token_head: bool = False,
) -> OperationPlan:
    new = ArraySpec((tokens, 8, head_size), dtype)
    scale = ArraySpec((1,), "float32") if scaled else None
    scales = ArraySpec((_NUM_BLOCKS, 16, 8), "float32") if per_token_head else None
    return plan_call(
        WriteCall(
            key=new,
            value=new,
            kv_cache=_cache(cache_dtype, head_size=head_size),
            slot_mapping=ArraySpec((tokens,), "int32"),
            k_scale=scale,
            v_scale=scale,
            k_scale_cache=scales,
            v_scale_cache=scales,
        )
    )


def _merge() -> OperationPlan:
    out, lse = ArraySpec((_PREFILL_TOKENS, 32, 128), "bfloat16"), ArraySpec((_PREFILL_TOKENS, 32), "float32")
    return plan_call(MergeCall(out_a=out, lse_a=lse, out_b=out, lse_b=lse))


def _decode(
    *, num_seqs: int = _DECODE_SEQS, table_tokens: int = 4096, query_len: int = 1, **options: Any
) -> OperationPlan:
    return _paged(num_seqs * query_len, num_seqs, table_tokens, query_len, **options)


def _prefill(*, max_query_len: int = _PREFILL_TOKENS, **options: Any) -> OperationPlan:
    return _paged(_PREFILL_TOKENS, 1, _PREFILL_TOKENS, max_query_len, **options)


def _paged(
    num_tokens: int,
    num_seqs: int,
    table_tokens: int,
    max_query_len: int,
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
    limits: DeviceLimits | None = None,
) -> OperationPlan:
    scale = ArraySpec((1,), "float32") if scaled else None
    call = PagedCall(
        query=ArraySpec((num_tokens, num_heads, head_size), dtype),
        kv_cache=_cache(cache_dtype, num_kv_heads, head_size),
        block_tables=ArraySpec((num_seqs, table_tokens // 16), "int32"),
        seq_lens=ArraySpec((num_seqs,), "int32"),
        query_start_loc=ArraySpec((num_seqs + 1,), "int32"),
        spec=spec or AttentionSpec(scale=0.088),
        max_query_len=max_query_len,
        with_lse=with_lse,
        q_scale=scale if dtype == "float8_e4m3fn" else None,
        k_scale=scale,
        v_scale=scale,
        sinks=ArraySpec((num_heads,), "float32") if sinks else None,
    )
    return plan_call(call, limits)


def _dense(
    *, head_size: int = 128, spec: AttentionSpec | None = None, limits: DeviceLimits | None = None
) -> OperationPlan:
    key, starts = ArraySpec((_PREFILL_TOKENS, 8, head_size), "bfloat16"), ArraySpec((2,), "int32")
    call = DenseCall(
        query=ArraySpec((_PREFILL_TOKENS, 32, head_size), "bfloat16"),
        key=key,
        value=key,
        query_start_loc=starts,
        key_start_loc=starts,
        spec=spec or AttentionSpec(scale=0.088),
        max_query_len=_PREFILL_TOKENS,
    )
    return plan_call(call, limits)
