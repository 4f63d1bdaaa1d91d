"""Dropout on a CUDA device: random problems against the reference, and the same weights from torch and JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jattn.ops
from jattn.nn import attention_fn
from tests.ops.runner import keywords
from tests.support.attention_cases import AttentionCase, assert_matches_reference, with_dropout
from tests.support.backward_cases import assert_gradients_match, backward_call, wide_backward_case
from torch_core import ops

pytestmark = pytest.mark.gpu


def _case(seed: int) -> AttentionCase:
    return with_dropout(wide_backward_case(seed), 0.2)


# Every third seed compiles anew.
@pytest.mark.parametrize("seed", range(60))
def test_results_and_gradients_of_a_wide_random_problem_are_as_exact_as_torch_in_its_dtype(seed: int) -> None:
    case = _case(seed)
    assert_matches_reference(case, *(x.cpu() for x in case.run(ops.attention_with_lse, "cuda")))
    call = backward_call(case, ops.run, "cuda", with_d_lse=bool(seed // 3 % 2))
    found = {name: x.cpu() for name, x in ops.run(call).items()}
    assert_gradients_match(call.map(torch.Tensor.cpu), found, f"case {seed}")


@pytest.mark.parametrize("implementation", ["triton", "torch"])
def test_jax_drops_what_torch_drops(implementation: str) -> None:
    case = _case(3)
    arrays = {name: jnp.asarray(x) for name, x in {**case.operands, **case.options}.items() if name != "dropout_rate"}
    arguments: dict[str, Any] = {**arrays, **keywords(case.spec), **case.limits, "dropout_rate": 0.2}
    found = jattn.ops.attention(**arguments, implementation=implementation)
    expected = case.run(ops.attention, "cuda").cpu()
    assert np.array_equal(np.asarray(found).view(np.uint8), expected.view(torch.uint8).numpy())


@pytest.mark.parametrize("broadcast", [True, False])
def test_flaxs_dropout_is_the_kernels_by_default(broadcast: bool) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 70, 4, 64)), jnp.bfloat16) for _ in range(3))
    options: dict[str, Any] = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(1), "broadcast_dropout": broadcast}

    def loss(query: jax.Array, implementation: str | None) -> jax.Array:
        return attention_fn(query, key, value, **options, implementation=implementation).astype(jnp.float32).sum()

    default, named = (jax.grad(loss)(query, implementation) for implementation in (None, "triton"))
    assert (default == named).all()
    assert np.isfinite(named).all()
