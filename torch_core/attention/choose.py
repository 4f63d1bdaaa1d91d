"""Which kernels serve an attention call: paged and dense, for any mix of long and short queries, and backward."""

from __future__ import annotations

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.call import AttentionCall, PagedCall
from torch_core.attention.kernels.backward.plan import backward_plan
from torch_core.attention.kernels.backward_hopper.plan import hopper_backward_plan
from torch_core.attention.kernels.hopper.plan import hopper_launch, split_hopper_launches
from torch_core.attention.kernels.hopper_fp8.plan import hopper_fp8_launch, packs_short_fp8, split_hopper_fp8_launches
from torch_core.attention.kernels.rows.plan import rows_launch
from torch_core.attention.kernels.split.plan import short_query_len, split_launches
from torch_core.attention.operands import operation
from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import DeviceLimits, LaunchPlan, OperationPlan


def plan_attention(call: AttentionCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; the semantics are those of `torch_core.reference`.

    Short queries of a paged call (decode, speculative rows) go to the split kernel, long ones to a kernel of query
    tiles: a Hopper one if it serves the call, else the portable one, which alone drops weights. Of e4m3 queries that
    are all short, Hopper's takes those that fill a quarter of a tile. A batch that may hold both runs both, and each
    skips the other's sequences; if tiles are few, the Hopper kernel takes all of them over keys in chunks. If
    there are enough tokens for every query to be the longest one, it takes the short ones too: launches without work
    cost 1 to 3% of such a batch. The choice, and the size of chunks, follow from shapes and max_query_len alone: within
    one plan a sequence's bits do not depend on its neighbours.

    A batch-invariant call has the portable kernel for queries of any length.

    Buffers are named as the fields of the call. Outputs: out, and lse with `with_lse`.
    """
    if call.batch_invariant:
        return operation(call, (rows_launch(call, limits, min_query=1),))
    short = short_query_len(call) if isinstance(call, PagedCall) else 0
    if isinstance(call, PagedCall) and short == call.max_query_len and packs_short_fp8(call, limits):
        short = 0
    if isinstance(call, PagedCall) and short < call.max_query_len:
        in_chunks = split_hopper_launches(call, limits) or split_hopper_fp8_launches(call, limits)
        if in_chunks is not None:
            return operation(call, *in_chunks)
        # A chunk size that is given asks for the bits that a short query has in any batch.
        every_long = call.num_tokens >= call.num_seqs * call.max_query_len and call.kv_chunk_size is None
        if every_long and not call.drops:
            alone = hopper_launch(call, limits, min_query=1) or hopper_fp8_launch(call, limits, min_query=1)
            if alone is not None:
                return operation(call, (alone,))
    launches: list[LaunchPlan] = []
    scratch: tuple[tuple[str, ArraySpec], ...] = ()
    if not short or short < call.max_query_len:
        long = short + 1
        hopper = None
        if not call.drops:
            hopper = hopper_launch(call, limits, min_query=long) or hopper_fp8_launch(call, limits, min_query=long)
        launches.append(hopper or rows_launch(call, limits, min_query=long))
    if isinstance(call, PagedCall) and short:
        split, scratch = split_launches(call, limits, max_query=short, zero_padding=not launches)
        launches += split
    return operation(call, tuple(launches), scratch)


def plan_attention_backward(call: DenseBackwardCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked backward call that is not empty. Outputs: the gradients, see `DenseBackwardCall.outputs`."""
    hopper = None if call.drops else hopper_backward_plan(call, limits)
    return hopper or backward_plan(call, limits)
