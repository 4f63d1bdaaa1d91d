"""Plans of the writes into the paged cache: as is, with per-tensor scales, with scales per token and head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch_core.blocks.write.kernel import write_cache_kernel, write_cache_per_token_head_kernel
from torch_core.errors import InvalidInput, Unsupported
from torch_core.plan.operands import (
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
from torch_core.plan.plan import ABSENT, Argument, ArraySpec, LaunchPlan, OperationPlan, Pointer, Scalar
from torch_core.specs import DTYPE_BYTES, QUERY_DTYPES

__all__ = ["plan_write_kv_cache", "plan_write_kv_cache_per_token_head"]

_QUANTIZED_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# Up to this many tokens one program takes one token, so that a decode step still spreads over the device.
_FEW_TOKENS = 512
_TILE_BYTES = 8192
_TILE_ROW_ELEMENTS = 1024


@lru_cache(maxsize=1024)
def plan_write_kv_cache(
    key: ArraySpec,
    value: ArraySpec,
    kv_cache: ArraySpec | tuple[ArraySpec, ArraySpec],
    slot_mapping: ArraySpec,
    k_scale: ScaleSpec = None,
    v_scale: ScaleSpec = None,
) -> OperationPlan:
    """Plans the write of new keys and values at their slots, in place.

    Buffers: key, value, slot_mapping, [k_scale, v_scale], and in place kv_cache, or key_cache and value_cache for a
    pair. Stored value = value / scale, saturated for an fp8 or int8 cache (int8 rounds halves to even); values of the
    dtype of a quantised cache are stored as they are. A slot outside `[0, num_blocks * block_size)` writes nothing.

    Args:
        key: [num_tokens or more, num_kv_heads, head_size].
        value: the same; its head size may differ for a pair of caches.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], or a pair of a key cache
            [num_blocks, block_size, num_kv_heads, head_size] and a value cache; any strides with the last one 1.
        slot_mapping: int32 or int64 [num_tokens].
        k_scale: what one stored unit of a key is worth; None for 1.
        v_scale: the same for values.

    Raises:
        InvalidInput: shapes, dtypes or strides do not fit together.
    """
    caches = _caches(kv_cache)
    _check_write(key, value, caches, slot_mapping)
    for name, array in (("key", key), ("value", value)):
        if array.dtype not in (*QUERY_DTYPES, *_QUANTIZED_MAX) or (array.dtype == "int8" and caches.dtype != "int8"):
            raise InvalidInput(
                f"{name} is {array.dtype} and kv_cache {caches.dtype}; it must be float32, bfloat16, float16, fp8 or "
                "the cache's own dtype."
            )
    num_tokens = slot_mapping.shape[0]
    row = caches.num_heads * max(caches.key_size, caches.value_size)
    columns = min(power_of_two(row), 2048)
    widest = max(DTYPE_BYTES[key.dtype], DTYPE_BYTES[caches.dtype])
    tokens = 1 if num_tokens <= _FEW_TOKENS else max(1, min(8, _TILE_BYTES // (columns * widest)))
    launch = LaunchPlan(
        kernel=write_cache_kernel,
        grid=(max(1, ceil_div(num_tokens, tokens)), ceil_div(row, columns)),
        arguments=(
            ("key", Pointer("key")),
            ("value", Pointer("value")),
            ("slot_mapping", Pointer("slot_mapping")),
            ("k_scale", scale_pointer("k_scale", k_scale)),
            ("v_scale", scale_pointer("v_scale", v_scale)),
            *caches.pointers,
            ("k_scale_value", scale_value(k_scale)),
            ("v_scale_value", scale_value(v_scale)),
            *_counts(num_tokens, caches),
            *_source_strides(key, value),
            *caches.strides,
        ),
        constexprs=(
            *caches.sizes,
            ("TOKENS", tokens),
            ("COLUMNS", columns),
            ("HAS_SCALE", k_scale is not None or v_scale is not None),
        ),
        writes=caches.names,
        num_warps=4,
        num_stages=1,
        hot=True,
    )
    scales = scale_inputs(k_scale=k_scale, v_scale=v_scale)
    return OperationPlan(
        name="write_kv_cache",
        inputs=(("key", key), ("value", value), ("slot_mapping", slot_mapping), *scales, *caches.buffers),
        in_place=caches.names,
        launches=(launch,),
    )


@lru_cache(maxsize=1024)
def plan_write_kv_cache_per_token_head(
    key: ArraySpec,
    value: ArraySpec,
    kv_cache: ArraySpec | tuple[ArraySpec, ArraySpec],
    k_scale_cache: ArraySpec,
    v_scale_cache: ArraySpec,
    slot_mapping: ArraySpec,
) -> OperationPlan:
    """Plans a quantising write with a scale of its own for each token and head, in place.

    The scale is max(max(abs(row)) / largest, 1e-6) with 127 for int8, 448 for e4m3 and 57344 for e5m2. Buffers: key,
    value, slot_mapping, and in place kv_cache (or key_cache and value_cache), k_scale_cache, v_scale_cache.

    Args:
        key: [num_tokens or more, num_kv_heads, head_size] in a floating dtype of 2 or 4 bytes.
        value: the same.
        kv_cache: as in `plan_write_kv_cache`, in int8 or fp8.
        k_scale_cache: float32 [num_blocks, block_size, num_kv_heads], any strides.
        v_scale_cache: the same.
        slot_mapping: int32 or int64 [num_tokens].

    Raises:
        InvalidInput: shapes, dtypes or strides do not fit together.
        Unsupported: the cache's dtype is not a quantised one.
    """
    caches = _caches(kv_cache)
    _check_write(key, value, caches, slot_mapping)
    if caches.dtype not in _QUANTIZED_MAX:
        raise Unsupported(f"kv_cache is {caches.dtype}; per-token-head scales need {', '.join(_QUANTIZED_MAX)}.")
    for name, array in (("key", key), ("value", value)):
        if array.dtype not in QUERY_DTYPES:
            raise InvalidInput(f"{name} is {array.dtype}; it must be float32, bfloat16 or float16 to be quantised.")
    expected = (caches.num_blocks, caches.block_size, caches.num_heads)
    for name, array in (("k_scale_cache", k_scale_cache), ("v_scale_cache", v_scale_cache)):
        if array.dtype != "float32" or array.shape != expected:
            raise InvalidInput(f"{name} is {array.dtype}{list(array.shape)}; it must be float32{list(expected)}.")
    num_tokens = slot_mapping.shape[0]
    padded = power_of_two(max(caches.key_size, caches.value_size))
    rows = max(1, min(16, _TILE_ROW_ELEMENTS // padded))
    launch = LaunchPlan(
        kernel=write_cache_per_token_head_kernel,
        grid=(max(1, ceil_div(num_tokens * caches.num_heads, rows)),),
        arguments=(
            ("key", Pointer("key")),
            ("value", Pointer("value")),
            ("slot_mapping", Pointer("slot_mapping")),
            *caches.pointers,
            ("k_scale_cache", Pointer("k_scale_cache")),
            ("v_scale_cache", Pointer("v_scale_cache")),
            *_counts(num_tokens, caches),
            *_source_strides(key, value),
            *caches.strides,
            *_strides("k_scale", ("block", "token", "head"), k_scale_cache),
            *_strides("v_scale", ("block", "token", "head"), v_scale_cache),
        ),
        constexprs=(
            *caches.sizes[:3],
            ("PADDED_SIZE", padded),
            caches.sizes[3],
            ("ROWS", rows),
            ("MAX", _QUANTIZED_MAX[caches.dtype]),
        ),
        writes=(*caches.names, "k_scale_cache", "v_scale_cache"),
        num_warps=4,
        num_stages=1,
        hot=True,
    )
    scale_caches = (("k_scale_cache", k_scale_cache), ("v_scale_cache", v_scale_cache))
    return OperationPlan(
        name="write_kv_cache_per_token_head",
        inputs=(("key", key), ("value", value), ("slot_mapping", slot_mapping), *caches.buffers, *scale_caches),
        in_place=launch.writes,
        launches=(launch,),
    )


@dataclass(frozen=True, slots=True)
class _Caches:
    # A combined cache, or a key cache and a value cache, as the kernels see either.
    key: ArraySpec
    value: ArraySpec
    value_offset: int
    buffers: tuple[tuple[str, ArraySpec], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.buffers)

    @property
    def dtype(self) -> str:
        return self.key.dtype

    @property
    def num_blocks(self) -> int:
        return self.key.shape[0]

    @property
    def block_size(self) -> int:
        return self.key.shape[1]

    @property
    def num_heads(self) -> int:
        return self.key.shape[2]

    @property
    def key_size(self) -> int:
        return self.key.shape[3]

    @property
    def value_size(self) -> int:
        return self.value.shape[3]

    @property
    def pointers(self) -> tuple[tuple[str, Argument], ...]:
        value = Pointer(self.names[1]) if len(self.names) == 2 else ABSENT
        return (("key_cache", Pointer(self.names[0])), ("value_cache", value))

    @property
    def strides(self) -> tuple[tuple[str, Scalar], ...]:
        axes = ("block", "token", "head")
        offset = ("value_offset", Scalar(self.value_offset, "i64"))
        return (*_strides("key_cache", axes, self.key), *_strides("value_cache", axes, self.value), offset)

    @property
    def sizes(self) -> tuple[tuple[str, Any], ...]:
        return (
            ("NUM_HEADS", self.num_heads),
            ("KEY_SIZE", self.key_size),
            ("VALUE_SIZE", self.value_size),
            ("BLOCK_SIZE", self.block_size),
        )


def _caches(kv_cache: ArraySpec | tuple[ArraySpec, ArraySpec]) -> _Caches:
    if isinstance(kv_cache, ArraySpec):
        check_cache(kv_cache)
        block, value_offset, *inner = kv_cache.element_strides
        view = ArraySpec((kv_cache.shape[0], *kv_cache.shape[2:]), kv_cache.dtype, (block, *inner))
        return _Caches(view, view, value_offset, (("kv_cache", kv_cache),))
    key, value = kv_cache
    for name, array in (("key_cache", key), ("value_cache", value)):
        if len(array.shape) != 4 or array.shape[:3] != key.shape[:3] or array.dtype != key.dtype:
            raise InvalidInput(
                f"{name} is {array.dtype}{list(array.shape)}; both caches must be [num_blocks, block_size, "
                "num_kv_heads, head_size] of one dtype and agree in all but the head size."
            )
        check_last_stride(name, array)
    return _Caches(key, value, 0, (("key_cache", key), ("value_cache", value)))


def _counts(num_tokens: int, caches: _Caches) -> tuple[tuple[str, Scalar], ...]:
    num_slots = caches.num_blocks * caches.block_size
    return (
        ("num_tokens", Scalar(num_tokens, "i32", specialize=False)),
        ("num_slots", Scalar(num_slots, "i64", specialize=False)),
    )


def _source_strides(key: ArraySpec, value: ArraySpec) -> tuple[tuple[str, Scalar], ...]:
    return (*_strides("key", ("token", "head"), key), *_strides("value", ("token", "head"), value))


def _strides(prefix: str, axes: tuple[str, ...], array: ArraySpec) -> tuple[tuple[str, Scalar], ...]:
    strides = zip(axes, array.element_strides, strict=False)
    return tuple((f"{prefix}_{axis}_stride", Scalar(stride, "i64")) for axis, stride in strides)


def _check_write(key: ArraySpec, value: ArraySpec, caches: _Caches, slot_mapping: ArraySpec) -> None:
    if len(slot_mapping.shape) != 1 or slot_mapping.dtype not in ("int32", "int64"):
        raise InvalidInput(
            f"slot_mapping is {slot_mapping.dtype}{list(slot_mapping.shape)}; it must be int32 [num_tokens]."
        )
    check_contiguous("slot_mapping", slot_mapping)
    for name, array, row in (("key", key, caches.key.shape[2:]), ("value", value, caches.value.shape[2:])):
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
