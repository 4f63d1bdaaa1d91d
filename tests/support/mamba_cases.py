"""Seeded calls of Mamba-2 over ragged sequences, with poison in all that must not be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.state_cases import assert_as_exact_as, drawn_backward, drawn_states
from torch_core import reference
from torch_core.state.backward_call import MambaChunkScanBackwardCall
from torch_core.state.mamba_call import MambaChunkScanCall

__all__ = ["assert_as_exact_as_torch", "mamba_backward_call", "mamba_call"]


def mamba_call(
    seed: int, lens: Sequence[int] = (5, 1, 0, 19, 1, 2), *, heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (6, 8), dtype: str = "float32", states: bool = True, optional: bool = True,
    padding: int = 3, in_place: bool = False, state_dtype: str = "float32", **options: Any,
) -> Any:  # fmt: skip
    """Draws a MambaChunkScanCall: the second sequence has no slot, the fourth has one that it does not start from.

    Padded tokens, the slot that is not read and slots of no sequence hold NaN.

    Args:
        heads: heads and groups.
        sizes: rows and columns of a state.
        optional: with D, dt_bias and softplus.
        in_place: dt is among other columns, NaN, and A has logarithms.
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
    if in_place:
        dt, fields["dt"] = fields["dt"], torch.full((total + padding, num_heads + 5), torch.nan, dtype=kind)
        fields["dt"][:, 3 : 3 + num_heads] = dt
        fields |= {"dt_column": 3, "A": (-fields["A"]).log(), "log_rates": True}
    if states:
        fields |= drawn_states(num_seqs, num_heads, head_dim, state_size, dtype=state_dtype)
    return MambaChunkScanCall(**{**fields, **options})


def mamba_backward_call(call: Any) -> Any:
    """See `drawn_backward`."""
    return drawn_backward(MambaChunkScanBackwardCall, call)


def assert_as_exact_as_torch(call: Any, out: torch.Tensor, states: torch.Tensor | None) -> None:
    """See `assert_as_exact_as`."""
    assert_as_exact_as(reference.mamba_chunk_scan, call, out, states, call.x.dtype)
