"""Plans of the writes into the paged cache: as is, with scales per tensor, with scales per token and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_core.base.specs import DTYPE_BYTES, LARGEST_CODE, ArraySpec
from torch_core.cache_writes.call import WriteCall
from torch_core.cache_writes.kernels.write.kernel import write_cache_kernel, write_cache_per_token_head_kernel
from torch_core.device.dependent import DEPENDENT_ARCH
from torch_core.launch.operands import ceil_div, named_launch, power_of_two, scale_pointer, scale_value, strides
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, LaunchPlan, OperationPlan, Pointer, Scalar

# Up to this many tokens one program takes one token, so that a decode step still spreads over the device.
_FEW_TOKENS = 512
_TILE_BYTES = 8192
_TILE_ROW_ELEMENTS = 1024
_AXES = ("block", "token", "head")


def plan_write(call: WriteCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked write that is not empty, in place; buffers are named as the fields of the call."""
    launch = _plain_launch(call, limits) if call.k_scale_cache is None else _per_token_head_launch(call)
    return OperationPlan(name=call.name, inputs=tuple(call.arrays().items()), in_place=call.written, launches=(launch,))


def _plain_launch(call: WriteCall[ArraySpec], limits: DeviceLimits) -> LaunchPlan:
    num_tokens = call.slot_mapping.shape[0]
    row = call.key.shape[1] * max(call.key.shape[2], call.value.shape[2])
    columns = min(power_of_two(row), 2048)
    widest = max(DTYPE_BYTES[call.key.dtype], DTYPE_BYTES[call.cache_dtype])
    tokens = 1 if num_tokens <= _FEW_TOKENS else max(1, min(8, _TILE_BYTES // (columns * widest)))
    return _launch(
        write_cache_kernel,
        call,
        (max(1, ceil_div(num_tokens, tokens)), ceil_div(row, columns)),
        {
            "k_scale": scale_pointer("k_scale", call.k_scale),
            "v_scale": scale_pointer("v_scale", call.v_scale),
            "k_scale_value": scale_value(call.k_scale),
            "v_scale_value": scale_value(call.v_scale),
        },
        {
            "TOKENS": tokens,
            "COLUMNS": columns,
            "HAS_SCALE": call.k_scale is not None or call.v_scale is not None,
            "LETS_NEXT": limits.arch >= DEPENDENT_ARCH,
        },
    )


def _per_token_head_launch(call: WriteCall[ArraySpec]) -> LaunchPlan:
    arrays = call.arrays()
    _, num_heads, head_size = call.key.shape
    padded = power_of_two(max(head_size, call.value.shape[2]))
    rows = max(1, min(16, _TILE_ROW_ELEMENTS // padded))
    return _launch(
        write_cache_per_token_head_kernel,
        call,
        (max(1, ceil_div(call.slot_mapping.shape[0] * num_heads, rows)),),
        {**strides("k_scale", _AXES, arrays["k_scale_cache"]), **strides("v_scale", _AXES, arrays["v_scale_cache"])},
        {"PADDED_SIZE": padded, "ROWS": rows, "MAX": LARGEST_CODE[call.cache_dtype]},
    )


def _launch(
    kernel: Any,
    call: WriteCall[ArraySpec],
    grid: tuple[int, ...],
    arguments: Mapping[str, Argument],
    constexprs: Mapping[str, Any],
) -> LaunchPlan:
    key_cache, value_cache, value_offset = _caches(call)
    known: dict[str, Argument] = {
        **{name: Pointer(name) for name in call.arrays()},
        "key_cache": Pointer("kv_cache" if call.kv_cache is not None else "key_cache"),
        "value_cache": ABSENT if call.kv_cache is not None else Pointer("value_cache"),
        "num_tokens": Scalar(call.slot_mapping.shape[0], "i32", specialize=False),
        "num_slots": Scalar(call.num_blocks * call.block_size, "i64", specialize=False),
        "value_offset": Scalar(value_offset, "i64"),
        **strides("key", _AXES[1:], call.key),
        **strides("value", _AXES[1:], call.value),
        **strides("key_cache", _AXES, key_cache),
        **strides("value_cache", _AXES, value_cache),
        **arguments,
    }
    constants = {
        "NUM_HEADS": call.key.shape[1],
        "KEY_SIZE": call.key.shape[2],
        "VALUE_SIZE": call.value.shape[2],
        "BLOCK_SIZE": call.block_size,
        **constexprs,
    }
    return named_launch(kernel, grid, known, constants, writes=call.written, num_stages=1, hot=True)


def _caches(call: WriteCall[ArraySpec]) -> tuple[ArraySpec, ArraySpec, int]:
    # A combined cache, or a key cache and a value cache, as the kernels see either.
    if call.kv_cache is None:
        return call.key_cache, call.value_cache, 0  # type: ignore[return-value]
    view = call.kv_cache.without_axis(1)
    return view, view, call.kv_cache.element_strides[1]
