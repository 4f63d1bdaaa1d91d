"""The backward kernels in Triton's interpreter, against autograd through the reference in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.attention_cases import AttentionCase, dense_case
from tests.support.backward_cases import assert_gradients_match, backward_call, random_backward_case
from tests.support.triton_ops import run_triton
from torch_core import ops
from torch_core.base.specs import AttentionSpec


def _check(case: AttentionCase, *, with_d_lse: bool = False) -> None:
    call = backward_call(case, ops.run, with_d_lse=with_d_lse)
    assert_gradients_match(call, run_triton(call), f"case {case.seed}")


# Those of the first that have few heads: the interpreter takes its time.
@pytest.mark.parametrize("seed", [3, 7, 8, 9, 16, 18, 27, 31, 53, 54])
def test_gradients_of_a_random_problem_are_as_exact_as_torch_in_its_dtype(seed: int) -> None:
    _check(random_backward_case(seed, 14), with_d_lse=bool(seed % 2))


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(scale=0.25, window_left=40),
        AttentionSpec(scale=-0.25, causal=False, window_left=70, window_right=9),
        AttentionSpec(scale=0.25, attention_chunk=96, logits_soft_cap=3.0),
    ],
    ids=["window", "two-sided window and a negative scale", "chunks and a soft cap"],
)
def test_long_sequences_walk_edge_and_body_tiles(spec: AttentionSpec, seed: int) -> None:
    slopes = np.array([0.1, 0.03], np.float32)
    _check(
        dense_case(
            seed,
            key_lens=[210, 5],
            query_lens=[150, 9],
            num_heads=2,
            num_kv_heads=1,
            head_size=16,
            value_head_size=24,
            spec=spec,
            alibi_slopes=slopes,
            sinks=slopes,
        )
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_heads_of_512_are_as_exact_as_of_smaller_ones(dtype: str, seed: int) -> None:
    _check(
        dense_case(seed, key_lens=[37, 5], query_lens=[20, 5], num_heads=2, num_kv_heads=1, head_size=512, dtype=dtype)
    )


def test_padding_gets_a_gradient_of_zero(seed: int) -> None:
    case = dense_case(seed, key_lens=[5, 0], query_lens=[3, 0], padding_tokens=4)
    found = run_triton(backward_call(case, ops.run, with_d_lse=True))
    assert not found["d_query"][3:].any()
    assert not found["d_key"][5:].any()
    assert not found["d_value"][5:].any()


@pytest.mark.parametrize("spec", [AttentionSpec(scale=0.3, window_left=2), AttentionSpec(scale=0.3, attention_chunk=8)])
def test_keys_that_no_query_sees_may_hold_nan_and_get_a_gradient_of_zero(spec: AttentionSpec, seed: int) -> None:
    case = dense_case(seed, key_lens=[19], query_lens=[2], head_size=16, spec=spec)
    expected = run_triton(backward_call(case, ops.run, with_d_lse=True))
    for name in ("key", "value"):
        case.operands[name][:15] = np.nan
    call = backward_call(case, ops.run, with_d_lse=True)
    for found in (run_triton(call), ops.run(call)):
        assert not any(found[name][:15].any() for name in ("d_key", "d_value"))
        assert torch.allclose(found["d_key"], expected["d_key"], atol=1e-6)
        assert torch.allclose(found["d_query"], expected["d_query"], atol=1e-6)


def test_queries_without_a_key_get_a_gradient_of_zero(seed: int) -> None:
    case = dense_case(seed, key_lens=[0, 4], query_lens=[3, 9])
    found = run_triton(backward_call(case, ops.run, with_d_lse=True))
    assert not found["d_query"][:8].any()
    assert found["d_query"][9:].any()


def test_strided_inputs_give_the_gradients_of_contiguous_ones(seed: int) -> None:
    call = backward_call(dense_case(seed, key_lens=[7], query_lens=[7], head_size=16), ops.run, with_d_lse=False)
    wide = {name: torch.full((*x.shape[:2], 40), torch.nan) for name, x in call.arrays().items() if x.dim() == 3}
    strided = {name: x[..., 8:24].copy_(getattr(call, name)) for name, x in wide.items()}
    expected, found = run_triton(call), run_triton(call.with_arrays(strided))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
