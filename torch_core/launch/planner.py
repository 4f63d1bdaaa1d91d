"""The one way from a call to its launch plan, for both runtimes."""

from __future__ import annotations

from functools import lru_cache

from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import E4M3_ARCH, ArraySpec
from torch_core.launch.call import Call
from torch_core.launch.op import loaded, op_of
from torch_core.launch.plan import DeviceLimits, OperationPlan
from torch_core.launch.serves import refuse_unserved


@lru_cache(maxsize=8192)
def plan_call(call: Call[ArraySpec], limits: DeviceLimits | None = None) -> OperationPlan:
    """Plans a call from the shapes, dtypes and strides of its arrays and the device limits.

    Args:
        call: `call.map(array_spec)` of a call of tensors or JAX arrays.
        limits: the device; an H200 when None.

    Raises:
        InvalidInput: the call is inconsistent, or it is empty (then return its outputs without a plan).
        Unsupported: the Triton kernels do not serve it; the message names an alternative.
    """
    call.check()
    call = call.for_kernels(None)
    refuse_unserved(call, "triton")
    if call.is_empty:
        raise InvalidInput("call", f"is an empty {call.name}", "return empty outputs without a plan")
    limits = limits or DeviceLimits()
    _refuse_old_device(call, limits)
    return loaded(op_of(call).plan)(call, limits)


def _refuse_old_device(call: Call[ArraySpec], limits: DeviceLimits) -> None:
    e4m3 = [name for name, dtype in call.element_types().items() if dtype == "float8_e4m3fn"]
    if e4m3 and limits.arch < E4M3_ARCH:
        problem = f"is float8_e4m3fn on a device of compute capability {limits.arch / 10}"
        fix = f"Triton's kernels need {E4M3_ARCH / 10} for it. Use float8_e5m2 or int8, or implementation='xla'"
        raise Unsupported(e4m3[0], problem, fix)
