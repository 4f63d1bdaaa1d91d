"""The backward pass on CPU tensors, against autograd through the reference in float64."""

from __future__ import annotations

import pytest
import torch

from tests.support.attention_cases import dense_case
from tests.support.backward_cases import assert_gradients_match, backward_call, random_backward_case
from torch_core import ops


@pytest.mark.parametrize("seed", range(20))
def test_gradients_of_a_random_problem_are_as_exact_as_torch_in_its_dtype(seed: int) -> None:
    call = backward_call(random_backward_case(seed, 60), ops.run, with_d_lse=bool(seed % 2))
    assert_gradients_match(call, ops.run(call), f"case {seed}")


def test_a_call_of_no_queries_gives_keys_a_gradient_of_zero() -> None:
    call = backward_call(dense_case(0, key_lens=[3], query_lens=[0]), ops.run, with_d_lse=False)
    found = ops.run(call)
    assert found["d_query"].shape == (0, 6, 32)
    assert torch.equal(found["d_key"], torch.zeros(3, 2, 32))
