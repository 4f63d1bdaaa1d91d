"""The backward kernels on a CUDA device: 300 random problems, bits, and JAX beside torch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jattn.ops
from jattn.bridge import to_jax
from tests.ops.runner import keywords
from tests.support.backward_cases import assert_poisoned_match, backward_call, poisoned, wide_backward_case
from torch_core import ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(300))
def test_gradients_of_a_wide_random_problem_are_as_exact_as_torch_in_its_dtype(seed: int) -> None:
    case = wide_backward_case(seed)
    call = backward_call(poisoned(case), ops.run, "cuda", with_d_lse=bool(seed // 3 % 2))
    assert_poisoned_match(case, call, ops.run(call))


@pytest.mark.parametrize("seed", range(6))
def test_gradients_have_the_same_bits_every_time(seed: int) -> None:
    call = backward_call(wide_backward_case(seed), ops.run, "cuda", with_d_lse=False)
    first = ops.run(call)
    for _ in range(5):
        again = ops.run(call)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_in_jax_has_the_bits_of_torch(seed: int, implementation: str) -> None:
    case = wide_backward_case(seed)
    call = backward_call(case, ops.run, "cuda", with_d_lse=True)
    expected = ops.run(call)
    arrays = {name: jnp.asarray(x) for name, x in {**case.operands, **case.options}.items()}

    def attend(inputs: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        arguments: dict[str, Any] = {**arrays, **inputs, **keywords(case.spec), **case.limits}
        return jattn.ops.attention_with_lse(**arguments, implementation=implementation)

    assert call.d_lse is not None
    _, pull = jax.vjp(attend, {name.removeprefix("d_"): arrays[name.removeprefix("d_")] for name in expected})
    (found,) = pull((to_jax(call.d_out), to_jax(call.d_lse)))
    for name, gradient in expected.items():
        bits = np.asarray(found[name.removeprefix("d_")]).view(np.uint8)
        assert np.array_equal(bits, gradient.cpu().view(torch.uint8).numpy()), name
