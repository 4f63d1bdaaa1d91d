"""The kernels of latent attention as its plan sees them, and the calls that the Hopper kernels serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_core.attention.operands import output
from torch_core.base.specs import HOPPER_ARCH, ArraySpec
from torch_core.latent.call import LatentCall
from torch_core.launch.plan import Argument, DeviceLimits

_ARRAYS = frozenset(("query", "latent_cache", "block_tables", "seq_lens", "query_start_loc", "sinks", "out"))


@dataclass(frozen=True, slots=True)
class LatentKernel:
    """A kernel of latent attention, with all of its launch that differs from the other kernels.

    Attributes:
        kernel: the kernel.
        rows: rows (query token, head) of one program.
        constexprs: the kernel's own constexprs.
        arguments: the kernel's own arguments.
        num_warps: warps of one program.
        num_stages: depth of the software pipeline; no part of Gluon kernels.
        programs: programs that run on a multiprocessor at a time.
        shares: it can cut an uneven batch by the lengths of all sequences.
        hot: a spill is an error.
    """

    kernel: Any
    rows: int
    constexprs: Mapping[str, Any]
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 1
    shares: bool = False
    hot: bool = False


def is_hopper_latent(call: LatentCall[ArraySpec], limits: DeviceLimits, *further: str) -> bool:
    """Whether a call meets the conditions that both Hopper kernels have.

    Both take queries of bfloat16 or float16, latents of 512 and rotary keys of 64 elements (DeepSeek's), a positive
    scale, the causal mask or none, and sinks.

    Args:
        call: the call.
        limits: the device.
        further: arrays of a call that this kernel takes and the other one does not.
    """
    spec = call.spec
    return (
        limits.arch == HOPPER_ARCH
        and (call.kv_lora_rank, call.head_size) == (512, 576)
        and call.query.dtype in ("bfloat16", "float16")
        and call.query.dtype == output(call).dtype
        and call.arrays().keys() <= {*_ARRAYS, *further}
        and spec.scale > 0
        and spec.sets_only("scale", "causal", "window_right", "use_alibi_sqrt")
    )
