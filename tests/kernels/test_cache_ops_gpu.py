"""The cache kernels and the merge on a CUDA device, against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import reference
from tests.support.triton_ops import copy_blocks, merge_states, write_kv_cache

pytestmark = pytest.mark.gpu
QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def _case(seed: int, dtype: torch.dtype, cache_dtype: torch.dtype, heads: int, size: int, tokens: int, block_size: int):
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-tokens // block_size) + 2
    key = torch.randn(tokens, heads, size, generator=generator).mul(3).to(dtype)
    value = torch.randn(tokens, heads, size, generator=generator).mul(300).to(dtype)
    cache = torch.randn(num_blocks, 2, block_size, heads, size, generator=generator).mul(9).to(cache_dtype)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens].to(torch.int32)
    slots[tokens // 2] = -1
    return key, value, cache, slots


def _assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("heads", "size", "block_size"), [(8, 128, 16), (1, 80, 1), (5, 96, 32), (2, 256, 256), (2, 512, 16), (3, 7, 5)]
)
@pytest.mark.parametrize("tokens", [1, 700])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.float32, *QUANTIZED])
def test_a_write_stores_the_bits_of_the_reference(heads, size, block_size, tokens, cache_dtype, seed):
    scaled = cache_dtype in QUANTIZED
    dtype = torch.bfloat16 if scaled else cache_dtype
    key, value, cache, slots = _case(seed, dtype, cache_dtype, heads, size, tokens, block_size)
    scales = {"k_scale": torch.tensor([0.37]), "v_scale": torch.tensor([0.9])} if scaled else {}
    found = cache.cuda()
    on_device = {name: scale.cuda() for name, scale in scales.items()}
    write_kv_cache(key.cuda(), value.cuda(), found, slots.cuda(), **on_device)
    reference.write_kv_cache(key, value, cache, slots, **scales)
    _assert_same_bits(found, cache)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("size", [128, 80])
def test_a_write_per_token_and_head_stores_the_bits_of_the_reference(cache_dtype, size, seed):
    key, value, cache, slots = _case(seed, torch.bfloat16, cache_dtype, 4, size, 300, 16)
    scales = torch.zeros(2, cache.shape[0], 16, 4)
    found, found_scales = cache.cuda(), scales.cuda()
    write_kv_cache(
        key.cuda(), value.cuda(), found, slots.cuda(), k_scale_cache=found_scales[0], v_scale_cache=found_scales[1]
    )
    reference.write_kv_cache(key, value, cache, slots, k_scale_cache=scales[0], v_scale_cache=scales[1])
    _assert_same_bits(found_scales, scales)
    _assert_same_bits(found, cache)


def test_an_unaligned_key_and_a_strided_cache_are_written(seed):
    key, value, cache, slots = _case(seed, torch.bfloat16, torch.bfloat16, 4, 64, 40, 16)
    packed = torch.zeros(40, 4 * 64 + 1, dtype=torch.bfloat16, device="cuda")
    packed[:, 1:] = key.reshape(40, -1)
    stored = torch.zeros(cache.shape[0], 4, 16, 128, dtype=torch.bfloat16, device="cuda")
    found = stored.as_strided(cache.shape, (stored.stride(0), 64, 128, 16 * 128, 1))
    write_kv_cache(packed[:, 1:].unflatten(1, (4, 64)), value.cuda(), found, slots.cuda())
    cache.zero_()
    reference.write_kv_cache(key, value, cache, slots)
    _assert_same_bits(found.contiguous(), cache)


def test_a_pool_beyond_two_to_the_31_elements_is_written_and_copied_at_its_top():
    row = 2 * 16 * 8 * 128
    num_blocks = 2**31 // row + 8
    cache = torch.zeros(num_blocks, 2, 16, 8, 128, dtype=torch.float8_e4m3fn, device="cuda")
    key = torch.ones(2, 8, 128, dtype=torch.bfloat16, device="cuda")
    top = num_blocks * 16 - 1
    write_kv_cache(key, -key, cache, torch.tensor([top, 16], dtype=torch.int32, device="cuda"))
    assert (cache[-1, 0, -1].float() == 1).all()
    assert (cache[-1, 1, -1].float() == -1).all()
    copy_blocks(cache, torch.tensor([[num_blocks - 1, num_blocks - 2]], dtype=torch.int32, device="cuda"))
    assert (cache[-2, 1, -1].float() == -1).all()
    assert cache.view(torch.uint8).count_nonzero() == 5 * 8 * 128 + 8 * 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_blocks_are_copied_bit_for_bit(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randint(-120, 120, (9, 2, 16, 8, 128), generator=generator, dtype=torch.int8).to(dtype)
    pairs = torch.tensor([[1, 8], [0, 2], [-1, -1], [1, 3]], dtype=torch.int32)
    found = [cache.cuda(), cache.cuda().transpose(2, 3).contiguous().transpose(2, 3)]
    copy_blocks(found, pairs.cuda())
    reference.copy_blocks(cache, pairs)
    for array in found:
        _assert_same_bits(array.contiguous(), cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [128, 80, 256])
def test_a_merge_is_within_rounding_of_float64(dtype, size, seed):
    generator = torch.Generator().manual_seed(seed)
    out_a, out_b = torch.randn(2, 333, 8, size, generator=generator).to(dtype)
    lse_a, lse_b = torch.randn(2, 333, 8, generator=generator) * 4
    lse_a[0], out_a[0] = math.inf, math.nan
    lse_a[1] = lse_b[1] = -math.inf
    states = (out_a, lse_a, out_b, lse_b)
    out, lse = merge_states(*(tensor.cuda() for tensor in states))
    exact, exact_lse = reference.merge_states(*(tensor.double() for tensor in states))
    eps = max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps)
    assert (out.cpu().double() - exact).abs().max() <= 2 * eps * exact.abs().max()
    assert torch.equal(lse[1].cpu().double(), exact_lse[1])
    live = exact_lse.isfinite()
    error = (lse.cpu().double()[live] - exact_lse[live]).abs().max()
    assert error <= 16 * torch.finfo(torch.float32).eps * exact_lse[live].abs().max()


def test_writes_are_captured_in_a_graph_and_follow_new_slots(seed):
    key, value, cache, slots = _case(seed, torch.bfloat16, torch.bfloat16, 8, 128, 64, 16)
    found, on_device = cache.cuda(), slots.cuda()
    arguments = (key.cuda(), value.cuda(), found, on_device)
    write_kv_cache(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_kv_cache(*arguments)
    found.copy_(cache)
    shuffled = slots.flip(0).contiguous()
    on_device.copy_(shuffled)
    graph.replay()
    reference.write_kv_cache(key, value, cache, shuffled)
    _assert_same_bits(found, cache)
