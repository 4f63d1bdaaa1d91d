"""The launch of the Hopper latent kernel, where it serves a call; from shapes, dtypes and limits alone."""

from __future__ import annotations

from torch_core.attention.copies import Matrix, array_matrix, copy_box, copy_descriptor, dense_matrix
from torch_core.base.specs import ArraySpec
from torch_core.device.hopper_latents import BLOCK_N, HALF, ROPE
from torch_core.latent.call import LatentCall
from torch_core.latent.kernels.mla_hopper.kernel import hopper_latent_kernel
from torch_core.latent.kernels.mla_hopper.loads import ROWS
from torch_core.latent.operands import LatentKernel, is_hopper_latent
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits

# Registers of a thread: of the second warpgroup that sums and of the one that makes weights. The first one gets the
# registers that these leave.
_REGISTERS = {"SUM_REGISTERS": 168, "WEIGHT_REGISTERS": 168}


def hopper_latent(call: LatentCall[ArraySpec], limits: DeviceLimits) -> LatentKernel | None:
    """Returns hopper_latent_kernel for a call; None where it does not serve it.

    It takes the calls of `is_hopper_latent` whose latents have the query's dtype, with scales that are numbers, and
    strides, blocks and alignments that the copy engine can follow. Of blocks of one token it gathers the rows, for
    sequences of one query token; e4m3 and packed rows it gathers from blocks of any size, for queries of bfloat16.
    """
    query = _rows(call)
    coded = call.is_packed or call.latent_cache.dtype == "float8_e4m3fn"
    if (
        query is None
        or not is_hopper_latent(call, limits, *(["k_scale"] if coded else []))
        or not (coded or call.latent_cache.dtype == call.query.dtype)
        or call.num_tokens * call.num_heads >= 2**31
    ):
        return None
    read = _unpacked if coded else _gathered if call.block_size == 1 else _copied
    latents = read(call)
    if latents is None:
        return None
    dtype = call.query.dtype
    constexprs, arguments = latents
    return LatentKernel(
        kernel=hopper_latent_kernel,
        rows=ROWS.value,
        shares=True,
        constexprs={**_REGISTERS, **constexprs},
        arguments={
            "query": copy_descriptor("query", query, (ROWS.value, HALF.value), dtype),
            "query_rope": copy_descriptor("query", query, (ROWS.value, ROPE.value), dtype),
            **arguments,
        },
    )


def _copied(call: LatentCall[ArraySpec]) -> tuple[dict[str, int], dict[str, Argument]] | None:
    """Returns constexprs and arguments of latents that the copy engine can follow; None where it cannot."""
    latents = array_matrix(call, "key", BLOCK_N.value)
    if latents is None:
        return None
    dtype, box = call.latent_cache.dtype, copy_box(call, BLOCK_N.value)
    return {"BOX": box, "BLOCK_ROWS": latents.block_rows}, {
        "latent_cache": copy_descriptor("latent_cache", latents, (box, HALF.value), dtype),
        "latent_rope": copy_descriptor("latent_cache", latents, (box, ROPE.value), dtype),
    }


def _gathered(call: LatentCall[ArraySpec]) -> tuple[dict[str, int], dict[str, Argument]] | None:
    """Returns constexprs and arguments of latents that threads gather in pieces of 16 bytes; None where they cannot."""
    row_stride, _, inner = call.latent_cache.element_strides
    if call.max_query_len > 1 or inner != 1 or row_stride % 8 or not call.latent_cache.aligned:
        return None
    return {"BOX": 0, "BLOCK_ROWS": row_stride}, {"latent_rope": ABSENT}


def _unpacked(call: LatentCall[ArraySpec]) -> tuple[dict[str, int], dict[str, Argument]] | None:
    """Returns constexprs and arguments of 8-bit rows; None where threads cannot gather or unpack them."""
    row_bytes, cache = call.latent_cache.shape[2], call.latent_cache
    block_rows, rest = divmod(cache.element_strides[0], row_bytes)
    if (
        call.query.dtype != "bfloat16"
        or not cache.aligned
        or rest
        or cache.element_strides[1:] != (row_bytes, 1)
        or (call.block_size == 1 and block_rows != 1)
    ):
        return None
    return {"BOX": 0, "BLOCK_ROWS": block_rows}, {"latent_rope": ABSENT}


def _rows(call: LatentCall[ArraySpec]) -> Matrix | None:
    """Returns the query as a matrix of rows (token, head); None where they are not evenly spaced."""
    token_stride, head_stride, _ = call.query.element_strides
    if token_stride != call.num_heads * head_stride and call.num_tokens > 1:
        return None
    shape = (call.num_tokens * call.num_heads, 1, call.head_size)
    return dense_matrix(ArraySpec(shape, call.query.dtype, (head_stride, call.head_size, 1), call.query.aligned))
