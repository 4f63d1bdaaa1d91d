"""The products of many rows on Hopper: where they are served, and their launches."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from torch_core.calls import ExpertsCall
from torch_core.experts.hopper import ROWS, STEPS, WIDTH, hopper_expert_product_kernel
from torch_core.plan.operands import named_launch
from torch_core.plan.plan import ABSENT, Argument, Descriptor, DeviceLimits, LaunchPlan, Pointer, Scalar
from torch_core.specs import ArraySpec

__all__ = ["hopper_product", "is_hopper"]

_ARCH = 90
_STAGES = 4
_BYTES = 2
_ALIGNED = 16 // _BYTES
_MATRIX = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_PAIR = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def is_hopper(call: ExpertsCall[ArraySpec], limits: DeviceLimits) -> bool:
    """Returns whether `hopper_product` serves a call: Hopper, 16 bits, arrays that the copy engine can follow."""
    sizes = call.down_kernel.shape[1:]
    kernels = (call.gate_up_kernel, call.down_kernel)
    return (
        limits.arch == _ARCH
        and call.hidden_states.dtype in ("bfloat16", "float16")
        and not any(size % STEPS.value for size in sizes)
        and all(_is_matrix(spec) for spec in kernels)
        and call.hidden_states.aligned
        and call.hidden_states.element_strides[0] % _ALIGNED == 0
    )


def hopper_product(call: ExpertsCall[ArraySpec], limits: DeviceLimits, num_tiles: int, *, gated: bool) -> LaunchPlan:
    """Plans one product of sorted pairs; its result is sorted, too."""
    kernel, bias = ("gate_up_kernel", "gate_up_bias") if gated else ("down_kernel", "down_bias")
    spec: ArraySpec = call.arrays()[kernel]
    experts, in_size, columns = spec.shape
    out_size, stride = columns // (2 if gated else 1), spec.element_strides[1]
    rows: Argument = Pointer("hidden_states")
    shape, strides, box = (2, experts * in_size, out_size), (out_size, stride, 1), (2, STEPS.value, WIDTH.value // 2)
    if not gated:
        shape, strides, box = shape[1:], strides[1:], (STEPS.value, WIDTH.value)
        rows = Descriptor("gated", (num_tiles * ROWS.value, in_size), (in_size, 1), (ROWS.value, STEPS.value), _MATRIX)
    arguments: dict[str, Argument] = {
        "rows": rows,
        "weights": Descriptor(kernel, shape, strides, box, _PAIR if gated else _MATRIX),
        "bias": ABSENT if getattr(call, bias) is None else Pointer(bias),
        "sorted_ids": Pointer("sorted_ids"),
        "tile_experts": Pointer("tile_experts"),
        "out": Pointer("gated" if gated else "rows"),
        "num_tiles": Scalar(num_tiles, "i32", specialize=False),
        "row_stride": Scalar(call.hidden_states.element_strides[0] if gated else in_size, "i64"),
    }
    constants: dict[str, Any] = {
        "PAIRS_PER_ROW": call.topk_ids.shape[1],
        "IN": in_size,
        "OUT": out_size,
        "ACTIVATION": call.activation if gated else None,
        "STAGES": _STAGES,
    }
    return named_launch(
        hopper_expert_product_kernel, (limits.num_sms,), arguments, constants,
        writes=("gated" if gated else "rows",), num_warps=4, num_stages=1, hot=True,
    )  # fmt: skip


def _is_matrix(spec: ArraySpec) -> bool:
    """Returns whether the rows of all experts are one matrix that the copy engine can follow."""
    experts, rows, _ = spec.shape
    expert_stride, row_stride, _ = spec.element_strides
    return spec.aligned and expert_stride == rows * row_stride and row_stride % _ALIGNED == 0 and experts * rows < 2**31
