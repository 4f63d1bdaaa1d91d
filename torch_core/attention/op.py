"""The ops of attention: over a paged cache, over packed keys, its derivative, and the merge of partial results."""

from __future__ import annotations

from typing import Any

from torch_core.attention.backward_call import DenseBackwardCall, backward_of
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.merge_call import MergeCall
from torch_core.attention.serves import (
    BATCH_INVARIANT,
    BLOCK_SIZE,
    CONTIGUOUS,
    DERIVATIVE,
    EVERYWHERE,
    HEAD_SIZE,
    PAGED_STRIDES,
    cached_key_dtype,
)
from torch_core.base.specs import FP8_DTYPES, QUERY_DTYPES, ArraySpec, AttentionSpec
from torch_core.launch.call import Call
from torch_core.launch.op import Op, register
from torch_core.launch.serves import compute_dtype, strides

register(
    Op(
        call=PagedCall,
        reference="torch_core.attention.reference.attention:paged_attention",
        cpu="torch_core.attention.cpu.attention:paged_attention",
        plan="torch_core.attention.choose:plan_attention",
        serves=(
            compute_dtype("query", (*QUERY_DTYPES, *FP8_DTYPES)),
            cached_key_dtype("kv_cache", "key_cache", "value_cache"),
            HEAD_SIZE,
            BLOCK_SIZE,
            PAGED_STRIDES,
            BATCH_INVARIANT,
            *EVERYWHERE,
        ),
    ),
    Op(
        call=DenseCall,
        reference="torch_core.attention.reference.attention:attention",
        cpu="torch_core.attention.cpu.attention:attention",
        plan="torch_core.attention.choose:plan_attention",
        serves=(compute_dtype("query"), HEAD_SIZE, strides(contiguous=CONTIGUOUS), BATCH_INVARIANT),
    ),
    Op(
        call=DenseBackwardCall,
        reference="torch_core.attention.reference.attention:attention_backward",
        cpu="torch_core.attention.cpu.backward:attention_backward",
        plan="torch_core.attention.choose:plan_attention_backward",
        serves=(compute_dtype("query"), HEAD_SIZE, strides(contiguous=CONTIGUOUS, free=("lse",)), DERIVATIVE),
    ),
    Op(
        call=MergeCall,
        reference="torch_core.attention.reference.merge:merge_states",
        cpu="torch_core.attention.cpu.merge:merge_states",
        plan="torch_core.attention.kernels.merge.plan:plan_merge",
        serves=(compute_dtype("out_a"), strides(free=("lse", "lse_a", "lse_b"))),
    ),
)


_NUM_BLOCKS = 4096
_PREFILL_TOKENS = 8192
_FP8 = "float8_e4m3fn"
_SPEC = AttentionSpec(scale=0.088)
_WINDOW = AttentionSpec(scale=0.088, window_left=4095)
_SCALE = ArraySpec((1,), "float32")
_OUT, _LSE = ArraySpec((_PREFILL_TOKENS, 32, 128), "bfloat16"), ArraySpec((_PREFILL_TOKENS, 32), "float32")
_SCALED: dict[str, Any] = {"k_scale": _SCALE, "v_scale": _SCALE}
_DROPOUT: dict[str, Any] = {"dropout_rate": 0.1, "dropout_seeds": ArraySpec((1, 32, 2), "int32")}
_WINDOW_SINKS: dict[str, Any] = {"spec": _WINDOW, "sinks": ArraySpec((32,), "float32")}


