"""The one way from a call to its launch plan, for both runtimes."""

from __future__ import annotations

from functools import lru_cache

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.call import AttentionCall
from torch_core.attention.choose import plan_attention, plan_attention_backward
from torch_core.attention.kernels.merge.plan import plan_merge
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.cache_writes.kernels.copy.plan import plan_copy
from torch_core.cache_writes.kernels.rotate_and_write.plan import plan_rotary_write
from torch_core.cache_writes.kernels.write.plan import plan_write
from torch_core.cache_writes.rotary_call import RotaryWriteCall
from torch_core.experts.call import ExpertsCall
from torch_core.experts.kernels.plan import plan_experts
from torch_core.experts.kernels.route_plan import plan_route
from torch_core.experts.routing_call import RouteCall
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.latent.kernels.indexer.plan import plan_choice, plan_indexer
from torch_core.latent.kernels.mla.plan import plan_latent
from torch_core.latent.kernels.write.plan import plan_latent_write
from torch_core.latent.sparse_call import ChoiceCall, IndexerCall
from torch_core.launch.call import Call
from torch_core.launch.plan import DeviceLimits, OperationPlan
from torch_core.launch.serves import refuse_unserved

__all__ = ["plan_call"]

#: The first devices with instructions for e4m3.
_E4M3_ARCH = 89


@lru_cache(maxsize=8192)
def plan_call(call: Call[ArraySpec], limits: DeviceLimits | None = None) -> OperationPlan:
    """Plans a call from the shapes, dtypes and strides of its arrays and what the device can do.

    Args:
        call: `call.map(array_spec)` of a call of tensors or JAX arrays.
        limits: the device; an H200 when None.

    Raises:
        InvalidInput: the call does not hold together, or it is empty: return its outputs without a plan then.
        Unsupported: the Triton kernels do not serve it; the message says what does.
    """
    call.check()
    refuse_unserved(call, "triton")
    if call.is_empty:
        raise InvalidInput(f"{call.name} of nothing has nothing to launch: return empty outputs without a plan.")
    limits = limits or DeviceLimits()
    _refuse_old_device(call, limits)
    if isinstance(call, DenseBackwardCall):
        return plan_attention_backward(call, limits)
    if isinstance(call, LatentCall):
        return plan_latent(call, limits)
    if isinstance(call, AttentionCall):
        return plan_attention(call, limits)
    if isinstance(call, WriteCall):
        return plan_write(call)
    if isinstance(call, LatentWriteCall):
        return plan_latent_write(call)
    if isinstance(call, RotaryWriteCall):
        return plan_rotary_write(call)
    if isinstance(call, CopyCall):
        return plan_copy(call)
    if isinstance(call, MergeCall):
        return plan_merge(call)
    if isinstance(call, IndexerCall):
        return plan_indexer(call)
    if isinstance(call, ChoiceCall):
        return plan_choice(call)
    if isinstance(call, ExpertsCall):
        return plan_experts(call, limits)
    if isinstance(call, RouteCall):
        return plan_route(call, limits)
    raise InvalidInput(f"{type(call).__name__} is no call that the kernels have a plan for.")


def _refuse_old_device(call: Call[ArraySpec], limits: DeviceLimits) -> None:
    dtypes = {name: spec.dtype for name, spec in call.arrays().items()} | {"out": getattr(call, "result_dtype", None)}
    if isinstance(call, (LatentCall, LatentWriteCall)) and call.is_packed:
        dtypes["latent_cache"] = "float8_e4m3fn"
    e4m3 = [name for name, dtype in dtypes.items() if dtype == "float8_e4m3fn"]
    if e4m3 and limits.arch < _E4M3_ARCH:
        raise Unsupported(
            f"{e4m3[0]} is float8_e4m3fn, which Triton's kernels need compute capability {_E4M3_ARCH / 10} for, and "
            f"this device has {limits.arch / 10}; use float8_e5m2 or int8, or implementation='xla'."
        )
