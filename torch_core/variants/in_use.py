"""The kernel variants that models use: one representative plan for each, to compile and to measure."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch_core.all_reduce.plan import plan_all_reduce, plan_all_reduce_norm
from torch_core.attention.backward_call import DenseBackwardCall, backward_of
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import Unsupported
from torch_core.base.specs import ArraySpec, AttentionSpec
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.cache_writes.rotary_call import RotaryWriteCall
from torch_core.experts.call import ExpertsCall
from torch_core.experts.routing_call import RouteCall
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.latent.sparse_call import ChoiceCall, IndexerCall
from torch_core.launch.call import Call
from torch_core.launch.compile import KernelVariant, kernel_variant
from torch_core.launch.plan import DeviceLimits, OperationPlan
from torch_core.launch.planner import plan_call

_NUM_BLOCKS = 4096
_PREFILL_TOKENS = 8192
_FP8 = "float8_e4m3fn"
_SPEC = AttentionSpec(scale=0.088)
_WINDOW = AttentionSpec(scale=0.088, window_left=4095)
_CAPPED = AttentionSpec(scale=0.0625, window_left=4095, logits_soft_cap=50.0)
_SCALE = ArraySpec((1,), "float32")
_TOKEN_SCALES = ArraySpec((_NUM_BLOCKS, 16, 8), "float32")
_OUT, _LSE = ArraySpec((_PREFILL_TOKENS, 32, 128), "bfloat16"), ArraySpec((_PREFILL_TOKENS, 32), "float32")
_PACKED_LATENTS = ArraySpec((_NUM_BLOCKS, 64, 656), "uint8")
_SCALED: dict[str, Any] = {"k_scale": _SCALE, "v_scale": _SCALE}
_DROPOUT: dict[str, Any] = {"dropout_rate": 0.1, "dropout_seeds": ArraySpec((1, 32, 2), "int32")}
_WINDOW_SINKS: dict[str, Any] = {"spec": _WINDOW, "sinks": ArraySpec((32,), "float32")}


def plans_in_use(arch: int = 90) -> dict[str, OperationPlan]:
    """Returns representative plans by label: 32 query heads of size 128 over 8 key/value heads unless it says other.

    A label starts with the operation; the rest names the differences from bfloat16, block size 16 and causal.

    For arch 90 this includes some plans of older devices. Plans that a device does not serve are left out.
    """
    calls: dict[str, Call[ArraySpec]] = {
        "write": _write(),
        "write one": _write(tokens=1),
        "write fp8": _write(_FP8, **_SCALED),
        "rotate and write": _rotary_write(),
        "rotate and write one": _rotary_write(tokens=1),
        "rotate and write fp8": _rotary_write(_FP8, **_SCALED),
        "write head 80": _write(head_size=80),
        "write per token and head int8": _write("int8", k_scale_cache=_TOKEN_SCALES, v_scale_cache=_TOKEN_SCALES),
        "copy blocks": CopyCall(kv_cache=_cache("bfloat16"), block_mapping=_i32(64, 2)),
        "merge": MergeCall(out_a=_OUT, lse_a=_LSE, out_b=_OUT, lse_b=_LSE),
        "decode": _decode(),
        "decode long": _decode(num_seqs=1, table_tokens=65536),
        "decode one chunk": _decode(num_seqs=256, table_tokens=512),
        "decode fp8": _decode(cache_dtype=_FP8, **_SCALED),
        "decode speculative": _decode(query_len=4),
        "decode window sinks": _decode(**_WINDOW_SINKS),
        "decode head 64": _decode(head_size=64),
        "decode head 256": _decode(head_size=256, heads=(8, 4)),
        "decode float32": _decode(dtype="float32"),
        "latent write": _latent_write(_latents("bfloat16")),
        "latent write rotated packed": _latent_write(
            _PACKED_LATENTS, cos_sin_cache=_bf16(8192, 64), positions=_i32(64)
        ),
        "latent decode": _latent_decode(16),
        "latent decode few tokens": _latent_decode(16, num_seqs=8),
        "latent decode fp8": _latent_decode(16, _FP8),
        "latent decode packed": replace(_latent_decode(16), latent_cache=_PACKED_LATENTS),
        "latent decode 128 heads": _latent_decode(128),
        "latent decode float32": _latent_decode(16, "float32", dtype="float32"),
        "indexer": IndexerCall(
            query=_bf16(64, 64, 128),
            weights=_f32(64, 64),
            key_cache=ArraySpec((_NUM_BLOCKS, 64, 128), _FP8),
            k_scale=_SCALE,
            scale=128**-0.5,
            **_batch(64, 64),
        ),
        "chosen slots": ChoiceCall(
            topk_indices=_i32(64, 2048), block_tables=_i32(64, 64), query_start_loc=_i32(65), block_size=64
        ),
        "experts": _experts(32),
        "experts few": _experts(1),
        "experts some": _experts(1024),
        "experts many": _experts(4096),
        "experts float32": _experts(4096, dtype="float32"),
        "route": _route(4096),
        "route one": _route(1),
        "route some in groups": replace(_route(16), scoring_func="sigmoid", n_group=8, topk_group=4),
        "prefill": _prefill(),
        "prefill short queries": _prefill(max_query_len=512),
        "prefill head 64": _prefill(head_size=64),
        "prefill head 64 short queries": _prefill(head_size=64, max_query_len=512),
        "prefill head 256": _prefill(head_size=256, heads=(8, 4)),
        "prefill float16 window sinks lse": _prefill(dtype="float16", with_lse=True, **_WINDOW_SINKS),
        "prefill chunks": _prefill(max_query_len=64),
        "prefill few chunks": _paged(128, 1, 8320, max_query_len=128),
        "prefill chunks head 64": _prefill(head_size=64, max_query_len=64),
        "prefill chunks head 256": _prefill(head_size=256, heads=(16, 4), max_query_len=64),
        "prefill chunks group 8 window sinks lse": _prefill(
            heads=(64, 8), max_query_len=64, with_lse=True, spec=_WINDOW, sinks=_f32(64)
        ),
        "prefill fp8": _prefill(cache_dtype=_FP8, **_SCALED),
        "prefill fp8 query": _prefill(dtype=_FP8),
        "prefill fp8 query scaled": _prefill(dtype=_FP8, q_scale=_SCALE, **_SCALED),
        "prefill fp8 query head 64": _prefill(dtype=_FP8, head_size=64),
        "prefill fp8 query head 64 short queries": _prefill(dtype=_FP8, head_size=64, max_query_len=512),
        "prefill fp8 query chunks": _prefill(dtype=_FP8, max_query_len=64),
        "prefill fp8 query few chunks": _paged(128, 1, 8320, dtype=_FP8, max_query_len=128),
        "prefill fp8 query few short chunks": _paged(64, 1, 8256, dtype=_FP8, max_query_len=64, **_SCALED),
        "prefill fp8 query head 256": _prefill(dtype=_FP8, head_size=256, heads=(8, 4)),
        "prefill fp8 query window sinks lse": _prefill(dtype=_FP8, with_lse=True, **_WINDOW_SINKS),
        "prefill soft cap window": _prefill(head_size=256, heads=(8, 4), spec=_CAPPED),
        "dense": _dense(),
        "dense encoder": _dense(AttentionSpec(scale=0.088, causal=False)),
        "dense latent prompt": _latent_prompt(_PREFILL_TOKENS),
        "dense latent prompt short": _latent_prompt(512),
        "dense dropout": _dense(**_DROPOUT),
        "backward": _backward(_dense()),
        "backward in any order": replace(_backward(_dense()), deterministic=False),
        "backward dropout": _backward(_dense(**_DROPOUT)),
        "backward short sequences": _backward(_dense(max_query_len=200)),
        "backward head 64": _backward(_dense(head_size=64)),
        "backward sinks": _backward(_dense(sinks=_f32(32))),
        "backward head 64 short sequences": _backward(_dense(head_size=64, max_query_len=512)),
        "backward window": _backward(_dense(_WINDOW)),
        "backward head 256": _backward(_dense(head_size=256)),
        "backward latent prompt": _backward(_latent_prompt(_PREFILL_TOKENS)),
        "backward head 64 ALiBi sinks": _backward(_dense(head_size=64, alibi_slopes=_f32(32), sinks=_f32(32))),
        "backward head 256 window soft cap": _backward(_dense(_CAPPED, head_size=256)),
    }
    plans = {}
    for label, call in calls.items():
        with suppress(Unsupported):
            plans[label] = plan_call(call, DeviceLimits(arch=arch))
    plans["sum over devices"] = plan_all_reduce(ArraySpec((1, 4096), "bfloat16"), 2)
    for label, width in (("sum over devices, normed", 4096), ("sum over devices, normed, wide rows", 16384)):
        row, weight = (ArraySpec(shape, "bfloat16") for shape in ((1, width), (width,)))
        plans[label] = plan_all_reduce_norm(row, weight, 2, epsilon=1e-5, round_first=True, add_one=False)
    if arch == 90:
        older = DeviceLimits(arch=80)
        plans |= {
            f"{label} not on Hopper": plan_call(calls[label], older) for label in ("prefill", "dense", "backward")
        }
    return plans


def variants_in_use(arch: int = 90) -> dict[str, tuple[KernelVariant, bool]]:
    """Returns each distinct compiled kernel with whether it is hot, labelled by plan and kernel."""
    variants: dict[str, tuple[KernelVariant, bool]] = {}
    seen: set[KernelVariant] = set()
    for label, plan in plans_in_use(arch).items():
        for launch in plan.launches:
            variant = kernel_variant(launch, plan.specs)
            if variant not in seen:
                seen.add(variant)
                name = f"{label}: {launch.name}"
                variants[f"{name} again" if name in variants else name] = (variant, launch.hot)
    return variants


def _bf16(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "bfloat16")


def _f32(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "float32")


def _i32(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "int32")


def _cache(dtype: str, num_kv_heads: int = 8, head_size: int = 128) -> ArraySpec:
    return ArraySpec((_NUM_BLOCKS, 2, 16, num_kv_heads, head_size), dtype)


def _latents(dtype: str) -> ArraySpec:
    return ArraySpec((_NUM_BLOCKS, 64, 576), dtype)


def _batch(num_seqs: int, table_width: int, max_query_len: int = 1) -> dict[str, Any]:
    """The fields that calls on a paged cache share."""
    return {
        "block_tables": _i32(num_seqs, table_width),
        "seq_lens": _i32(num_seqs),
        "query_start_loc": _i32(num_seqs + 1),
        "max_query_len": max_query_len,
    }


def _write(
    dtype: str = "bfloat16", *, tokens: int = _PREFILL_TOKENS, head_size: int = 128, **scales: ArraySpec
) -> WriteCall[ArraySpec]:
    new, cache = _bf16(tokens, 8, head_size), _cache(dtype, head_size=head_size)
    return WriteCall(key=new, value=new, kv_cache=cache, slot_mapping=_i32(tokens), **scales)


def _rotary_write(
    dtype: str = "bfloat16", *, tokens: int = _PREFILL_TOKENS, **scales: Any
) -> RotaryWriteCall[ArraySpec]:
    qkv, cos_sin = _bf16(tokens, 48, 128), _f32(tokens, 128)
    return RotaryWriteCall(qkv=qkv, cos_sin=cos_sin, slot_mapping=_i32(tokens), kv_cache=_cache(dtype), **scales)


def _latent_write(cache: ArraySpec, **rotation: ArraySpec) -> LatentWriteCall[ArraySpec]:
    return LatentWriteCall(
        kv_c=_bf16(64, 512), k_pe=_bf16(64, 64), slot_mapping=_i32(64), latent_cache=cache, **rotation
    )


def _latent_decode(
    heads: int, cache_dtype: str = "bfloat16", *, dtype: str = "bfloat16", num_seqs: int = 64
) -> LatentCall[ArraySpec]:
    """DeepSeek's latents of 512 and rotary keys of 64 elements, in blocks of 64."""
    query, spec = ArraySpec((num_seqs, heads, 576), dtype), AttentionSpec(scale=192**-0.5)
    cache = _latents(cache_dtype)
    return LatentCall(query=query, latent_cache=cache, kv_lora_rank=512, spec=spec, **_batch(num_seqs, 64))