def calls_in_use() -> dict[str, Call[ArraySpec]]:
    """Returns calls of specs by label, which names the op and the differences from its most frequent use.

    Representative calls: 32 query heads of size 128, 8 key/value heads, bfloat16, blocks of 16, causal.
    """
    return {
        "merge": MergeCall(out_a=_OUT, lse_a=_LSE, out_b=_OUT, lse_b=_LSE),
        "decode": _decode(),
        "decode long": _decode(num_seqs=1, table_tokens=65536),
        "decode one in a wide table": _decode(num_seqs=1, table_tokens=262144),
        "decode one chunk": _decode(num_seqs=256, table_tokens=512),
        "decode wide": _decode(num_seqs=256, table_tokens=9216),
        "decode fp8": _decode(cache_dtype=_FP8, **_SCALED),
        "decode speculative": _decode(query_len=4),
        "decode window sinks": _decode(**_WINDOW_SINKS),
        "decode head 64": _decode(head_size=64),
        "decode head 256": _decode(head_size=256, heads=(8, 4)),
        "decode head 512": _decode(head_size=512, heads=(8, 1)),
        "decode float32": _decode(dtype="float32"),
        "prefill": _prefill(),
        "prefill short queries": _prefill(max_query_len=512),
        "prefill head 64": _prefill(head_size=64),
        "prefill head 64 short queries": _prefill(head_size=64, max_query_len=512),
        "prefill head 256": _prefill(head_size=256, heads=(8, 4)),
        "prefill head 512": _prefill(head_size=512, heads=(8, 1)),
        "prefill float16 window sinks lse": _prefill(dtype="float16", with_lse=True, **_WINDOW_SINKS),
        "prefill chunks": _prefill(max_query_len=64),
        "prefill few chunks": _paged(128, 1, 8320, max_query_len=128),
        "prefill chunks head 64": _prefill(head_size=64, max_query_len=64),
        "prefill chunks head 256": _prefill(head_size=256, heads=(16, 4), max_query_len=64),
        "prefill chunks group 8 window sinks lse": _prefill(
            heads=(64, 8), max_query_len=64, with_lse=True, spec=_WINDOW, sinks=ArraySpec((64,), "float32")
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
        "prefill soft cap window": _prefill(
            head_size=256, heads=(8, 4), spec=AttentionSpec(scale=0.0625, window_left=4095, logits_soft_cap=50.0)
        ),
        "dense": _dense(),
        "dense encoder": _dense(AttentionSpec(scale=0.088, causal=False)),
        "dense latent prompt": _latent_prompt(_PREFILL_TOKENS),
        "dense latent prompt short": _latent_prompt(512),
        "dense dropout": _dense(**_DROPOUT),
        "backward": _backward(_dense()),
        "backward dropout": _backward(_dense(**_DROPOUT)),
        "backward short sequences": _backward(_dense(max_query_len=200)),
        "backward head 64": _backward(_dense(head_size=64)),
        "backward sinks": _backward(_dense(sinks=ArraySpec((32,), "float32"))),
        "backward head 64 short sequences": _backward(_dense(head_size=64, max_query_len=512)),
        "backward window": _backward(_dense(_WINDOW)),
        "backward head 256": _backward(_dense(head_size=256)),
        "backward head 512": _backward(_dense(head_size=512)),
        "backward latent prompt": _backward(_latent_prompt(_PREFILL_TOKENS)),
        "backward head 64 ALiBi sinks": _backward(
            _dense(head_size=64, alibi_slopes=ArraySpec((32,), "float32"), sinks=ArraySpec((32,), "float32"))
        ),
        "backward head 256 window soft cap": _backward(
            _dense(AttentionSpec(scale=0.0625, window_left=4095, logits_soft_cap=50.0), head_size=256)
        ),
    }


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
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    heads: tuple[int, int] = (32, 8),
    head_size: int = 128,
    spec: AttentionSpec = _SPEC,
    **options: Any,
) -> PagedCall[ArraySpec]:
    return PagedCall(
        query=ArraySpec((num_tokens, heads[0], head_size), dtype),
        kv_cache=ArraySpec((_NUM_BLOCKS, 2, 16, heads[1], head_size), cache_dtype or dtype),
        block_tables=ArraySpec((num_seqs, table_tokens // 16), "int32"),
        seq_lens=ArraySpec((num_seqs,), "int32"),
        query_start_loc=ArraySpec((num_seqs + 1,), "int32"),
        spec=spec,
        **options,
    )


def _dense(
    spec: AttentionSpec = _SPEC, *, head_size: int = 128, max_query_len: int = _PREFILL_TOKENS, **options: Any
) -> DenseCall[ArraySpec]:
    key, starts = ArraySpec((_PREFILL_TOKENS, 8, head_size), "bfloat16"), ArraySpec((2,), "int32")
    return DenseCall(
        query=ArraySpec((_PREFILL_TOKENS, 32, head_size), "bfloat16"),
        key=key,
        value=key,
        query_start_loc=starts,
        key_start_loc=starts,
        spec=spec,
        max_query_len=max_query_len,
        **options,
    )


def _latent_prompt(max_query_len: int) -> DenseCall[ArraySpec]:
    """DeepSeek's plain form: 16 heads of 192 elements, values of 128."""
    key, starts = ArraySpec((_PREFILL_TOKENS, 16, 192), "bfloat16"), ArraySpec((2,), "int32")
    return DenseCall(
        query=key,
        key=key,
        value=ArraySpec((_PREFILL_TOKENS, 16, 128), "bfloat16"),
        query_start_loc=starts,
        key_start_loc=starts,
        spec=AttentionSpec(scale=192**-0.5),
        max_query_len=max_query_len,
        with_lse=True,
    )


def _backward(call: DenseCall[ArraySpec]) -> DenseBackwardCall[ArraySpec]:
    lse = ArraySpec(call.query.shape[:2], "float32")
    out = ArraySpec((*call.query.shape[:2], call.value_head_size), call.query.dtype)
    return backward_of(call, out=out, lse=lse, d_out=out)
