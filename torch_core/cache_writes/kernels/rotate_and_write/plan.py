"""The plan of rotation and write in one launch: from shapes, dtypes and options alone."""

from __future__ import annotations

from torch_core.base.specs import ArraySpec
from torch_core.cache_writes.kernels.rotate_and_write.kernel import rotary_write_kernel
from torch_core.cache_writes.rotary_call import RotaryWriteCall
from torch_core.launch.operands import ceil_div, named_launch, power_of_two, scale_pointer, scale_value, strides
from torch_core.launch.plan import Argument, DeviceLimits, OperationPlan, Pointer, Scalar

# Up to this many tokens a program takes a few heads of one token, so that a decode step still spreads over the device.
_FEW_TOKENS = 512
_FEW_HEADS, _MANY_HEADS = 4, 8
_MANY_TOKENS = 2


def plan_rotary_write(call: RotaryWriteCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; buffers are named as the fields of the call."""
    arrays = call.arrays()
    results = {**call.outputs(), **({} if call.out is None else {"out": arrays.pop("out")})}
    num_tokens, head_size = call.num_tokens, call.qkv.shape[2]
    half, few = call.cos_sin.shape[1] // 2, num_tokens <= _FEW_TOKENS
    tokens = 1 if few else _MANY_TOKENS
    heads = min(power_of_two(call.num_heads), _FEW_HEADS if few else _MANY_HEADS)
    num_blocks, _, block_size, num_kv_heads, _ = call.kv_cache.shape
    arguments: dict[str, Argument] = {
        **{name: Pointer(name) for name in (*arrays, "out")},
        "row_scale": scale_pointer("row_scale", call.row_scale),
        "column_scale": scale_pointer("column_scale", call.column_scale),
        "k_scale": scale_pointer("k_scale", call.k_scale),
        "v_scale": scale_pointer("v_scale", call.v_scale),
        "k_scale_value": scale_value(call.k_scale),
        "v_scale_value": scale_value(call.v_scale),
        "num_tokens": Scalar(num_tokens, "i32", specialize=False),
        "num_mapped": Scalar(call.slot_mapping.shape[0], "i32", specialize=False),
        "num_slots": Scalar(num_blocks * block_size, "i64", specialize=False),
        "value_offset": Scalar(call.kv_cache.element_strides[1], "i64"),
        **strides("qkv", ("token", "head"), call.qkv),
        **strides("cos_sin", ("token",), call.cos_sin),
        **strides("kv_cache", ("block", "token", "head"), call.kv_cache.without_axis(1)),
        **strides("out", ("token", "head"), results["out"]),
    }
    constexprs = {
        "NUM_HEADS": call.num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_SIZE": head_size,
        "PADDED_SIZE": power_of_two(head_size),
        "HALF": half,
        "PADDED_HALF": power_of_two(half),
        "BLOCK_SIZE": block_size,
        "TOKENS": tokens,
        "HEADS": heads,
        "HAS_SCALE": call.k_scale is not None or call.v_scale is not None,
        "NEOX": call.is_neox_style,
    }
    grid = (ceil_div(num_tokens, tokens), ceil_div(call.num_heads, heads) + ceil_div(num_kv_heads, heads))
    writes = ("kv_cache", "out")
    launch = named_launch(rotary_write_kernel, grid, arguments, constexprs, writes=writes, num_stages=1, hot=True)
    return OperationPlan(
        name=call.name, inputs=tuple(arrays.items()), outputs=(("out", results["out"]),), in_place=("kv_cache",),
        launches=(launch,),
    )  # fmt: skip
