"""Seeded gated delta rules over ragged sequences, with poison in all that must not be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.state_cases import assert_as_exact_as, drawn_backward, drawn_states
from torch_core import reference
from torch_core.state.backward_call import GatedDeltaBackwardCall
from torch_core.state.delta_call import GatedDeltaCall

__all__ = ["assert_as_exact_as_torch", "delta_backward_call", "delta_call"]


def delta_call(
    seed: int, lens: Sequence[int] = (5, 1, 0, 19, 1, 2), *, heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (8, 6), dtype: str = "float32", gates: str | None = "g", states: bool = True,
    padding: int = 3, state_dtype: str = "float32", **options: Any,
) -> Any:  # fmt: skip
    """Draws a GatedDeltaCall: the second sequence has no slot, the fourth has one that it does not start from.

    Padded tokens, the slot that is not read and slots of no sequence hold NaN.
    """
    torch.manual_seed(seed)
    kind, total, num_seqs = getattr(torch, dtype), sum(lens), len(lens)
    (num_heads, num_kv_heads), (key_size, value_size) = heads, sizes

    def rows(*shape: int) -> torch.Tensor:
        return torch.cat([torch.randn(total, *shape), torch.full((padding, *shape), torch.nan)])

    fields: dict[str, Any] = {
        "query": rows(num_kv_heads, key_size).to(kind),
        "key": rows(num_kv_heads, key_size).to(kind),
        "value": rows(num_heads, value_size).to(kind),
        "beta": rows(num_heads).sigmoid().to(kind),
        "query_start_loc": torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
        "max_query_len": max(1, *lens),
    }
    if gates is not None:
        shape = (num_heads,) if gates == "g" else (num_heads, key_size)
        fields[gates] = torch.nn.functional.logsigmoid(rows(*shape) + 2)
    if states:
        fields |= drawn_states(num_seqs, num_heads, value_size, key_size, dtype=state_dtype)
    return GatedDeltaCall(**fields, **{"scale": key_size**-0.5, "use_qk_l2norm_in_kernel": True, **options})


def delta_backward_call(call: Any) -> Any:
    """See `drawn_backward`."""
    return drawn_backward(GatedDeltaBackwardCall, call)


def assert_as_exact_as_torch(call: Any, out: torch.Tensor, states: torch.Tensor | None, added: int = 1) -> None:
    """See `assert_as_exact_as`."""
    assert_as_exact_as(reference.gated_delta_rule, call, out, states, call.value.dtype, added)
