"""The specification of the backward pass, against finite differences."""

from __future__ import annotations

import pytest
import torch

from tests.support.backward_cases import backward_call, random_backward_case
from torch_core import reference
from torch_core.attention.backward_call import forward_of
from torch_core.attention.call import DenseCall


def _forward(call: DenseCall[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(("out", "lse"), reference.attention(call, compute_dtype=torch.float64), strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_gradients_are_those_of_finite_differences(seed: int) -> None:
    call = backward_call(random_backward_case(seed, 12), _forward, with_d_lse=True)
    assert call.d_lse is not None
    found = reference.attention_backward(call, compute_dtype=torch.float64)
    real = int(call.query_start_loc[-1])
    generator = torch.Generator().manual_seed(seed)
    for name, gradient in found.items():
        operand = name.removeprefix("d_")
        direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            moved = getattr(call, operand).double() + sign * 1e-6 * direction
            arrays = {x: getattr(call, x).double() for x in ("query", "key", "value")}
            results = _forward(forward_of(call).with_arrays({**arrays, operand: moved}))
            lse = results["lse"][:real]
            loss = (results["out"][:real] * call.d_out[:real]).sum()
            losses.append(loss + (lse.masked_fill(lse.isinf(), 0) * call.d_lse[:real]).sum())
        slope = (losses[0] - losses[1]).item() / 2e-6
        along = (gradient.double().nan_to_num(0) * direction).sum().item()
        assert along == pytest.approx(slope, rel=1e-4, abs=1e-4), name
