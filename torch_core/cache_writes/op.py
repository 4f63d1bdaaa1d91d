"""The ops that write a paged cache in place."""

from __future__ import annotations

from typing import Any

from torch_core.attention.serves import key_dtype
from torch_core.base.specs import ArraySpec
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.cache_writes.rotary_call import RotaryWriteCall
from torch_core.launch.call import Call
from torch_core.launch.op import Op, register
from torch_core.launch.serves import strides

register(
    Op(
        call=WriteCall,
        reference="torch_core.cache_writes.reference:write_kv_cache",
        cpu="torch_core.cache_writes.cpu:write_kv_cache",
        plan="torch_core.cache_writes.kernels.write.plan:plan_write",
        serves=(
            key_dtype("kv_cache", "key_cache", "value_cache", "key"),
            strides(contiguous=("slot_mapping",), free=("k_scale_cache", "v_scale_cache")),
        ),
    ),
    Op(
        call=RotaryWriteCall,
        reference="torch_core.cache_writes.reference:rotate_and_write",
        cpu="torch_core.cache_writes.cpu:rotate_and_write",
        plan="torch_core.cache_writes.kernels.rotate_and_write.plan:plan_rotary_write",
        serves=(key_dtype("kv_cache", "qkv"), strides(contiguous=("slot_mapping", "row_scale", "column_scale"))),
    ),
    Op(
        call=CopyCall,
        reference="torch_core.cache_writes.reference:copy_blocks",
        cpu="torch_core.cache_writes.cpu:copy_blocks",
        plan="torch_core.cache_writes.kernels.copy.plan:plan_copy",
        serves=(strides(contiguous=("block_mapping",), free=("kv_cache",)),),
    ),
)


_NUM_BLOCKS = 4096
_PREFILL_TOKENS = 8192
_FP8 = "float8_e4m3fn"
_SCALE = ArraySpec((1,), "float32")
_TOKEN_SCALES = ArraySpec((_NUM_BLOCKS, 16, 8), "float32")
_SCALED: dict[str, Any] = {"k_scale": _SCALE, "v_scale": _SCALE}


def calls_in_use() -> dict[str, Call[ArraySpec]]:
    """Returns calls of specs by label, which names the op and the differences from its most frequent use.

    Representative writes to a cache of 8 key/value heads of size 128, bfloat16, blocks of 16.
    """
    return {
        "write": _write(),
        "write one": _write(tokens=1),
        "write fp8": _write(cache_dtype=_FP8, **_SCALED),
        "rotate and write": _rotary_write(),
        "rotate and write one": _rotary_write(tokens=1),
        "rotate and write fp8": _rotary_write(cache_dtype=_FP8, **_SCALED),
        "rotate and write a product": _rotary_write(
            cache_dtype=_FP8,
            **_SCALED,
            row_scale=ArraySpec((_PREFILL_TOKENS,), "float32"),
            column_scale=ArraySpec((48 * 128,), "float32"),
            out_dtype=_FP8,
        ),
        "write head 80": _write(head_size=80),
        "write per token and head int8": _write(
            cache_dtype="int8", k_scale_cache=_TOKEN_SCALES, v_scale_cache=_TOKEN_SCALES
        ),
        "copy blocks": CopyCall(kv_cache=_cache("bfloat16"), block_mapping=ArraySpec((64, 2), "int32")),
    }


def _cache(dtype: str, num_kv_heads: int = 8, head_size: int = 128) -> ArraySpec:
    return ArraySpec((_NUM_BLOCKS, 2, 16, num_kv_heads, head_size), dtype)


def _write(
    *, cache_dtype: str = "bfloat16", tokens: int = _PREFILL_TOKENS, head_size: int = 128, **scales: ArraySpec
) -> WriteCall[ArraySpec]:
    new = ArraySpec((tokens, 8, head_size), "bfloat16")
    slots = ArraySpec((tokens,), "int32")
    return WriteCall(
        key=new, value=new, kv_cache=_cache(cache_dtype, head_size=head_size), slot_mapping=slots, **scales
    )


def _rotary_write(
    *, cache_dtype: str = "bfloat16", tokens: int = _PREFILL_TOKENS, **scales: Any
) -> RotaryWriteCall[ArraySpec]:
    return RotaryWriteCall(
        qkv=ArraySpec((tokens, 48, 128), "bfloat16"),
        cos_sin=ArraySpec((tokens, 128), "float32"),
        slot_mapping=ArraySpec((tokens,), "int32"),
        kv_cache=_cache(cache_dtype),
        **scales,
    )