def _experts(num_tokens: int, *, dtype: str = "bfloat16") -> ExpertsCall[ArraySpec]:
    """Qwen3-30B-A3B's: 8 of 128 experts of 768 columns."""
    return ExpertsCall(
        hidden_states=ArraySpec((num_tokens, 2048), dtype),
        topk_weights=_f32(num_tokens, 8),
        topk_ids=_i32(num_tokens, 8),
        gate_up_kernel=ArraySpec((128, 2048, 1536), dtype),
        down_kernel=ArraySpec((128, 768, 2048), dtype),
    )


def _route(num_tokens: int) -> RouteCall[ArraySpec]:
    return RouteCall(hidden_states=_bf16(num_tokens, 2048), kernel=_bf16(2048, 128), top_k=8)


def _decode(
    *, num_seqs: int = 64, table_tokens: int = 4096, query_len: int = 1, **options: Any
) -> PagedCall[ArraySpec]:
    return _paged(num_seqs * query_len, num_seqs, table_tokens, max_query_len=query_len, **options)


def _prefill(*, max_query_len: int = _PREFILL_TOKENS, **options: Any) -> PagedCall[ArraySpec]:
    return _paged(_PREFILL_TOKENS, 1, _PREFILL_TOKENS, max_query_len=max_query_len, **options)


