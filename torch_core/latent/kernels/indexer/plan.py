"""The plans of an indexer's scores, and of the look-up of the chosen keys: from shapes, dtypes and options alone."""

from __future__ import annotations

from torch_core.attention.operands import count, padded
from torch_core.base.specs import ArraySpec
from torch_core.latent.kernels.indexer.kernel import chosen_slots_kernel, indexer_logits_kernel
from torch_core.latent.sparse_call import ChoiceCall, IndexerCall
from torch_core.launch.operands import block_seqs, ceil_div, named_launch, power_of_two, scale_number, scale_pointer
from torch_core.launch.plan import Argument, DeviceLimits, OperationPlan, Pointer, Scalar

# Not tuned on a device yet.
_BLOCK_N = 64
_NUM_WARPS = 4
# Chosen keys of one step, at most.
_MAX_CHOICE_BLOCK = 2048


def plan_indexer(call: IndexerCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty. Outputs: logits."""
    _, num_heads, head_size = call.query.shape
    arguments: dict[str, Argument] = {
        **{name: Pointer(name) for name in (*call.arrays(), *call.outputs())},
        "k_scale": scale_pointer("k_scale", call.k_scale),
        "num_seqs": count(call.seq_lens.shape[0]),
        "table_stride": count(call.block_tables.element_strides[0]),
        "table_tokens": count(call.table_tokens),
        "scale": Scalar(call.scale * scale_number(call.k_scale), "fp32"),
    }
    constexprs = {
        "BLOCK_SEQS": block_seqs(call.seq_lens.shape[0]),
        "BLOCK_N": _BLOCK_N,
        "NUM_HEADS": num_heads,
        "HEADS_PADDED": padded(num_heads),
        "HEAD_SIZE": head_size,
        "HEAD_PADDED": padded(head_size),
        "BLOCK_SIZE": call.block_size,
        "QUERY_STRIDES": call.query.element_strides[:2],
        "KEY_STRIDES": call.key_cache.element_strides[:2],
        "WEIGHT_STRIDES": call.weights.element_strides[:1],
    }
    grid = (call.num_tokens, ceil_div(call.table_tokens, _BLOCK_N))
    launch = named_launch(
        indexer_logits_kernel, grid, arguments, constexprs, writes=("logits",), num_warps=_NUM_WARPS, num_stages=1
    )
    return OperationPlan.of(call.name, call.arrays(), (launch,), call.outputs())


def plan_choice(call: ChoiceCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty. Outputs: slots, counts, starts."""
    num_tokens, topk = call.topk_indices.shape
    num_seqs, max_blocks = call.block_tables.shape
    arguments: dict[str, Argument] = {
        **{name: Pointer(name) for name in (*call.arrays(), *call.outputs())},
        "num_tokens": count(num_tokens),
        "num_seqs": count(num_seqs),
        "topk": count(topk),
        "max_blocks": count(max_blocks),
        "index_stride": count(call.topk_indices.element_strides[0]),
        "table_stride": count(call.block_tables.element_strides[0]),
    }
    constexprs = {
        "BLOCK_SEQS": block_seqs(num_seqs),
        "BLOCK": min(_MAX_CHOICE_BLOCK, max(16, power_of_two(topk))),
        "BLOCK_SIZE": call.block_size,
    }
    launch = named_launch(
        chosen_slots_kernel, (num_tokens,), arguments, constexprs, writes=tuple(call.outputs()), num_warps=8,
        num_stages=1,
    )  # fmt: skip
    return OperationPlan.of(call.name, call.arrays(), (launch,), call.outputs())
