"""Shared parts of the portable kernels' plans: their tile, and a program's search for its sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch_core.attention.call import AttentionCall
from torch_core.attention.operands import is_plain
from torch_core.base.specs import ArraySpec

# Few sizes, so that few variants are compiled.
_BLOCK_SEQS = (1, 32, 256, 1024)


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


def block_seqs(num_seqs: int) -> int:
    """Returns the number of sequences that a program looks at together when it searches for its own."""
    return next((size for size in _BLOCK_SEQS if size >= num_seqs), _BLOCK_SEQS[-1])


def is_hot(call: AttentionCall[ArraySpec]) -> bool:
    """Whether a portable variant serves most models, so that a spill there is an error."""
    return is_plain(call) and call.query.dtype != "float32" and call.head_size <= 128
