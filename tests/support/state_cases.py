"""The parts that tests of all operations with a state have in common: implementations, slots, and allowed errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

#: Options of a batch whose sequences keep the states after some of their tokens.
KEPT: dict[str, Any] = {
    "lens": (5, 1, 0, 4, 1, 2),
    "num_kept_tokens": torch.tensor([3, 1, 0, 0, 1, 1], dtype=torch.int32),
}


def each_implementation(options: Sequence[dict[str, Any]]) -> pytest.MarkDecorator:
    """Parametrizes a test by implementation and options; Triton's cases need a GPU."""
    cases = [
        *(("xla", each) for each in options),
        # Its results are plain torch's.
        ("torch", options[0]),
        *(pytest.param("triton", each, marks=pytest.mark.gpu) for each in options),
    ]
    return pytest.mark.parametrize(("implementation", "options"), cases, ids=str)


def drawn_states(num_seqs: int, *shape: int) -> dict[str, torch.Tensor]:
    """Draws states and slots: the second sequence has no slot, the fourth has one that it does not start from.

    The slot that is not read and slots of no sequence hold NaN.
    """
    slots, known = torch.randperm(num_seqs + 2)[:num_seqs].int(), torch.ones(num_seqs, dtype=torch.bool)
    if num_seqs > 3:
        slots[1], known[3] = -1, False
    held = torch.full((num_seqs + 2, *shape), torch.nan)
    read = slots[known & (slots >= 0)].long()
    held[read] = torch.randn(len(read), *shape)
    return {"states": held, "cache_indices": slots, "has_initial_state": known}


def assert_as_exact_as(
    reference: Callable[..., torch.Tensor],
    call: Any,
    out: torch.Tensor,
    states: torch.Tensor | None,
    dtype: torch.dtype,
    added: int = 1,
) -> None:
    """Errors are at most twice those of the reference in float32, and some roundings of the largest value.

    Args:
        reference: the specification, which updates the states of a call.
        dtype: type of the call's values.
        added: tokens whose roundings add up, as those of equal keys do.
    """
    expected, narrow = call.map(torch.clone), call.map(torch.clone)
    exact = reference(expected)
    rounded = reference(narrow, compute_dtype=torch.float32).to(dtype).double()
    # Chunks multiply operands of the inputs' own type; a state is a sum over all tokens before it.
    eps = max(torch.finfo(dtype).eps * added**0.5, torch.finfo(torch.float32).eps * call.max_query_len**0.5)
    allowed = 2 * ((rounded - exact).abs().max() + eps * exact.abs().max())
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= allowed
    if expected.states is not None:
        assert states is not None
        scale = expected.states.nan_to_num().abs().max()
        allowed = 2 * ((narrow.states - expected.states).nan_to_num().abs().max() + eps * scale)
        torch.testing.assert_close(states, expected.states, rtol=0, atol=float(allowed), equal_nan=True)
