"""The plan of the write of latents: from shapes, dtypes and options alone."""

from __future__ import annotations

from torch_core.base.specs import PACKED_GROUP, ArraySpec
from torch_core.latent.call import LatentWriteCall
from torch_core.latent.kernels.write.kernel import write_latent_kernel
from torch_core.launch.operands import ceil_div, named_launch, power_of_two, scale_pointer, scale_value, strides
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, OperationPlan, Pointer, Scalar

# Up to this many tokens one program takes one token, so that a decode step still spreads over the device.
_FEW_TOKENS = 512
_MANY_TOKENS = 4


def plan_latent_write(call: LatentWriteCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked write that is not empty, in place; buffers are named as the fields of the call."""
    num_tokens, rank, rope = call.slot_mapping.shape[0], call.kv_c.shape[1], call.k_pe.shape[1]
    tokens = 1 if num_tokens <= _FEW_TOKENS else _MANY_TOKENS
    num_blocks, block_size, _ = call.latent_cache.shape
    arguments: dict[str, Argument] = {
        "cos_sin_cache": ABSENT,
        "positions": ABSENT,
        "cos_sin_cache_position_stride": Scalar(0, "i64"),
        **{name: Pointer(name) for name in call.arrays()},
        "k_scale": scale_pointer("k_scale", call.k_scale),
        "k_scale_value": scale_value(call.k_scale),
        "num_tokens": Scalar(num_tokens, "i32", specialize=False),
        "num_slots": Scalar(num_blocks * block_size, "i64", specialize=False),
        **strides("kv_c", ("token",), call.kv_c),
        **strides("k_pe", ("token",), call.k_pe),
        **strides("latent_cache", ("block", "token"), call.latent_cache),
    }
    if call.cos_sin_cache is not None:
        arguments |= strides("cos_sin_cache", ("position",), call.cos_sin_cache)
    constexprs = {
        "RANK": rank,
        "RANK_PADDED": max(power_of_two(rank), PACKED_GROUP if call.is_packed else 1),
        "ROPE": rope,
        "ROPE_PADDED": power_of_two(rope),
        "BLOCK_SIZE": block_size,
        "TOKENS": tokens,
        "HAS_SCALE": call.k_scale is not None,
        "PACKED": call.is_packed,
        "NEOX": call.is_neox_style,
    }
    launch = named_launch(
        write_latent_kernel, (ceil_div(num_tokens, tokens),), arguments, constexprs, writes=call.written, num_stages=1,
        hot=True,
    )  # fmt: skip
    return OperationPlan(name=call.name, inputs=tuple(call.arrays().items()), in_place=call.written, launches=(launch,))
