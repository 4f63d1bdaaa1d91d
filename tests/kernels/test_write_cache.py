"""The cache write kernels, in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.support import reference
from tests.support.triton_ops import write_kv_cache
from torch_core.base.errors import InvalidInput, Unsupported

NUM_BLOCKS, BLOCK_SIZE = 5, 4


def _case(seed: int, dtype: torch.dtype, cache_dtype: torch.dtype, heads: int = 2, size: int = 16, tokens: int = 7):
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(tokens + 1, heads, size, generator=generator).to(dtype)
    value = torch.randn(tokens + 1, heads, size, generator=generator).to(dtype)
    cache = torch.randn(NUM_BLOCKS, 2, BLOCK_SIZE, heads, size, generator=generator).mul(9).to(cache_dtype)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:tokens].to(torch.int32)
    slots[2] = -1
    return key, value, cache, slots


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e5m2),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
    ],
)
def test_a_write_changes_the_mapped_slots_only(dtype, cache_dtype, seed):
    key, value, cache, slots = _case(seed, dtype, cache_dtype)
    expected = cache.clone()
    reference.write_kv_cache(key, value, expected, slots)
    write_kv_cache(key, value, cache, slots)
    torch.testing.assert_close(_bits(cache), _bits(expected), rtol=0, atol=0)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_scaled_write_divides_and_saturates(cache_dtype, as_tensor, seed):
    key, value, cache, slots = _case(seed, torch.bfloat16, cache_dtype)
    key[0] *= 1e5
    value[1] *= -1e5
    k_scale, v_scale = (torch.tensor([0.37]), torch.tensor([0.021])) if as_tensor else (0.37, 0.021)
    expected = cache.clone()
    reference.write_kv_cache(key, value, expected, slots, k_scale=k_scale, v_scale=v_scale)
    write_kv_cache(key, value, cache, slots, k_scale=k_scale, v_scale=v_scale)
    torch.testing.assert_close(_bits(cache), _bits(expected), rtol=0, atol=0)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [16, 24])
def test_a_write_per_token_and_head_stores_its_own_scales(cache_dtype, size, seed):
    key, value, cache, slots = _case(seed, torch.bfloat16, cache_dtype, heads=3, size=size)
    key[1, 2] = 0
    scales = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, 3), 7.0)
    expected, expected_scales = cache.clone(), scales.clone()
    reference.write_kv_cache(
        key, value, expected, slots, k_scale_cache=expected_scales[0], v_scale_cache=expected_scales[1]
    )
    write_kv_cache(key, value, cache, slots, k_scale_cache=scales[0], v_scale_cache=scales[1])
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0)
    torch.testing.assert_close(_bits(cache), _bits(expected), rtol=0, atol=0)


def test_a_write_follows_the_strides_of_its_arguments(seed):
    key, value, cache, slots = _case(seed, torch.float32, torch.float32, heads=3, size=20)
    # vLLM 0.33's layout: keys and values of a head side by side, heads before tokens.
    stored = torch.zeros(NUM_BLOCKS, 3, BLOCK_SIZE, 40)
    strided = stored.as_strided(cache.shape, (stored.stride(0), 20, 40, BLOCK_SIZE * 40, 1))
    packed = torch.cat([key, value], dim=-1)
    expected = torch.zeros_like(cache)
    reference.write_kv_cache(key, value, expected, slots)
    write_kv_cache(packed[..., :20], packed[..., 20:], strided, slots)
    torch.testing.assert_close(strided.contiguous(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("per_token_head", [False, True])
def test_a_pair_of_caches_may_differ_in_head_size(per_token_head, seed):
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(3, 2, 24, generator=generator), torch.randn(3, 2, 16, generator=generator)
    dtype = torch.int8 if per_token_head else torch.float32
    caches = (torch.zeros(3, 4, 2, 24, dtype=dtype), torch.zeros(3, 4, 2, 16, dtype=dtype))
    scales = {name: torch.zeros(3, 4, 2) for name in ("k_scale_cache", "v_scale_cache")} if per_token_head else {}
    expected = (caches[0].clone(), caches[1].clone())
    expected_scales = {name: scale.clone() for name, scale in scales.items()}
    slots = torch.tensor([11, -1, 0], dtype=torch.int32)
    reference.write_kv_cache(key, value, expected, slots, **expected_scales)
    write_kv_cache(key, value, caches, slots, **scales)
    for found, wanted in zip((*caches, *scales.values()), (*expected, *expected_scales.values()), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_many_tokens_take_several_programs_and_a_wide_row_several_columns(seed):
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, 600, 1, 8, generator=generator)
    cache = torch.zeros(160, 2, 4, 1, 8)
    slots = torch.randperm(640, generator=generator)[:600].to(torch.int32)
    expected = cache.clone()
    reference.write_kv_cache(key, value, expected, slots)
    write_kv_cache(key, value, cache, slots)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0)
    key, value = torch.randn(2, 2, 24, 112, generator=generator)
    cache = torch.zeros(2, 2, 1, 24, 112)
    slots = torch.tensor([1, 0], dtype=torch.int32)
    write_kv_cache(key, value, cache, slots)
    torch.testing.assert_close(cache[:, 0, 0], key.flip(0), rtol=0, atol=0)
    torch.testing.assert_close(cache[:, 1, 0], value.flip(0), rtol=0, atol=0)


def test_a_slot_beyond_the_cache_writes_nothing(seed):
    key, value, cache, slots = _case(seed, torch.float32, torch.float32)
    guarded = torch.full((NUM_BLOCKS + 1, *cache.shape[1:]), 5.0)
    slots[:] = NUM_BLOCKS * BLOCK_SIZE
    write_kv_cache(key, value, guarded[:NUM_BLOCKS], slots)
    assert (guarded == 5.0).all()


def test_a_nan_stays_a_nan_in_an_fp8_cache(seed):
    key, value, cache, slots = _case(seed, torch.float32, torch.float8_e4m3fn)
    key[:] = torch.nan
    write_kv_cache(key, value, cache, slots)
    block, offset = divmod(int(slots[0]), BLOCK_SIZE)
    assert cache[block, 0, offset].float().isnan().all()


def test_no_tokens_are_no_launch():
    cache = torch.zeros(1, 2, 4, 1, 8)
    write_kv_cache(torch.zeros(0, 1, 8), torch.zeros(0, 1, 8), cache, torch.zeros(0, dtype=torch.int32))
    assert (cache == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": torch.zeros(2, 1, 4)}, InvalidInput, r"kv_cache has shape .* with head_size = 4, that of key"),
        ({"value": torch.zeros(1, 1, 8)}, InvalidInput, "slot_mapping has 2 entries and value 1 tokens"),
        ({"slot_mapping": torch.zeros(2)}, InvalidInput, "slot_mapping is float32; it must be int32"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int32)[::2]}, Unsupported, "slot_mapping has strides"),
        (
            {"kv_cache": (torch.zeros(1, 4, 1, 8), torch.zeros(1, 5, 1, 8))},
            InvalidInput,
            r"value_cache has shape \[1, 5, 1, 8\]; .* with block_size = 4, that of key_cache",
        ),
        ({"kv_cache": torch.zeros(1, 3, 4, 1, 8)}, InvalidInput, r"kv_cache has shape \[1, 3, 4, 1, 8\]"),
        ({"kv_cache": torch.zeros(1, 2, 4, 1, 16)[..., ::2]}, Unsupported, "and not a last stride of 1"),
        ({"key": torch.zeros(2, 1, 8, dtype=torch.int8)}, InvalidInput, "key is int8 and the cache float32"),
        ({"k_scale": torch.ones(2)}, InvalidInput, r"k_scale has shape \[2\]; it must be a number or one element"),
        ({"k_scale_cache": torch.ones(1, 4, 1)}, InvalidInput, "k_scale_cache and v_scale_cache go together"),
        (
            {"k_scale_cache": torch.ones(1, 4, 1), "v_scale_cache": torch.ones(1, 4, 1)},
            Unsupported,
            "the cache is float32; scales per token and head need int8 or fp8",
        ),
        (
            {"k_scale_cache": torch.ones(1, 4, 1), "v_scale_cache": torch.ones(1, 4, 1), "k_scale": 2.0},
            InvalidInput,
            "given beside k_scale_cache and v_scale_cache; pass one kind",
        ),
    ],
)
def test_a_wrong_argument_is_named(change, error, message):
    arguments = {
        "key": torch.zeros(2, 1, 8),
        "value": torch.zeros(2, 1, 8),
        "kv_cache": torch.zeros(1, 2, 4, 1, 8),
        "slot_mapping": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(error, match=message):
        write_kv_cache(**{**arguments, **change})


@pytest.mark.parametrize(
    ("scales", "key_dtype", "message"),
    [
        (torch.ones(1, 4, 2), torch.float32, r"k_scale_cache has shape \[1, 4, 2\]; .* with num_kv_heads = 1"),
        (
            torch.ones(1, 4, 1),
            torch.int8,
            "key is int8 and the cache int8; give float32, bfloat16 or float16 to be quantised",
        ),
    ],
)
def test_a_wrong_argument_of_the_quantising_write_is_named(scales, key_dtype, message):
    key = torch.zeros(2, 1, 8, dtype=key_dtype)
    cache = torch.zeros(1, 2, 4, 1, 8, dtype=torch.int8)
    slots = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(InvalidInput, match=message):
        write_kv_cache(key, key, cache, slots, k_scale_cache=scales, v_scale_cache=scales)
