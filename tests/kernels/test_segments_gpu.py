"""Segments of packed rows on a CUDA device: random problems, the bits of offsets, and JAX next to torch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jattn
from jattn.bridge import to_jax
from tests.ops.runner import keywords
from tests.support.attention_cases import AttentionCase
from tests.support.segment_cases import assert_padded_match, padded, padded_backward, random_segment_case, segment_case
from torch_core import ops
from torch_core.base.specs import AttentionSpec

pytestmark = pytest.mark.gpu

ROWS = [[-60, 700, 300, -25, 900, -63], [2048], [1, 1200, 500, 300, -47]]
SIZES: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "max_segments": 8}


@pytest.mark.parametrize("seed", range(40))
def test_results_and_gradients_of_a_random_problem_are_as_exact_as_torch(seed: int) -> None:
    case = random_segment_case(seed, longest=300)
    call = padded_backward(case, ops.run, "cuda")
    assert_padded_match(case, call, ops.run(call))


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_hopper_kernels_serve_packed_rows(head_size: int, seed: int) -> None:
    spec = AttentionSpec(scale=head_size**-0.5, window_left=600)
    case = segment_case(seed, ROWS, **{**SIZES, "head_size": head_size}, spec=spec)
    call = padded_backward(case, ops.run, "cuda")
    assert_padded_match(case, call, ops.run(call))


def _offsets(case: AttentionCase) -> torch.Tensor:
    ids, rows = case.options["segment_ids"], np.repeat(np.arange(3), [sum(map(abs, row)) for row in ROWS])
    first = np.flatnonzero(np.diff(ids, prepend=99) | np.diff(rows, prepend=0))
    return torch.tensor([*first, len(ids)]).int().cuda()


def test_segments_have_the_bits_of_the_same_offsets(seed: int) -> None:
    case = segment_case(seed, ROWS, **SIZES)
    starts = _offsets(case)
    plain = {"segment_ids": None, "max_segments": None, "query_start_loc": starts, "key_start_loc": starts}
    real = torch.from_numpy(case.options["segment_ids"] > 0)
    out, lse = padded(case).run(ops.attention_with_lse, "cuda")
    expected, expected_lse = case.run(ops.attention_with_lse, "cuda", **plain)
    assert torch.equal(out[real], expected[real])
    assert torch.equal(lse[real], expected_lse[real])


@pytest.mark.parametrize("implementation", ["triton", "torch"])
def test_results_and_gradients_in_jax_have_the_bits_of_torch(implementation: str, seed: int) -> None:
    case = segment_case(2 * seed, ROWS, **SIZES)
    call = padded_backward(case, ops.run, "cuda")
    expected = ops.run(call)
    operands = {name: jnp.asarray(x) for name, x in padded(case).operands.items()}
    ids = jnp.asarray(case.options["segment_ids"])

    @jax.jit
    def both(inputs: dict[str, jax.Array], d_out: jax.Array) -> Any:
        def attend(inputs: dict[str, jax.Array]) -> jax.Array:
            options: dict[str, Any] = {**operands, **inputs, **keywords(case.spec), **case.limits, "max_segments": 8}
            return jattn.attention(**options, segment_ids=ids, implementation=implementation)

        out, pull = jax.vjp(attend, inputs)
        return out, pull(d_out)[0]

    out, gradients = both({name: operands[name] for name in ("query", "key", "value")}, to_jax(call.d_out))
    assert call.out is not None
    found = {"out": out, **{f"d_{name}": x for name, x in gradients.items()}}
    for name, array in {"out": call.out, **expected}.items():
        bits = np.asarray(found[name]).view(np.uint8)
        assert np.array_equal(bits, array.cpu().view(torch.uint8).numpy()), name


def test_segments_that_do_not_fit_are_nan(seed: int) -> None:
    case = segment_case(seed, ROWS, **SIZES)
    real = torch.from_numpy(case.options["segment_ids"] > 0)
    for changes in ({"max_segments": 1}, {"max_segment_len": 1000}):
        assert case.run(ops.attention, "cuda", **changes)[real].isnan().all()
