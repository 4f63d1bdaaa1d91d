"""What the kernel for few rows is launched with, where it serves a call; from shapes, dtypes and limits alone."""

from __future__ import annotations

from typing import Any

from torch_core.attention.copies import array_matrix, byte_matrix, copy_box, copy_descriptor
from torch_core.attention.operands import output
from torch_core.base.specs import ArraySpec
from torch_core.latent.call import LatentCall
from torch_core.latent.kernels.mla_few.work import BLOCK_N, GROUP, ROPE
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, Pointer

__all__ = ["few_latent_operands"]

_ARCH = 90
# Tiles that shared memory has room for.
_SLOTS, _PACKED_SLOTS = 5, 4
_ARRAYS = frozenset(("query", "latent_cache", "block_tables", "seq_lens", "query_start_loc", "sinks", "k_scale", "out"))


def few_latent_operands(
    call: LatentCall[ArraySpec], limits: DeviceLimits
) -> tuple[dict[str, Argument], dict[str, Any]] | None:
    """Returns what few_latent_kernel takes besides what the portable kernel does: arguments and constexprs.

    None where it does not serve a call. It takes e4m3 latents of 512 and rotary keys of 64 elements with queries of
    bfloat16 or float16, a positive scale, the causal mask or none, sinks; strides, blocks and alignments that the copy
    engine can follow.
    """
    spec = call.spec
    if not (
        limits.arch == _ARCH
        and (call.kv_lora_rank, call.head_size) == (512, 576)
        and call.query.dtype in ("bfloat16", "float16")
        and (call.is_packed or call.latent_cache.dtype == "float8_e4m3fn")
        and call.query.dtype == output(call).dtype
        and call.arrays().keys() <= _ARRAYS
        and spec.scale > 0
        and spec.logits_soft_cap is None
        and spec.window_left is None
        and spec.attention_chunk is None
        and call.query.element_strides[2] == 1
    ):
        return None
    latents = (
        byte_matrix(call, call.latent_cache, BLOCK_N.value)
        if call.is_packed
        else array_matrix(call, "key", BLOCK_N.value)
    )
    if latents is None:
        return None
    box = copy_box(call, BLOCK_N.value)
    # Packed rows end in as many bytes of a rotary key in bfloat16.
    rope = (2 if call.is_packed else 1) * ROPE.value
    arguments: dict[str, Argument] = {
        "latent_cache": copy_descriptor("latent_cache", latents, (box, GROUP.value), call.latent_cache.dtype),
        "latent_rope": copy_descriptor("latent_cache", latents, (box, rope), call.latent_cache.dtype),
        "packed": Pointer("latent_cache") if call.is_packed else ABSENT,
    }
    sizes = {
        "BOX": box,
        "BLOCK_ROWS": latents.block_rows,
        # e4m3 has four bits of eight and of eleven.
        "TERMS": 2 if call.query.dtype == "bfloat16" else 4,
        "SLOTS": _PACKED_SLOTS if call.is_packed else _SLOTS,
    }
    return arguments, sizes