def _paged(
    num_tokens: int,
    num_seqs: int,
    table_tokens: int,
    *,
    max_query_len: int,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    heads: tuple[int, int] = (32, 8),
    head_size: int = 128,
    spec: AttentionSpec = _SPEC,
    **options: Any,
) -> PagedCall[ArraySpec]:
    query, cache = (
        ArraySpec((num_tokens, heads[0], head_size), dtype),
        _cache(cache_dtype or dtype, heads[1], head_size),
    )
    return PagedCall(
        query=query, kv_cache=cache, spec=spec, **_batch(num_seqs, table_tokens // 16, max_query_len), **options
    )


def _dense(
    spec: AttentionSpec = _SPEC,
    *,
    head_size: int = 128,
    heads: tuple[int, int] = (32, 8),
    value_size: int | None = None,
    max_query_len: int = _PREFILL_TOKENS,
    **options: Any,
) -> DenseCall[ArraySpec]:
    return DenseCall(
        query=_bf16(_PREFILL_TOKENS, heads[0], head_size), key=_bf16(_PREFILL_TOKENS, heads[1], head_size),
        value=_bf16(_PREFILL_TOKENS, heads[1], value_size or head_size), query_start_loc=_i32(2), key_start_loc=_i32(2),
        spec=spec, max_query_len=max_query_len, **options,
    )  # fmt: skip


def _latent_prompt(max_query_len: int) -> DenseCall[ArraySpec]:
    """DeepSeek's plain form: 16 heads of 192 elements, values of 128."""
    sizes: dict[str, Any] = {"head_size": 192, "heads": (16, 16), "value_size": 128}
    return _dense(AttentionSpec(scale=192**-0.5), max_query_len=max_query_len, with_lse=True, **sizes)


def _backward(call: DenseCall[ArraySpec]) -> DenseBackwardCall[ArraySpec]:
    out = ArraySpec((*call.query.shape[:2], call.value_head_size), call.query.dtype)
    return backward_of(call, out=out, lse=_f32(*call.query.shape[:2]), d_out=out)
