"""8-bit keys and values that are read two at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.support.attention_cases import assert_matches_reference, paged_case
from tests.support.attention_plans import paged_plan
from tests.support.interpret import run_interpreted
from tests.support.triton_ops import paged_attention_with_lse
from torch_core.attention.kernels.split.pairs import widened
from torch_core.base.specs import ArraySpec

_ELEMENTS = {
    "float8_e4m3fn": (tl.float8e4nv, torch.float8_e4m3fn),
    "float8_e5m2": (tl.float8e5, torch.float8_e5m2),
    "int8": (tl.int8, torch.int8),
}
_ALL_PAIRS = 1 << 16


@triton.jit
def _widen_kernel(pairs_ptr, low_ptr, high_ptr, ELEMENT: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    low, high = widened(tl.load(pairs_ptr + i), ELEMENT)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(low_ptr + i, low)
    tl.store(high_ptr + i, high)


def _assert_widened(pairs: torch.Tensor, low: torch.Tensor, high: torch.Tensor, dtype: torch.dtype) -> None:
    exact = pairs.view(dtype).view(-1, 2).to(torch.float16)
    assert torch.equal(torch.nan_to_num(low, nan=7e4), torch.nan_to_num(exact[:, 0], nan=7e4))
    assert torch.equal(torch.nan_to_num(high, nan=7e4), torch.nan_to_num(exact[:, 1], nan=7e4))


@pytest.mark.parametrize("name", _ELEMENTS)
def test_each_pair_of_bytes_is_widened_exactly_in_the_interpreter(name):
    element, dtype = _ELEMENTS[name]
    pairs = torch.arange(256, dtype=torch.int32)
    pairs = (pairs | (255 - pairs) << 8).to(torch.int16)
    low, high = torch.empty(2, 256, dtype=torch.float16)
    run_interpreted(
        _widen_kernel, (1,), {"pairs_ptr": pairs, "low_ptr": low, "high_ptr": high, "ELEMENT": element, "N": 256}
    )
    _assert_widened(pairs, low, high, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", _ELEMENTS)
def test_each_pair_of_bytes_is_widened_exactly_on_the_device(name):
    element, dtype = _ELEMENTS[name]
    pairs = torch.arange(_ALL_PAIRS, device="cuda").to(torch.int16)
    low, high = torch.empty(2, _ALL_PAIRS, dtype=torch.float16, device="cuda")
    kernel: Any = _widen_kernel
    kernel[(_ALL_PAIRS // 1024,)](pairs, low, high, element, 1024)
    _assert_widened(pairs, low, high, dtype)


@pytest.mark.parametrize("cache_dtype", _ELEMENTS)
@pytest.mark.parametrize("query_lens", [[1, 1], [3, 1]])
def test_decode_over_pairs_matches_the_reference(cache_dtype, query_lens, seed):
    case = paged_case(
        seed, seq_lens=[150, 33], query_lens=query_lens, num_heads=4, num_kv_heads=2, head_size=40, dtype="bfloat16",
        cache_dtype=cache_dtype, k_scale=0.025 if cache_dtype == "int8" else 0.7, v_scale=0.5,
    )  # fmt: skip
    out, lse = case.run(paged_attention_with_lse)
    assert_matches_reference(case, out, lse)


def _reads_pairs(head_size: int = 128, strides: tuple[int, ...] | None = None, **changes: Any) -> bool:
    arguments: dict[str, Any] = {
        "kv_cache": ArraySpec((64, 2, 16, 2, head_size), "float8_e4m3fn", strides),
        "block_tables": ArraySpec((4, 64), "int32"),
        **changes,
    }
    plan = paged_plan(head_size=head_size, **arguments)
    return dict(plan.launches[0].constexprs)["PAIRS"]


def test_pairs_are_read_from_8_bit_caches():
    assert _reads_pairs()
    assert _reads_pairs(80)
    assert _reads_pairs(kv_cache=ArraySpec((64, 2, 16, 2, 128), "int8"))
    assert not _reads_pairs(kv_cache=ArraySpec((64, 2, 16, 2, 128), "bfloat16"))


def test_pairs_are_not_read_where_a_row_may_start_between_two_of_them():
    assert not _reads_pairs(75)
    assert not _reads_pairs(74, strides=(16 * 2 * 2 * 75, 16 * 2 * 75, 2 * 75, 75, 1))
    assert not _reads_pairs(kv_cache=ArraySpec((64, 2, 16, 2, 128), "float8_e4m3fn", None, False))


def test_pairs_are_not_read_into_operands_that_gain_nothing():
    assert not _reads_pairs(16)
    assert not _reads_pairs(query=ArraySpec((4, 8, 128), "float32"))
    assert not _reads_pairs(query=ArraySpec((64, 8, 128), "bfloat16"), max_query_len=16)
