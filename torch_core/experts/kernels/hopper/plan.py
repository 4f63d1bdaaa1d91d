"""The second product of many sorted rows on Hopper: which calls it serves, and its launch."""

from __future__ import annotations

from triton.experimental.gluon.language import NVMMASharedLayout

from torch_core.base.specs import HOPPER_ARCH, ArraySpec
from torch_core.experts.call import ExpertsCall
from torch_core.experts.kernels.hopper.kernel import COLUMNS, ROWS, STEPS, hopper_expert_product_kernel
from torch_core.launch.operands import named_launch
from torch_core.launch.plan import ABSENT, Argument, Descriptor, DeviceLimits, LaunchPlan, Pointer, Scalar

_STAGES = 4
_BYTES = 2
_ALIGNED = 16 // _BYTES
_MATRIX = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def is_hopper(call: ExpertsCall[ArraySpec], limits: DeviceLimits) -> bool:
    """Returns whether `hopper_product` serves a call: Hopper, 16 bits, arrays that the copy engine can follow."""
    sizes = call.down_kernel.shape[1:]
    kernels = (call.gate_up_kernel, call.down_kernel)
    return (
        limits.arch == HOPPER_ARCH
        and call.hidden_states.dtype in ("bfloat16", "float16")
        and not any(size % STEPS.value for size in sizes)
        and all(_is_matrix(spec) for spec in kernels)
    )


def hopper_product(call: ExpertsCall[ArraySpec], limits: DeviceLimits, num_tiles: int) -> LaunchPlan:
    """Plans the second product, of sorted rows; its result is sorted, too."""
    experts, in_size, out_size = call.down_kernel.shape
    stride = call.down_kernel.element_strides[1]
    arguments: dict[str, Argument] = {
        "rows": Descriptor(
            "gated", (num_tiles * ROWS.value, in_size), (in_size, 1), (ROWS.value, STEPS.value), _MATRIX
        ),
        "weights": Descriptor(
            "down_kernel", (experts * in_size, out_size), (stride, 1), (STEPS.value, COLUMNS.value), _MATRIX
        ),
        "bias": ABSENT if call.down_bias is None else Pointer("down_bias"),
        "sorted_ids": Pointer("sorted_ids"),
        "tile_experts": Pointer("tile_experts"),
        "out": Pointer("rows"),
        "num_tiles": Scalar(num_tiles, "i32", specialize=False),
    }
    constants = {"IN": in_size, "OUT": out_size, "STAGES": _STAGES}
    return named_launch(
        hopper_expert_product_kernel, (limits.num_sms,), arguments, constants, writes=("rows",), num_warps=4,
        num_stages=1, hot=True,
    )  # fmt: skip


def _is_matrix(spec: ArraySpec) -> bool:
    """Returns whether the rows of all experts are one matrix that the copy engine can follow."""
    experts, rows, _ = spec.shape
    expert_stride, row_stride, _ = spec.element_strides
    return spec.aligned and expert_stride == rows * row_stride and row_stride % _ALIGNED == 0 and experts * rows < 2**31
