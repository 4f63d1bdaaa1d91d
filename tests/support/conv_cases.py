"""Seeded short convolutions over ragged sequences, with poison in all that must not be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_core import reference
from torch_core.state.conv_call import OUTS, CausalConvCall

__all__ = ["assert_as_exact_as_torch", "conv_call", "cut_in_two", "whole_results"]


def conv_call(
    seed: int, lens: Sequence[int] = (5, 1, 0, 19, 1, 2), *, num_channels: int = 20, width: int = 4,
    dtype: str = "float32", state_dtype: str | None = None, bias: bool = True, states: bool = True,
    padding: int = 3, **options: Any,
) -> Any:  # fmt: skip
    """Draws a CausalConvCall: the second sequence has no slot, the fourth has one that it does not start from.

    Padded tokens, the slot that is not read and slots of no sequence hold NaN, and so do columns of no channel: seven
    of them with `first_column`.
    """
    torch.manual_seed(seed)
    kind, total, num_seqs = getattr(torch, dtype), sum(lens), len(lens)
    x = torch.randn(total + padding, num_channels, dtype=kind)
    x[total:] = torch.nan
    if (first := options.get("first_column")) is not None:
        x, channels = torch.full((total + padding, num_channels + 7), torch.nan, dtype=kind), x
        x[:, first : first + num_channels] = channels
    fields: dict[str, Any] = {
        "x": x,
        "weight": torch.randn(num_channels, width, dtype=kind),
        "query_start_loc": torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
        "bias": torch.randn(num_channels, dtype=kind) if bias else None,
    }
    if states:
        slots, known = torch.randperm(num_seqs + 2)[:num_seqs].int(), torch.ones(num_seqs, dtype=torch.bool)
        if num_seqs > 3:
            slots[1], known[3] = -1, False
        held = torch.full(
            (num_seqs + 2, width - 1, num_channels), torch.nan, dtype=getattr(torch, state_dtype or dtype)
        )
        read = slots[known & (slots >= 0)].long()
        held[read] = torch.randn(len(read), width - 1, num_channels).to(held.dtype)
        fields |= {"conv_states": held, "cache_indices": slots, "has_initial_state": known}
    return CausalConvCall(**fields, **{"activation": "silu", **options})


def cut_in_two(call: CausalConvCall[torch.Tensor], at: int) -> list[CausalConvCall[torch.Tensor]]:
    """Cuts a call of one sequence into two calls of its tokens before `at`, and from there on, on the same states."""
    parts = (call.x[:at], call.x[at:])
    first, second = (
        call.with_arrays({"x": x, "query_start_loc": torch.tensor([0, len(x)], dtype=torch.int32)}) for x in parts
    )
    return [first, second.with_arrays({"has_initial_state": torch.tensor([True])})]


def whole_results(results: Mapping[str, Any]) -> Any:
    """Returns the results of all channels as one tensor."""
    return torch.cat([torch.as_tensor(results[name]) for name in OUTS if name in results], 1)


def assert_as_exact_as_torch(
    call: CausalConvCall[torch.Tensor], out: torch.Tensor, states: torch.Tensor | None
) -> None:
    """The error is at most twice that of the reference in float32 rounded to the results' type; states are equal."""
    expected, narrow = call.map(torch.clone), call.map(torch.clone)
    exact = reference.causal_conv1d(expected)
    rounded = reference.causal_conv1d(narrow, compute_dtype=torch.float32).to(call.x.dtype).double()
    eps = torch.finfo(torch.promote_types(call.x.dtype, torch.float32)).eps
    allowed = 2 * ((rounded - exact).abs().max() + eps * exact.abs().max())
    assert out.dtype == call.x.dtype
    assert (out.double() - exact).abs().max() <= allowed
    if expected.conv_states is not None:
        assert states is not None
        torch.testing.assert_close(states, expected.conv_states, rtol=0, atol=0, equal_nan=True)
