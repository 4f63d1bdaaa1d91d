"""Seeded calls of Mamba-2 over ragged sequences, with poison in all that must not be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_core import reference
from torch_core.state.mamba_call import MambaChunkScanCall

__all__ = ["assert_as_exact_as_torch", "mamba_call"]


def mamba_call(
    seed: int, lens: Sequence[int] = (5, 1, 0, 19, 1, 2), *, heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (6, 8), dtype: str = "float32", states: bool = True, optional: bool = True,
    padding: int = 3, **options: Any,
) -> Any:  # fmt: skip
    """Draws a MambaChunkScanCall: the second sequence has no slot, the fourth has one that it does not start from.

    Padded tokens, the slot that is not read and slots of no sequence hold NaN.

    Args:
        heads: heads and groups.
        sizes: rows and columns of a state.
        optional: with D, dt_bias and softplus.
    """
    torch.manual_seed(seed)
    kind, total, num_seqs = getattr(torch, dtype), sum(lens), len(lens)
    (num_heads, num_groups), (head_dim, state_size) = heads, sizes

    def rows(*shape: int) -> torch.Tensor:
        return torch.cat([torch.randn(total, *shape), torch.full((padding, *shape), torch.nan)])

    fields: dict[str, Any] = {
        "x": rows(num_heads, head_dim).to(kind),
        "dt": (rows(num_heads) - 1).to(kind) if optional else rows(num_heads).exp().to(kind) / 4,
        "A": -torch.rand(num_heads) * 2 - 0.01,
        "B": rows(num_groups, state_size).to(kind),
        "C": rows(num_groups, state_size).to(kind),
        "query_start_loc": torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
        "max_query_len": max(1, *lens),
    }
    if optional:
        fields |= {"D": torch.randn(num_heads), "dt_bias": torch.randn(num_heads) - 2, "dt_softplus": True}
    if states:
        slots, known = torch.randperm(num_seqs + 2)[:num_seqs].int(), torch.ones(num_seqs, dtype=torch.bool)
        if num_seqs > 3:
            slots[1], known[3] = -1, False
        held = torch.full((num_seqs + 2, num_heads, head_dim, state_size), torch.nan)
        read = slots[known & (slots >= 0)].long()
        held[read] = torch.randn(len(read), *held.shape[1:])
        fields |= {"states": held, "cache_indices": slots, "has_initial_state": known}
    return MambaChunkScanCall(**{**fields, **options})


def assert_as_exact_as_torch(call: Any, out: torch.Tensor, states: torch.Tensor | None) -> None:
    """Errors are at most twice those of the reference in float32, and some roundings of the largest value."""
    expected, narrow = call.map(torch.clone), call.map(torch.clone)
    exact = reference.mamba_chunk_scan(expected)
    rounded = reference.mamba_chunk_scan(narrow, compute_dtype=torch.float32).to(call.x.dtype).double()
    # Chunks multiply operands of the inputs' own type; a state is a sum over all tokens before it.
    eps = max(torch.finfo(call.x.dtype).eps, torch.finfo(torch.float32).eps * call.max_query_len**0.5)
    allowed = 2 * ((rounded - exact).abs().max() + eps * exact.abs().max())
    assert out.dtype == call.x.dtype
    assert (out.double() - exact).abs().max() <= allowed
    if expected.states is not None:
        assert states is not None
        scale = expected.states.nan_to_num().abs().max()
        allowed = 2 * ((narrow.states - expected.states).nan_to_num().abs().max() + eps * scale)
        torch.testing.assert_close(states, expected.states, rtol=0, atol=float(allowed), equal_nan=True)
