"""What the Hopper latent kernel is launched with, where it serves a call; from shapes, dtypes and limits alone."""

from __future__ import annotations

from typing import Any

from torch_core.attention.copies import Matrix, array_matrix, copy_box, copy_descriptor, dense_matrix
from torch_core.attention.operands import output
from torch_core.base.specs import ArraySpec
from torch_core.latent.call import LatentCall
from torch_core.latent.kernels.mla_hopper.work import BLOCK_N, HALF, ROPE, ROWS
from torch_core.launch.plan import Argument, DeviceLimits

__all__ = ["hopper_latent_operands"]

_ARCH = 90
_ARRAYS = frozenset(("query", "latent_cache", "block_tables", "seq_lens", "query_start_loc", "sinks", "out"))
# Registers of a thread: of the second warpgroup that sums and of the one that makes weights. What the first one gets is
# what these leave.
_REGISTERS = {"SUM_REGISTERS": 168, "WEIGHT_REGISTERS": 168}


def hopper_latent_operands(
    call: LatentCall[ArraySpec], limits: DeviceLimits
) -> tuple[dict[str, Argument], dict[str, Any]] | None:
    """Returns what hopper_latent_kernel takes besides what the portable kernel does: arguments and constexprs.

    None where it does not serve a call. It takes bfloat16 and float16 with latents of 512 and rotary keys of 64
    elements (DeepSeek's), a positive scale, the causal mask or none, sinks, scales that are numbers; strides, blocks
    and alignments that the copy engine can follow.
    """
    query, latents = _rows(call), array_matrix(call, "key", BLOCK_N.value)
    if query is None or latents is None or not _is_served(call, limits):
        return None
    dtype, box = call.query.dtype, copy_box(call, BLOCK_N.value)
    arguments: dict[str, Argument] = {
        "query": copy_descriptor("query", query, (ROWS.value, HALF.value), dtype),
        "query_rope": copy_descriptor("query", query, (ROWS.value, ROPE.value), dtype),
        "latent_cache": copy_descriptor("latent_cache", latents, (box, HALF.value), dtype),
        "latent_rope": copy_descriptor("latent_cache", latents, (box, ROPE.value), dtype),
    }
    return arguments, {**_REGISTERS, "BOX": box, "BLOCK_ROWS": latents.block_rows}


def _is_served(call: LatentCall[ArraySpec], limits: DeviceLimits) -> bool:
    spec = call.spec
    return (
        limits.arch == _ARCH
        and (call.kv_lora_rank, call.head_size) == (2 * HALF.value, 2 * HALF.value + ROPE.value)
        and call.query.dtype in ("bfloat16", "float16")
        and call.query.dtype == call.latent_cache.dtype == output(call).dtype
        and call.arrays().keys() <= _ARRAYS
        and spec.scale > 0
        and spec.logits_soft_cap is None
        and spec.window_left is None
        and spec.attention_chunk is None
        and call.num_tokens * call.num_heads < 2**31
    )


def _rows(call: LatentCall[ArraySpec]) -> Matrix | None:
    """Returns the query as a matrix of rows (token, head); None where they are not evenly spaced."""
    token_stride, head_stride, _ = call.query.element_strides
    if token_stride != call.num_heads * head_stride and call.num_tokens > 1:
        return None
    shape = (call.num_tokens * call.num_heads, 1, call.head_size)
    return dense_matrix(ArraySpec(shape, call.query.dtype, (head_stride, call.head_size, 1), call.query.aligned))
