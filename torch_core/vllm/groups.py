"""The ranks that share sequences, as a layer talks to them: two collectives, injected and never looked up."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from torch_core.attention.context_parallel import merge_parts

__all__ = ["ContextGroup", "DistributedGroup", "merge_over_group"]


class ContextGroup(Protocol):
    """The collectives of the ranks that share a layer's sequences; all ranks call them in the same order."""

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns the tensors of all ranks, joined along `dim` in the order of ranks."""
        ...

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Returns `[ranks, ...]`: from each rank the entry of its tensor's first axis that is for this rank."""
        ...


class DistributedGroup:
    """A `ContextGroup` over `torch.distributed`: NCCL on CUDA, gloo on a CPU.

    Args:
        group: a process group; None for all processes.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See `ContextGroup.all_gather`."""
        found = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(self._group))]
        torch.distributed.all_gather(found, tensor.contiguous(), group=self._group)
        return torch.cat(found, dim)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """See `ContextGroup.all_to_all`."""
        found = torch.empty_like(tensor)
        torch.distributed.all_to_all_single(found, tensor.contiguous(), group=self._group)
        return found


def merge_over_group(
    out: Tensor, lse: Tensor, group: ContextGroup, world_size: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merges attention to each rank's keys by one all-to-all, which sends a head's parts to the rank that has it.

    Args:
        out: [num_tokens, world_size * num_heads, head_size], of this rank's keys.
        lse: float32 [num_tokens, world_size * num_heads].
        group: the ranks.
        world_size: number of ranks.
        sinks: [num_heads], of this rank's heads.

    Returns:
        The output and lse of this rank's heads, float32.
    """
    parts = [x.unflatten(1, (world_size, -1)).movedim(1, 0).contiguous() for x in (out, lse)]
    size = out.shape[-1] * out.element_size()
    message = torch.cat([parts[0].view(torch.uint8), parts[1][..., None].view(torch.uint8)], -1)
    found = group.all_to_all(message)
    outs, lses = found[..., :size].contiguous().view(out.dtype), found[..., size:].contiguous().view(lse.dtype)
    return merge_parts(outs, lses[..., 0], sinks, library=torch)
