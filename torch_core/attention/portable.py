"""Shared parts of the portable kernels' plans: their tile, and whether a variant serves most models."""

from __future__ import annotations

from dataclasses import dataclass

from torch_core.attention.call import AttentionCall
from torch_core.attention.operands import is_plain
from torch_core.base.specs import ArraySpec


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of a portable kernel.

    Attributes:
        block_m: rows, query tokens times packed heads.
        block_n: keys of one step.
        num_stages: depth of the software pipeline.
        num_warps: warps of one program.
        maxnreg: limit on registers per thread, None for none.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    maxnreg: int | None = None


def is_hot(call: AttentionCall[ArraySpec]) -> bool:
    """Whether a portable variant serves most models, so that a spill there is an error."""
    return is_plain(call) and call.query.dtype != "float32" and call.head_size <= 128
