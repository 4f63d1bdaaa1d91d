"""Plans of the writes into the paged cache: as is, with per-tensor scales, with scales per token and head."""

from __future__ import annotations

from functools import lru_cache

from torch_core.errors import InvalidInput, Unsupported
from torch_core.kernels.write_cache import write_cache_kernel, write_cache_per_token_head_kernel
from torch_core.plans.operands import (
    ScaleSpec,
    ceil_div,
    check_cache,
    check_contiguous,
    check_last_stride,
    power_of_two,
    scale_inputs,
    scale_pointer,
    scale_value,
)
from torch_core.plans.plan import Argument, ArraySpec, LaunchPlan, OperationPlan, Pointer, Scalar
from torch_core.specs import DTYPE_BYTES, QUERY_DTYPES

__all__ = ["plan_write_kv_cache", "plan_write_kv_cache_per_token_head"]

_QUANTIZED_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# Up to this many tokens one program takes one token, so that a decode step still spreads over the device.
_FEW_TOKENS = 512
_TILE_BYTES = 8192


@lru_cache(maxsize=1024)
def plan_write_kv_cache(
    key: ArraySpec,
    value: ArraySpec,
    kv_cache: ArraySpec,
    slot_mapping: ArraySpec,
    k_scale: ScaleSpec = None,
    v_scale: ScaleSpec = None,
) -> OperationPlan:
    """Plans the write of new keys and values at their slots, in place.

    Buffers: key, value, slot_mapping, [k_scale, v_scale], kv_cache (in place). Stored value = value / scale,
    saturated for an fp8 or int8 cache (int8 rounds halves to even); values of the dtype of a quantised cache are stored
    as they are. A slot outside
    `[0, num_blocks * block_size)` writes nothing.

    Args:
        key: [num_tokens or more, num_kv_heads, head_size].
        value: the same.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], any strides with the last one 1.
        slot_mapping: int32 or int64 [num_tokens].
        k_scale: what one stored unit of a key is worth; None for 1.
        v_scale: the same for values.

    Raises:
        InvalidInput: shapes, dtypes or strides do not fit together.
    """
    _check_write(key, value, kv_cache, slot_mapping)
    for name, array in (("key", key), ("value", value)):
        if array.dtype not in (*QUERY_DTYPES, *_QUANTIZED_MAX) or (array.dtype == "int8" and kv_cache.dtype != "int8"):
            raise InvalidInput(
                f"{name} is {array.dtype} and kv_cache {kv_cache.dtype}; it must be float32, bfloat16, float16, fp8 or "
                "the cache's own dtype."
            )
    num_tokens = slot_mapping.shape[0]
    num_blocks, _, block_size, num_heads, head_size = kv_cache.shape
    row = num_heads * head_size
    columns = min(power_of_two(row), 2048)
    widest = max(DTYPE_BYTES[key.dtype], DTYPE_BYTES[kv_cache.dtype])
    tokens = 1 if num_tokens <= _FEW_TOKENS else max(1, min(8, _TILE_BYTES // (columns * widest)))
    block_stride, value_stride, token_stride, head_stride, _ = kv_cache.element_strides
    has_scale = k_scale is not None or v_scale is not None
    arguments: tuple[tuple[str, Argument], ...] = (
        ("key_ptr", Pointer("key")),
        ("value_ptr", Pointer("value")),
        ("slot_mapping_ptr", Pointer("slot_mapping")),
        ("k_scale_ptr", scale_pointer("k_scale", k_scale)),
        ("v_scale_ptr", scale_pointer("v_scale", v_scale)),
        ("kv_cache_ptr", Pointer("kv_cache")),
        ("k_scale", scale_value(k_scale)),
        ("v_scale", scale_value(v_scale)),
        ("num_tokens", Scalar(num_tokens, "i32", specialize=False)),
        ("num_slots", Scalar(num_blocks * block_size, "i64", specialize=False)),
        ("key_token_stride", Scalar(key.element_strides[0], "i64")),
        ("key_head_stride", Scalar(key.element_strides[1], "i32")),
        ("value_token_stride", Scalar(value.element_strides[0], "i64")),
        ("value_head_stride", Scalar(value.element_strides[1], "i32")),
        ("block_stride", Scalar(block_stride, "i64")),
        ("value_stride", Scalar(value_stride, "i64")),
        ("token_stride", Scalar(token_stride, "i64")),
        ("head_stride", Scalar(head_stride, "i32")),
    )
    launch = LaunchPlan(
        kernel=write_cache_kernel,
        grid=(max(1, ceil_div(num_tokens, tokens)), ceil_div(row, columns)),
        arguments=arguments,
        constexprs=(
            ("NUM_HEADS", num_heads),
            ("HEAD_SIZE", head_size),
            ("BLOCK_SIZE", block_size),
            ("TOKENS", tokens),
            ("COLUMNS", columns),
            ("HAS_SCALE", has_scale),
        ),
        writes=("kv_cache",),
        num_warps=4,
        num_stages=1,
        hot=True,
    )
    scales = scale_inputs(k_scale=k_scale, v_scale=v_scale)
    return OperationPlan(
        name="write_kv_cache",
        inputs=(("key", key), ("value", value), ("slot_mapping", slot_mapping), *scales, ("kv_cache", kv_cache)),
        in_place=("kv_cache",),
        launches=(launch,),
    )


@lru_cache(maxsize=1024)
def plan_write_kv_cache_per_token_head(
    key: ArraySpec,
    value: ArraySpec,
    kv_cache: ArraySpec,
    k_scale_cache: ArraySpec,
    v_scale_cache: ArraySpec,
    slot_mapping: ArraySpec,
) -> OperationPlan:
    """Plans a quantising write with a scale of its own for each token and head, in place.

    The scale is max(max(abs(row)) / largest, 1e-6) with 127 for int8, 448 for e4m3 and 57344 for e5m2. Buffers: key,
    value, slot_mapping, kv_cache, k_scale_cache, v_scale_cache (the last three in place).

    Args:
        key: [num_tokens or more, num_kv_heads, head_size] in a floating dtype of 2 or 4 bytes.
        value: the same.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size] in int8 or fp8.
        k_scale_cache: float32 [num_blocks, block_size, num_kv_heads], any strides.
        v_scale_cache: the same.
        slot_mapping: int32 or int64 [num_tokens].

    Raises:
        InvalidInput: shapes, dtypes or strides do not fit together.
        Unsupported: the cache's dtype is not a quantised one.
    """
    _check_write(key, value, kv_cache, slot_mapping)
    if kv_cache.dtype not in _QUANTIZED_MAX:
        raise Unsupported(f"kv_cache is {kv_cache.dtype}; per-token-head scales need {', '.join(_QUANTIZED_MAX)}.")
    for name, array in (("key", key), ("value", value)):
        if array.dtype not in QUERY_DTYPES:
            raise InvalidInput(f"{name} is {array.dtype}; it must be float32, bfloat16 or float16 to be quantised.")
    num_blocks, _, block_size, num_heads, head_size = kv_cache.shape
    for name, array in (("k_scale_cache", k_scale_cache), ("v_scale_cache", v_scale_cache)):
        if array.dtype != "float32" or array.shape != (num_blocks, block_size, num_heads):
            raise InvalidInput(
                f"{name} is {array.dtype}{list(array.shape)}; it must be float32{[num_blocks, block_size, num_heads]}."
            )
    num_tokens = slot_mapping.shape[0]
    padded = power_of_two(head_size)
    rows = max(1, min(16, 1024 // padded))
    arguments: list[tuple[str, Argument]] = [
        (f"{name}_ptr", Pointer(name))
        for name in ("key", "value", "slot_mapping", "kv_cache", "k_scale_cache", "v_scale_cache")
    ]
    arguments += [
        ("num_tokens", Scalar(num_tokens, "i32", specialize=False)),
        ("num_slots", Scalar(num_blocks * block_size, "i64", specialize=False)),
        ("key_token_stride", Scalar(key.element_strides[0], "i64")),
        ("key_head_stride", Scalar(key.element_strides[1], "i64")),
        ("value_token_stride", Scalar(value.element_strides[0], "i64")),
        ("value_head_stride", Scalar(value.element_strides[1], "i64")),
    ]
    names = ("block_stride", "value_stride", "token_stride", "head_stride")
    arguments += [(name, Scalar(s, "i64")) for name, s in zip(names, kv_cache.element_strides, strict=False)]
    for prefix, array in (("k_scale", k_scale_cache), ("v_scale", v_scale_cache)):
        axes = zip(("block", "token", "head"), array.element_strides, strict=True)
        arguments += [(f"{prefix}_{axis}_stride", Scalar(stride, "i64")) for axis, stride in axes]
    launch = LaunchPlan(
        kernel=write_cache_per_token_head_kernel,
        grid=(max(1, ceil_div(num_tokens * num_heads, rows)),),
        arguments=tuple(arguments),
        constexprs=(
            ("NUM_HEADS", num_heads),
            ("HEAD_SIZE", head_size),
            ("PADDED_HEAD_SIZE", padded),
            ("BLOCK_SIZE", block_size),
            ("ROWS", rows),
            ("MAX", _QUANTIZED_MAX[kv_cache.dtype]),
        ),
        writes=("kv_cache", "k_scale_cache", "v_scale_cache"),
        num_warps=4,
        num_stages=1,
        hot=True,
    )
    in_place = (("kv_cache", kv_cache), ("k_scale_cache", k_scale_cache), ("v_scale_cache", v_scale_cache))
    return OperationPlan(
        name="write_kv_cache_per_token_head",
        inputs=(("key", key), ("value", value), ("slot_mapping", slot_mapping), *in_place),
        in_place=tuple(name for name, _ in in_place),
        launches=(launch,),
    )


def _check_write(key: ArraySpec, value: ArraySpec, kv_cache: ArraySpec, slot_mapping: ArraySpec) -> None:
    check_cache(kv_cache)
    if len(slot_mapping.shape) != 1 or slot_mapping.dtype not in ("int32", "int64"):
        raise InvalidInput(
            f"slot_mapping is {slot_mapping.dtype}{list(slot_mapping.shape)}; it must be int32 [num_tokens]."
        )
    check_contiguous("slot_mapping", slot_mapping)
    row = kv_cache.shape[3:]
    for name, array in (("key", key), ("value", value)):
        if len(array.shape) != 3 or array.shape[1:] != row:
            raise InvalidInput(
                f"{name} has shape {list(array.shape)}; the cache's heads need [num_tokens, {row[0]}, {row[1]}]."
            )
        if array.shape[0] < slot_mapping.shape[0]:
            raise InvalidInput(
                f"{name} has {array.shape[0]} tokens and slot_mapping {slot_mapping.shape[0]}; "
                "there must be a row for every slot."
            )
        check_last_stride(name, array)
