"""The launch of the latent kernel for few rows, where it serves a call; from shapes, dtypes and limits alone."""

from __future__ import annotations

from torch_core.attention.copies import array_matrix, byte_matrix, copy_box, copy_descriptor
from torch_core.base.specs import ArraySpec
from torch_core.device.hopper_latents import BLOCK_N, ROPE
from torch_core.latent.call import LatentCall
from torch_core.latent.kernels.mla_few.kernel import few_latent_kernel
from torch_core.latent.kernels.mla_few.loads import COLUMNS, GROUP
from torch_core.latent.operands import LatentKernel, is_hopper_latent
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, Pointer

# Tiles that shared memory has room for.
_SLOTS, _PACKED_SLOTS = 5, 4


def few_latent(call: LatentCall[ArraySpec], limits: DeviceLimits) -> LatentKernel | None:
    """Returns few_latent_kernel for a call; None where it does not serve it.

    It takes the calls of `is_hopper_latent` whose latents are e4m3 or packed, and strides, blocks and alignments that
    the copy engine can follow.
    """
    if (
        not is_hopper_latent(call, limits, "k_scale")
        or not (call.is_packed or call.latent_cache.dtype == "float8_e4m3fn")
        or call.query.element_strides[2] != 1
    ):
        return None
    latents = _gathered(call) if call.block_size == 1 else _copied(call)
    if latents is None:
        return None
    constexprs, arguments = latents
    return LatentKernel(
        kernel=few_latent_kernel,
        rows=COLUMNS.value,
        shares=True,
        constexprs={
            **constexprs,
            # e4m3 has four bits of eight and of eleven.
            "TERMS": 2 if call.query.dtype == "bfloat16" else 4,
            "SLOTS": _PACKED_SLOTS if call.is_packed else _SLOTS,
        },
        arguments={**arguments, "packed": Pointer("latent_cache") if call.is_packed else ABSENT},
    )


def _copied(call: LatentCall[ArraySpec]) -> tuple[dict[str, int], dict[str, Argument]] | None:
    """Returns constexprs and arguments of latents that the copy engine can follow; None where it cannot."""
    latents = (
        byte_matrix(call, call.latent_cache, BLOCK_N.value)
        if call.is_packed
        else array_matrix(call, "key", BLOCK_N.value)
    )
    if latents is None:
        return None
    dtype, box = call.latent_cache.dtype, copy_box(call, BLOCK_N.value)
    # Packed rows end in a rotary key in bfloat16.
    rope = (2 if call.is_packed else 1) * ROPE.value
    return {"BOX": box, "BLOCK_ROWS": latents.block_rows}, {
        "latent_cache": copy_descriptor("latent_cache", latents, (box, GROUP.value), dtype),
        "latent_rope": copy_descriptor("latent_cache", latents, (box, rope), dtype),
    }


def _gathered(call: LatentCall[ArraySpec]) -> tuple[dict[str, int], dict[str, Argument]] | None:
    """Returns constexprs and arguments of packed rows that threads gather in pieces of 16 bytes; else None."""
    cache = call.latent_cache
    if (
        not call.is_packed
        or call.max_query_len > 1
        or not cache.aligned
        or cache.element_strides != (cache.shape[2], cache.shape[2], 1)
    ):
        return None
    return {"BOX": 0, "BLOCK_ROWS": cache.shape[2]}, {"latent_rope": ABSENT}
