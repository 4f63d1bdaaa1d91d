"""The ops of attention: over a paged cache, over packed keys, its derivative, and the merge of partial results."""

from __future__ import annotations

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.merge_call import MergeCall
from torch_core.attention.serves import (
    BLOCK_SIZE,
    CONTIGUOUS,
    DERIVATIVE,
    EVERYWHERE,
    HEAD_SIZE,
    PAGED_STRIDES,
    cached_key_dtype,
)
from torch_core.base.specs import FP8_DTYPES, QUERY_DTYPES
from torch_core.launch.op import Op, register
from torch_core.launch.serves import compute_dtype, strides

register(
    Op(
        call=PagedCall,
        reference="torch_core.attention.reference.attention:paged_attention",
        cpu="torch_core.attention.cpu.paged:paged_attention",
        plan="torch_core.attention.choose:plan_attention",
        serves=(
            compute_dtype("query", (*QUERY_DTYPES, *FP8_DTYPES)),
            cached_key_dtype("kv_cache", "key_cache", "value_cache"),
            HEAD_SIZE,
            BLOCK_SIZE,
            PAGED_STRIDES,
            *EVERYWHERE,
        ),
    ),
    Op(
        call=DenseCall,
        reference="torch_core.attention.reference.attention:attention",
        cpu="torch_core.attention.cpu.dense:attention",
        plan="torch_core.attention.choose:plan_attention",
        serves=(compute_dtype("query"), HEAD_SIZE, strides(contiguous=CONTIGUOUS)),
    ),
    Op(
        call=DenseBackwardCall,
        reference="torch_core.attention.reference.backward:attention_backward",
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
