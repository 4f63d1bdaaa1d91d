"""The kernels of operations on rows, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.triton_ops import run_triton
from torch_core import reference
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.rowwise.call import RowLogSumExpCall, RowNormCall, RowProductCall, RowQuantizeCall

DTYPES = [torch.float32, torch.bfloat16]


def rows(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> None:
    eps = torch.finfo(found.dtype).eps
    assert ((found.double() - exact).abs() <= eps * exact.abs() + 64 * torch.finfo(torch.float32).eps * scale).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_exact_and_its_rows_do_not_depend_on_their_number(transposed, dtype, seed):
    x, kernel = rows(seed, 67, 72, dtype=dtype), rows(seed + 1, 72, 70, dtype=dtype)
    given = kernel.T.contiguous() if transposed else kernel
    call = RowProductCall(x=x, kernel=given, transposed=transposed)
    out = run_triton(call)["out"]
    exact = x.double() @ kernel.double()
    assert_rounded_once(out, exact, x.double().abs() @ kernel.double().abs())
    assert torch.equal(run_triton(replace(call, x=x[65:66]))["out"], out[65:66])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_type", ["rms_norm", "rms_norm_wide", "gemma_rms_norm", "layer_norm"])
def test_a_norm_is_that_of_float64(norm_type, dtype, seed):
    x, weight = rows(seed, 6, 40, dtype=dtype), rows(seed + 1, 2, 40, dtype=dtype)
    bias = rows(seed + 2, 2, 40, dtype=dtype) if norm_type == "layer_norm" else None
    out = run_triton(RowNormCall(x=x, weight=weight, bias=bias, epsilon=1e-5, norm_type=norm_type))["out"]
    wide = x.double().reshape(3, 2, 40)
    if norm_type == "layer_norm":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact = wide * (weight.double() + (norm_type == "gemma_rms_norm")) + (0 if bias is None else bias.double())
    # Rounding before the weight is one rounding more.
    bound = 2 * torch.finfo(dtype).eps * (exact.abs() + 1)
    assert ((out.double().reshape(exact.shape) - exact).abs() <= bound).all()


def test_a_log_sum_exp_takes_infinities_as_torch_does(seed):
    x = rows(seed, 4, 70) * 20
    x[0, 3:] = -torch.inf
    x[1] = -torch.inf
    x[2, 5] = torch.inf
    out = run_triton(RowLogSumExpCall(x=x))["out"]
    torch.testing.assert_close(out, x.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-6)


def unscaled_product(seed: int, num_rows: int, features: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Rows with their scales, and their product in float64; what is behind the rows must not be read."""
    x = rows(seed, 16, features, dtype=torch.bfloat16)
    x[num_rows:] = torch.nan
    row_scale, column_scale = rows(seed + 1, num_rows).abs(), rows(seed + 2, features).abs()
    exact = x[:num_rows].double() * row_scale.double()[:, None] * column_scale.double()
    return {"x": x, "row_scale": row_scale, "column_scale": column_scale}, exact


@pytest.mark.parametrize("norm_type", ["rms_norm", "rms_norm_wide", "gemma_rms_norm"])
def test_a_sum_and_its_norm_are_rounded_to_e4m3(norm_type, seed):
    residual, weight = (rows(seed + 3 + i, *shape, dtype=torch.bfloat16) for i, shape in enumerate(((5, 40), (40,))))
    given, product = unscaled_product(seed, 5, 40)
    options = {"residual": residual, "weight": weight, "epsilon": 1e-5, "norm_type": norm_type}
    found = run_triton(RowQuantizeCall(**given, **options))
    eps = torch.finfo(torch.bfloat16).eps
    assert ((found["stream"].double() - product - residual.double()).abs() <= eps * (product.abs() + 8)).all()
    wide = found["stream"].double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_e4m3(found, wide * (weight.double() + (norm_type == "gemma_rms_norm")), 5)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_rows_are_rounded_to_e4m3(activation, seed):
    given, product = unscaled_product(seed, 3, 80)
    gate, up = product.chunk(2, 1)
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    assert_e4m3(run_triton(RowQuantizeCall(**given, activation=activation)), act * up, 3)


def assert_e4m3(found: dict[str, torch.Tensor], exact: torch.Tensor, num_rows: int) -> None:
    """Half a step of e4m3 and three roundings to bfloat16 are allowed."""
    largest, share = exact.abs().amax(1, keepdim=True), 2.0**-4 + 3 * torch.finfo(torch.bfloat16).eps
    assert ((found["scale"].double()[:, None] * 448 / largest - 1).abs() <= share - 2.0**-4).all()
    values = found["values"][:num_rows].double() * found["scale"].double()[:, None]
    assert ((values - exact).abs() <= share * exact.abs() + largest * 2.0**-10 / 448).all()


def test_rows_become_the_e4m3_numbers_of_a_division(seed):
    x = rows(seed, 6, 70) * torch.logspace(-30, 30, 6)[:, None]
    x[4] = 0
    x[5, 3] = torch.inf
    found, expected = run_triton(RowQuantizeCall(x=x)), reference.row_quantize(RowQuantizeCall(x=x))
    assert torch.equal(found["scale"], expected["scale"])
    assert torch.equal(found["values"][:5].float(), expected["values"][:5].float())
    assert found["values"][5].float().isnan().any()


@pytest.mark.parametrize("window", [None, 21])
def test_attention_in_order_has_the_bits_of_a_prompt_in_a_decode_step(window, seed):
    length, block_size = 90, 8
    query, key, value = (rows(seed + i, length, heads, 16) for i, heads in enumerate((4, 2, 2)))
    options = {"batch_invariant": True, "scale": 0.25, "sliding_window": window}
    starts = torch.tensor([0, length], dtype=torch.int32)
    dense = DenseCall(
        query=query, key=key, value=value, query_start_loc=starts, key_start_loc=starts, max_query_len=length, **options
    )
    prompt = run_triton(dense)["out"]
    num_blocks = -(-length // block_size)
    cache = torch.full((num_blocks + 1, 2, block_size, 2, 16), torch.nan)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(num_blocks) + 1)
    places = torch.arange(length)
    for index, array in enumerate((key, value)):
        cache[order[places // block_size], index, places % block_size] = array
    ends = torch.tensor([length, 64, 65, 12], dtype=torch.int32)
    decode = PagedCall(
        query=query[ends.long() - 1],
        kv_cache=cache,
        block_tables=order.int().repeat(4, 1),
        seq_lens=ends,
        query_start_loc=torch.arange(5, dtype=torch.int32),
        max_query_len=1,
        **options,
    )
    assert torch.equal(run_triton(decode)["out"], prompt[ends.long() - 1])
