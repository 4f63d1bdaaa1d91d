"""The merge kernel, in Triton's interpreter, against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import reference
from tests.support.triton_ops import merge_states
from torch_core.base.errors import InvalidInput, Unsupported


def _states(seed: int, dtype: torch.dtype = torch.float32, tokens: int = 5, heads: int = 3, size: int = 24):
    generator = torch.Generator().manual_seed(seed)
    out_a, out_b = torch.randn(2, tokens, heads, size, generator=generator).to(dtype)
    lse_a, lse_b = torch.randn(2, tokens, heads, generator=generator) * 4
    return out_a, lse_a, out_b, lse_b


def _close(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    # A few roundings of the merged magnitude: two weights, two products, one sum, one store.
    eps = max(torch.finfo(dtype).eps, 4 * torch.finfo(torch.float32).eps)
    assert (found.double() - exact.double()).abs().max() <= 2 * eps * exact.double().abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_merge_is_within_rounding_of_float64(dtype, seed):
    states = _states(seed, dtype)
    out, lse = merge_states(*states)
    exact_out, exact_lse = reference.merge_states(*(tensor.double() for tensor in states))
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    _close(out, exact_out, dtype)
    _close(lse, exact_lse, torch.float32)


@pytest.mark.parametrize("nothing", [-math.inf, math.inf])
def test_an_empty_state_is_not_read_and_two_give_zero(nothing, seed):
    out_a, lse_a, out_b, lse_b = _states(seed)
    lse_a[0], out_a[0] = nothing, math.nan
    lse_b[1], out_b[1] = nothing, math.nan
    lse_a[2] = lse_b[2] = nothing
    out_a[2] = out_b[2] = math.nan
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[0], out_b[0])
    assert torch.equal(out[1], out_a[1])
    assert torch.equal(lse[0], lse_b[0])
    assert (out[2] == 0).all()
    assert (lse[2] == -math.inf).all()


def test_a_state_that_is_no_number_makes_the_result_none(seed):
    out_a, lse_a, out_b, lse_b = _states(seed)
    lse_a[:], lse_b[0] = math.nan, -math.inf
    for found in (merge_states(out_a, lse_a, out_b, lse_b), merge_states(out_b, lse_b, out_a, lse_a)):
        assert all(each.isnan().all() for each in found)


def test_states_far_apart_keep_the_larger(seed):
    out_a, lse_a, out_b, lse_b = _states(seed)
    lse_a += 1e4
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out, out_a)
    assert torch.equal(lse, lse_a)


def test_tokens_past_the_limit_have_no_first_state(seed):
    out_a, lse_a, out_b, lse_b = _states(seed)
    out_a[2:], lse_a[2:] = math.nan, math.nan
    out, lse = merge_states(out_a, lse_a, out_b, lse_b, num_tokens_a=2)
    assert torch.equal(out[2:], out_b[2:])
    assert torch.equal(lse[2:], lse_b[2:])
    exact, _ = reference.merge_states(out_a[:2], lse_a[:2], out_b[:2], lse_b[:2])
    _close(out[:2], exact, torch.float32)


def test_strided_states_are_read_and_written_where_they_lie(seed):
    out_a, lse_a, out_b, lse_b = _states(seed)
    exact, exact_lse = reference.merge_states(out_a, lse_a, out_b, lse_b)
    wide = torch.full((5, 3, 48), 7.0)
    lse_target = torch.empty(3, 5)
    out, lse = merge_states(
        torch.cat([out_a, out_b], -1)[..., :24],
        lse_a.T.contiguous().T,
        out_b.transpose(0, 1).contiguous().transpose(0, 1),
        lse_b,
        out=wide[..., :24],
        lse=lse_target.T,
    )
    _close(out, exact, torch.float32)
    _close(lse_target.T, exact_lse, torch.float32)
    assert lse.data_ptr() == lse_target.data_ptr()
    assert (wide[..., 24:] == 7.0).all()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_an_fp8_result_is_scaled_and_saturated(as_tensor, seed):
    states = _states(seed)
    states[0][0, 0, 0] = states[2][0, 0, 0] = 1e6
    scale = torch.tensor([0.05]) if as_tensor else 0.05
    out, _ = merge_states(*states, out_dtype=torch.float8_e4m3fn, out_scale=scale)
    exact, _ = reference.merge_states(*states)
    assert out.dtype == torch.float8_e4m3fn
    assert out[0, 0, 0].float() == 448.0
    expected = (exact / 0.05).clamp(-448, 448)
    # One e4m3 rounding: half a unit in the last of three fraction bits, or half the smallest subnormal.
    assert ((out.float() - expected).abs() <= (expected.abs() / 16).clamp(min=2**-10) * 1.001).all()


def test_no_tokens_give_empty_results():
    empty, lse = torch.zeros(0, 2, 8), torch.zeros(0, 2)
    out, merged = merge_states(empty, lse, empty, lse)
    assert out.shape == (0, 2, 8)
    assert merged.shape == (0, 2)


@pytest.mark.parametrize(
    ("index", "tensor", "message"),
    [
        (0, torch.zeros(2, 1, 4), r"out_b has shape \[2, 1, 8\]; .* with head_size = 4, that of out_a"),
        (1, torch.zeros(1, 2), r"lse_a has shape \[1, 2\]; .* with num_tokens = 2, that of out_a"),
        (3, torch.zeros(2, 1).half(), "lse_b is float16"),
        (2, torch.zeros(2, 8), r"out_b has shape \[2, 8\]; it must have 3 axes"),
        (0, torch.zeros(2, 1, 16)[..., ::2], "out_a has strides"),
    ],
)
def test_a_wrong_argument_is_named(index, tensor, message):
    states = [torch.zeros(2, 1, 8), torch.zeros(2, 1), torch.zeros(2, 1, 8), torch.zeros(2, 1)]
    states[index] = tensor
    with pytest.raises((InvalidInput, Unsupported), match=message):
        merge_states(*states)
