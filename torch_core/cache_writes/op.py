"""The ops that write a paged cache in place."""

from __future__ import annotations

from torch_core.attention.serves import key_dtype
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.cache_writes.rotary_call import RotaryWriteCall
from torch_core.launch.op import Op, register
from torch_core.launch.serves import strides

register(
    Op(
        call=WriteCall,
        reference="torch_core.cache_writes.reference.cache:write_kv_cache",
        cpu="torch_core.cache_writes.cpu.blocks:write_kv_cache",
        plan="torch_core.cache_writes.kernels.write.plan:plan_write",
        serves=(
            key_dtype("kv_cache", "key_cache", "value_cache", "key"),
            strides(contiguous=("slot_mapping",), free=("k_scale_cache", "v_scale_cache")),
        ),
    ),
    Op(
        call=RotaryWriteCall,
        reference="torch_core.cache_writes.reference.rotary:rotate_and_write",
        cpu="torch_core.cache_writes.cpu.rotary:rotate_and_write",
        plan="torch_core.cache_writes.kernels.rotate_and_write.plan:plan_rotary_write",
        serves=(key_dtype("kv_cache", "qkv"), strides(contiguous=("slot_mapping",))),
    ),
    Op(
        call=CopyCall,
        reference="torch_core.cache_writes.reference.cache:copy_blocks",
        cpu="torch_core.cache_writes.cpu.blocks:copy_blocks",
        plan="torch_core.cache_writes.kernels.copy.plan:plan_copy",
        serves=(strides(contiguous=("block_mapping",), free=("kv_cache",)),),
    ),
)
