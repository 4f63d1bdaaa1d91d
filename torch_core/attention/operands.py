"""An attention call of array specs as kernels see it: views of keys and values, arguments, and the finished plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.call import SCORE_FIELDS, AttentionCall, DenseCall, PagedCall
from torch_core.attention.dropout import dropout_limit, keep_factor
from torch_core.base.specs import LARGEST_CODE, ArraySpec
from torch_core.launch.call import array_fields
from torch_core.launch.operands import named_launch, power_of_two, scale_number
from torch_core.launch.plan import ABSENT, Argument, LaunchPlan, OperationPlan, Pointer, Scalar

# Positions and windows stay below this, so that their sum fits 32 bits.
_NO_BOUND = 1 << 30
_FIELDS = frozenset(name for kind in (PagedCall, DenseBackwardCall) for name in array_fields(kind))


def output(call: AttentionCall[ArraySpec]) -> ArraySpec:
    """Returns the output, given or new."""
    return call.out if call.out is not None else call.outputs()["out"]


def padded(size: int) -> int:
    """Returns a head size as a tile has it.

    Example:
        >>> padded(80), padded(8)
        (128, 16)
    """
    return max(16, power_of_two(size))


def is_plain(call: AttentionCall[ArraySpec]) -> bool:
    """Whether scores are only scaled and masked, by bounds that are the same for every row."""
    return call.spec.logits_soft_cap is None and not _EXTRAS & call.arrays().keys()


# Fields that do more to a score than that.
_EXTRAS = frozenset((*SCORE_FIELDS, "k_scale_cache", "dropout_seeds"))


def make_launch(
    kernel: Any,
    call: AttentionCall[ArraySpec],
    grid: tuple[int, ...],
    constexprs: Mapping[str, Any],
    *,
    arguments: Mapping[str, Argument] | None = None,
    writes: tuple[str, ...] = (),
    **options: Any,
) -> LaunchPlan:
    """Makes a launch of an attention kernel.

    A parameter named like a field of the call points to its array, or is absent if the call has none; the numbers
    that all attention kernels know are `_scalars`.

    Args:
        kernel: the kernel.
        call: the call.
        grid: the grid.
        constexprs: compile-time parameters; more than the kernel has are left out.
        arguments: kernel arguments that are not fields of the call, or differ from them.
        writes: written arrays other than the forward pass's output and lse.
        **options: num_warps, num_stages, maxnreg and hot of the plan.
    """
    key, value = call.buffers()
    results = () if isinstance(call, DenseBackwardCall) else ("out", *(("lse",) if call.with_lse else ()))
    known: dict[str, Argument] = {
        **dict.fromkeys(_FIELDS, ABSENT),
        **{name: Pointer(name) for name in call.arrays()},
        "key_cache": Pointer(key),
        "value_cache": Pointer(value),
        **{name: Pointer(name) for name in results},
        **_scalars(call),
        **(arguments or {}),
    }
    if call.values_are_keys:
        known["v_scale"] = known["k_scale"]
    return named_launch(kernel, grid, known, constexprs, writes=(*results, *writes), **options)


def cache_constexprs(call: AttentionCall[ArraySpec]) -> dict[str, Any]:
    """Returns the sizes and strides that the portable kernels know when they are compiled."""
    key, value, out = call.keys(), call.values(), output(call)
    # A dense array has no blocks: its strides are those of (nothing, token, head).
    blocks = () if call.reads_cache else (0,)
    scales = getattr(call, "k_scale_cache", None)
    return {
        "GROUP": call.group,
        "HEAD_SIZE": call.head_size,
        "HEAD_PADDED": padded(call.head_size),
        "VALUE_SIZE": call.value_head_size,
        "VALUE_PADDED": padded(call.value_head_size),
        "BLOCK_SIZE": call.block_size,
        "ALIBI_SQRT": call.spec.use_alibi_sqrt,
        "NEGATE": call.spec.scale < 0,
        "EXACT": call.query.dtype == "float32",
        "OUT_LIMIT": LARGEST_CODE.get(out.dtype, 0.0),
        "QUERY_STRIDES": call.query.element_strides[:2],
        "KEY_STRIDES": (*blocks, *key.element_strides[:-1]),
        "VALUE_STRIDES": (*blocks, *value.element_strides[:-1]),
        "VALUE_OFFSET": call.value_offset,
        "OUT_STRIDES": out.element_strides[:2],
        "LSE_STRIDES": (call.num_heads, 1),
        "DROPOUT_SEEDS_STRIDES": (2 * call.num_heads, 2),
        "SCALE_STRIDES": (0, 0, 0) if scales is None else scales.element_strides,
    }


def operation(
    call: AttentionCall[ArraySpec], launches: tuple[LaunchPlan, ...], scratch: tuple[tuple[str, ArraySpec], ...] = ()
) -> OperationPlan:
    """Returns the finished plan. An output that is given contiguous and aligned is an output like a new one."""
    arrays, outputs = call.arrays(), call.outputs()
    out = arrays.get("out") if "out" in call.written else None
    in_place = out is not None and (out.strides is not None or not out.aligned)
    if out is not None and not in_place:
        outputs = {"out": arrays.pop("out"), **outputs}
    return OperationPlan(
        name=call.name,
        inputs=tuple(arrays.items()),
        in_place=("out",) if in_place else (),
        outputs=tuple(outputs.items()),
        scratch=scratch,
        launches=launches,
    )


def _scalars(call: AttentionCall[ArraySpec]) -> dict[str, Argument]:
    spec = call.spec
    right = spec.window_right
    if call.seq_causal is not None:
        right = _NO_BOUND if right is None else right
    elif spec.causal:
        right = 0
    tables = getattr(call, "block_tables", None)
    numbers = {name: scale_number(getattr(call, name, None)) for name in ("q_scale", "k_scale", "v_scale", "out_scale")}
    rate = call.dropout_rate if isinstance(call, DenseCall) else 0.0
    kept = keep_factor(rate)
    return {
        "num_tokens": count(call.num_tokens),
        "num_seqs": count(call.num_seqs),
        "table_stride": count(0 if tables is None else tables.element_strides[0]),
        "table_tokens": count(min(call.table_tokens, _NO_BOUND)),
        "scale": Scalar(abs(spec.scale) * numbers["q_scale"] * numbers["k_scale"], "fp32"),
        "out_factor": Scalar(numbers["v_scale"] / numbers["out_scale"] * kept, "fp32"),
        "dropout_limit": count(dropout_limit(rate)) if rate else ABSENT,
        "keep_factor": Scalar(kept, "fp32"),
        "soft_cap": ABSENT if spec.logits_soft_cap is None else Scalar(spec.logits_soft_cap, "fp32"),
        "window_left": _bound(spec.window_left),
        "window_right": _bound(right),
        "attention_chunk": _bound(spec.attention_chunk),
        "relative_bias_size": ABSENT if call.relative_bias is None else count(call.relative_bias.shape[1]),
        "qq_bias_size": ABSENT if call.qq_bias is None else count(call.qq_bias.shape[0]),
    }


def count(value: int) -> Scalar:
    """Returns a number that changes from step to step, as a kernel argument."""
    return Scalar(value, "i32", specialize=False)


def _bound(value: int | None) -> Argument:
    return ABSENT if value is None else count(min(value, _NO_BOUND))
