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


#: Long sequences: the specification takes seconds, token by token.
on_long_sequences = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        pytest.param("xla", "float32", marks=pytest.mark.nightly),
        pytest.param("triton", "bfloat16", marks=pytest.mark.gpu),
    ],
)


def each_implementation(options: Sequence[dict[str, Any]]) -> pytest.MarkDecorator:
    """Parametrizes a test by implementation and options; Triton's cases need a GPU."""
    cases = [
        *(("xla", each) for each in options),
        # Its results are plain torch's.
        ("torch", options[0]),
        *(pytest.param("triton", each, marks=pytest.mark.gpu) for each in options),
    ]
    return pytest.mark.parametrize(("implementation", "options"), cases, ids=str)


def drawn_states(num_seqs: int, *shape: int, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """Draws states and slots: the second sequence has no slot, the fourth has one that it does not start from.

    The slot that is not read and slots of no sequence hold NaN.
    """
    slots, known = torch.randperm(num_seqs + 2)[:num_seqs].int(), torch.ones(num_seqs, dtype=torch.bool)
    if num_seqs > 3:
        slots[1], known[3] = -1, False
    held = torch.full((num_seqs + 2, *shape), torch.nan)
    read = slots[known & (slots >= 0)].long()
    held[read] = torch.randn(len(read), *shape)
    return {"states": held.to(getattr(torch, dtype)), "cache_indices": slots, "has_initial_state": known}


def drawn_backward(derivative: Any, call: Any) -> Any:
    """Draws the gradients of a call's results; those of sequences without a state are 0, those of padding NaN."""
    d_out = torch.randn(getattr(call, derivative.values_in).shape)
    d_out[int(call.query_start_loc[-1]) :] = torch.nan
    d_out = d_out.to(getattr(call, derivative.values_in).dtype)
    if call.states is None:
        return derivative.for_call(call, d_out=d_out)
    d_last = torch.randn(call.num_seqs, *call.states.shape[1:]).to(call.states.dtype)
    return derivative.for_call(call, d_out=d_out, d_last=d_last * (call.cache_indices >= 0)[:, None, None, None])


def assert_gradients_are_as_exact(
    reference: Callable[..., dict[str, torch.Tensor]], call: Any, found: dict[str, torch.Tensor]
) -> None:
    """Errors are at most twice those of the specification in float32 with operands that are rounded once more.

    Kernels multiply operands of the inputs' own type, and sums over tokens can cancel.

    Args:
        reference: the derivative's specification.
        call: the derivative's call.
        found: the gradients by name.
    """
    dtype = call.d_out.dtype
    exact, eps = reference(call), torch.finfo(dtype).eps
    moved = call.map(lambda x: x.float() * (1 + eps * (torch.rand(x.shape) - 0.5)) if x.dtype == dtype else x)
    narrow = reference(moved, compute_dtype=torch.float32)
    # Gradients of gates and of step sizes are sums over the tokens after them.
    eps = max(eps, torch.finfo(torch.float32).eps * call.max_query_len**0.5)
    assert set(found) == set(exact)
    for name, gradient in found.items():
        rounded = narrow[name].to(gradient.dtype).double()
        allowed = (rounded - exact[name]).abs().max() + eps * exact[name].abs().max()
        assert (gradient.double() - exact[name]).abs().max() <= 2 * allowed, name


def assert_is_the_slope(
    forward: Callable[..., torch.Tensor], reference: Callable[..., dict[str, torch.Tensor]], backward: Any, call: Any
) -> None:
    """Compares the derivative's specification along random directions with differences of the forward one, in float64.

    Args:
        forward: the op's specification.
        reference: the derivative's.
        backward: the derivative's call.
        call: the op's call, in float64.
    """
    found, step, ends = reference(backward), 1e-6, []
    names = [name for name in backward.differentiated if getattr(call, name) is not None]
    ways = {name: torch.randn_like(getattr(call, name)) for name in names}
    for sign in (1, -1):
        moved = call.map(torch.clone).with_arrays({k: getattr(call, k) + sign * step * ways[k] for k in names})
        total = (forward(moved) * backward.d_out).sum()
        kept = moved.cache_indices >= 0
        ends.append(total + (moved.states[moved.cache_indices.long()] * backward.d_last)[kept].sum())
    slope = sum((found[f"d_{name}"] * ways[name]).sum() for name in names)
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-6)


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
