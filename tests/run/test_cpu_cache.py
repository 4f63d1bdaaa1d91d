"""Cache writes, block copies and merges on the CPU against the reference, to the bit where nothing is rounded twice."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support import reference
from tests.support.attention_cases import DTYPES, assert_as_exact, to_torch
from torch_core import ops
from torch_core.base.specs import PAD_SLOT_ID

BLOCKS, BLOCK_SIZE, HEADS = 5, 4, 2


def cache_pair(dtype: str, head_size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Two equal caches full of arbitrary bits."""
    shape = (BLOCKS, 2, BLOCK_SIZE, HEADS, head_size)
    cache = to_torch(np.random.default_rng(0).uniform(-3, 3, shape).astype(DTYPES[dtype]))
    return cache, cache.clone()


def tokens(num: int, dtype: torch.dtype, seed: int, head_size: int = 8) -> torch.Tensor:
    return (torch.randn(num, HEADS, head_size, generator=torch.Generator().manual_seed(seed)) * 200).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("cache_dtype", list(DTYPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k_scale", "v_scale"), [(None, None), (0.7, torch.tensor([1.9]))])
@pytest.mark.parametrize("slots", [[5], [19, -1, 4, 7], [-1, -1]])
def test_a_write_stores_the_bits_of_the_reference(cache_dtype, dtype, k_scale, v_scale, slots):
    ours, theirs = cache_pair(cache_dtype)
    key, value = tokens(4, dtype, 1), tokens(4, dtype, 2)
    arguments = (torch.tensor(slots, dtype=torch.int32),)
    ops.write_kv_cache(key, value, ours, *arguments, k_scale=k_scale, v_scale=v_scale)
    reference.write_kv_cache(key, value, theirs, *arguments, k_scale=k_scale, v_scale=v_scale)
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_scales_per_token_and_head_are_those_of_the_reference(cache_dtype):
    ours, theirs = cache_pair(cache_dtype)
    scales = torch.zeros(2, 2, BLOCKS, BLOCK_SIZE, HEADS)
    slots = torch.tensor([19, PAD_SLOT_ID, 4], dtype=torch.int32)
    key, value = tokens(3, torch.bfloat16, 1), tokens(3, torch.bfloat16, 2)
    value[2, 1] = 0
    ops.write_kv_cache(key, value, ours, slots, k_scale_cache=scales[0, 0], v_scale_cache=scales[0, 1])
    reference.write_kv_cache(key, value, theirs, slots, k_scale_cache=scales[1, 0], v_scale_cache=scales[1, 1])
    assert same_bits(ours, theirs)
    assert torch.equal(scales[0], scales[1])


@pytest.mark.parametrize("cache_dtype", ["float32", "float8_e4m3fn"])
def test_codes_of_the_cache_are_stored_as_they_are(cache_dtype):
    ours, theirs = cache_pair(cache_dtype)
    codes = tokens(1, ours.dtype, 1)
    slots = torch.tensor([6], dtype=torch.int32)
    ops.write_kv_cache(codes, codes, ours, slots)
    reference.write_kv_cache(codes, codes, theirs, slots)
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2"])
def test_a_cache_may_be_a_strided_view_or_a_pair(dtype):
    (wide, theirs), slots = cache_pair(dtype, head_size=8), torch.tensor([6, 0, -1, 19], dtype=torch.int32)
    ours = torch.cat([wide, wide], dim=-1)[..., 8:]
    key, value = tokens(4, torch.float32, 1), tokens(4, torch.float32, 2)
    reference.write_kv_cache(key, value, theirs, slots)
    ops.write_kv_cache(key, value, ours, slots)
    assert same_bits(ours, theirs)
    ops.write_kv_cache(key, value, (wide[:, 0], wide[:, 1]), slots)
    assert same_bits(wide, theirs)


def test_key_and_value_may_be_views_of_one_projection():
    (ours, theirs), slots = cache_pair("float32"), torch.tensor([6, 1], dtype=torch.int32)
    projected = torch.randn(2, 3 * HEADS * 8).view(2, 3 * HEADS, 8)
    key, value = projected[:, HEADS : 2 * HEADS], projected[:, 2 * HEADS :]
    ops.write_kv_cache(key, value, ours, slots)
    reference.write_kv_cache(key, value, theirs, slots)
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_copied_blocks_are_those_of_the_reference(dtype):
    ours, theirs = cache_pair(dtype)
    scales = torch.rand(BLOCKS, BLOCK_SIZE, HEADS)
    expected = scales.clone()
    pairs = torch.tensor([[1, 3], [-1, -1], [2, 4], [1, 1]], dtype=torch.int32)
    ops.copy_blocks([ours, scales], pairs)
    reference.copy_blocks([theirs, expected], pairs)
    assert same_bits(ours, theirs)
    assert torch.equal(scales, expected)


def test_one_cache_needs_no_list_and_no_pairs_copy_nothing():
    ours, theirs = cache_pair("float32")
    ops.copy_blocks(ours, torch.empty(0, 2, dtype=torch.int32))
    assert same_bits(ours, theirs)
    ops.copy_blocks(ours, torch.tensor([[1, 3]], dtype=torch.int32))
    assert torch.equal(ours[3], theirs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merged_states_match_the_reference(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(2, 20, 3, 8, generator=generator).to(dtype)
    lses = torch.randn(2, 20, 3, generator=generator) * 10
    lses[0, :3], lses[1, 2:5], lses[0, 6] = -math.inf, -math.inf, math.inf
    outs[0, :3], outs[1, 2:5] = math.nan, math.nan
    out, lse = ops.merge_states(outs[0], lses[0], outs[1], lses[1])
    exact, exact_lse = reference.merge_states(outs[0].double(), lses[0].double(), outs[1].double(), lses[1].double())
    same, same_lse = reference.merge_states(outs[0], lses[0], outs[1], lses[1])
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert_as_exact(out, exact, same, dtype)
    assert_as_exact(lse, exact_lse, same_lse, torch.float32)
    assert out[2].count_nonzero() == 0


def test_an_empty_state_leaves_the_other_bit_for_bit():
    out, lse = torch.randn(4, 2, 8), torch.randn(4, 2)
    empty = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for merged_out, merged_lse in (ops.merge_states(out, lse, *empty), ops.merge_states(*empty, out, lse)):
        assert torch.equal(merged_out, out)
        assert torch.equal(merged_lse, lse)
