"""The launch of the portable latent kernel; from shapes, dtypes and limits alone."""

from __future__ import annotations

from torch_core.attention.operands import is_plain, padded
from torch_core.base.specs import DTYPE_BYTES, ArraySpec
from torch_core.latent.call import LatentCall
from torch_core.latent.kernels.mla.kernel import latent_attention_kernel
from torch_core.latent.kernels.mla.tiles import latent_tile
from torch_core.latent.operands import LatentKernel
from torch_core.launch.plan import DeviceLimits


def portable_latent(call: LatentCall[ArraySpec], limits: DeviceLimits, rows: int) -> LatentKernel:
    """Returns the portable kernel for a call whose sequences have up to `rows` rows (query token, head)."""
    rope_size = call.head_size - call.kv_lora_rank
    rope_padded = padded(rope_size) if rope_size else 0
    tile = latent_tile(
        rows=rows,
        padded=padded(call.value_head_size) + rope_padded,
        query_bytes=DTYPE_BYTES[call.query.dtype],
        limits=limits,
    )
    return LatentKernel(
        kernel=latent_attention_kernel,
        rows=tile.block_m,
        constexprs={
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.num_stages,
            "ROPE_SIZE": rope_size,
            "ROPE_PADDED": rope_padded,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        # The smallest tile leaves room for a second program on a multiprocessor.
        programs=2 if rows <= 16 else 1,
        hot=tile.block_m == 16 and is_plain(call) and call.query.dtype != "float32",
    )
