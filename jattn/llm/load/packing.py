"""How methods of quantisation pack small integers into words of 32 bits, and what a quantization_config says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """How a method stores a matrix [in, out] of small integers. Tensors have the module's name before their own.

    Attributes:
        values: name of the numbers, several in a word.
        zeros: name of the zero points, several in a word, [groups, out].
        scales: name of the scales, [groups, out].
        groups: name of the group of each input; "" if they are in order in every file.
        shape: name of the shape [out, in]; "" if it is not stored.
        bits: the numbers of bits that are read.
        values_axis: axis of the numbers in a word, of [in, out].
        zeros_axis: axis of the zero points in a word, of [groups, out].
        order: places in a word of its numbers.
        transposed: matrices are stored as [out, in] and [out, groups].
        needs_zeros: the zero points are in every file; otherwise they may be half the range.
    """

    values: str = ".qweight"
    zeros: str = ".qzeros"
    scales: str = ".scales"
    groups: str = ""
    shape: str = ""
    bits: tuple[int, ...] = (4, 8)
    values_axis: int
    zeros_axis: int = 1
    order: tuple[int, ...] | None = None
    transposed: bool = False
    needs_zeros: bool = True


@dataclass(frozen=True, slots=True)
class Packing:
    """The format of a folder, the bits of a number, the inputs of a group (None for all), what zero points lack."""

    format: PackedFormat
    bits: int
    group_size: int | None
    zero_offset: int = 0


_AWQ = PackedFormat(bits=(4,), values_axis=1, order=(0, 4, 1, 5, 2, 6, 3, 7))
_GPTQ = PackedFormat(values_axis=0, groups=".g_idx")
_COMPRESSED = PackedFormat(
    values=".weight_packed",
    zeros=".weight_zero_point",
    scales=".weight_scale",
    groups=".weight_g_idx",
    shape=".weight_shape",
    values_axis=0,
    transposed=True,
    needs_zeros=False,
)
#: Zero points of GPTQ's first format are less by 1.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
#: Keys of methods that change the computation.
_NOT_SERVED = ("dynamic", "rotation", "adapter", "transform_config")


def read_packing(given: Mapping[str, Any]) -> Packing | None:
    """Returns how a quantization_config says that weights are packed; None for a method without packed integers.

    Raises:
        InvalidInput, Unsupported: a value that is wrong, or that this build does not read; the error names its key.
    """
    method = given.get("quant_method")
    if method not in ("awq", "gptq") and (method, given.get("format")) != ("compressed-tensors", "pack-quantized"):
        return None
    for name in _NOT_SERVED:
        if given.get(name):
            raise Unsupported(name, value=given[name], wanted="this build reads models without it")
    if method == "compressed-tensors":
        return _compressed(given)
    if method == "gptq":
        kind = given.get("checkpoint_format") or given.get("format") or "gptq"
        if not isinstance(kind, str) or kind not in _ZERO_OFFSETS:
            raise Unsupported("checkpoint_format", value=kind, wanted=f"this build reads {', '.join(_ZERO_OFFSETS)}")
        return Packing(_GPTQ, _bits(given, _GPTQ, "bits"), _group_size(given), _ZERO_OFFSETS[kind])
    kind = given.get("version") or given.get("checkpoint_format") or given.get("format") or "gemm"
    if not isinstance(kind, str) or kind.lower() != "gemm":
        raise Unsupported("version", value=kind, wanted="this build reads gemm")
    if given.get("zero_point") is False:
        raise Unsupported("zero_point", value=False, wanted="this build reads AWQ with zero points")
    return Packing(_AWQ, _bits(given, _AWQ, "bits" if "bits" in given else "w_bit"), _group_size(given))


def _compressed(given: Mapping[str, Any]) -> Packing:
    groups = given.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [
        each["weights"] for each in groups if isinstance(each, Mapping) and isinstance(each.get("weights"), Mapping)
    ]
    if not weights or len(weights) < len(groups):
        raise InvalidInput("config_groups", value=given.get("config_groups"), wanted="each group must have weights")
    found = {_weights_of(each) for each in weights}
    if len(found) > 1:
        raise Unsupported("config_groups", f"have {len(found)} kinds of weights", "this build reads one")
    return found.pop()


def _weights_of(weights: Mapping[str, Any]) -> Packing:
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    if kind != "int":
        raise Unsupported("config_groups.weights.type", value=kind, wanted="this build reads int")
    if strategy not in ("group", "channel"):
        raise Unsupported("config_groups.weights.strategy", value=strategy, wanted="this build reads group, channel")
    bits = _bits(weights, _COMPRESSED, "num_bits")
    return Packing(_COMPRESSED, bits, _group_size(weights) if strategy == "group" else None)


def _bits(given: Mapping[str, Any], form: PackedFormat, name: str) -> int:
    if given.get(name) not in form.bits or isinstance(given[name], bool):
        wanted = f"this build reads {' and '.join(map(str, form.bits))}"
        raise Unsupported(name, value=given.get(name), wanted=wanted)
    return given[name]


def _group_size(given: Mapping[str, Any]) -> int | None:
    name = "q_group_size" if "q_group_size" in given else "group_size"
    size = given.get(name)
    if size in (None, -1):
        return None
    check_int(name, size, 1, 1 << 20)
    return size
