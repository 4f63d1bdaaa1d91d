"""What the reference stores in a cache, copies between blocks, and merges."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.reference import copy_blocks, merge_states, write_kv_cache
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import PAD_SLOT_ID
from torch_core.cache_writes.reference import largest_code

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def cache_of(dtype: torch.dtype, blocks: int = 3, block_size: int = 4) -> torch.Tensor:
    return torch.zeros(blocks, 2, block_size, 1, 2).to(dtype)


def test_tokens_go_to_their_slots_and_padding_nowhere():
    cache = cache_of(torch.float32)
    key = torch.arange(1.0, 7.0).view(3, 1, 2)
    write_kv_cache(key, -key, cache, torch.tensor([11, PAD_SLOT_ID, 4]))
    assert cache[2, 0, 3, 0].tolist() == [1.0, 2.0]
    assert cache[2, 1, 3, 0].tolist() == [-1.0, -2.0]
    assert cache[1, 0, 0, 0].tolist() == [5.0, 6.0]
    assert cache.count_nonzero() == 8


def test_tokens_after_the_last_slot_are_padding():
    cache = cache_of(torch.float32)
    write_kv_cache(torch.ones(3, 1, 2), torch.ones(3, 1, 2), cache, torch.tensor([4]))
    assert cache.count_nonzero() == 4


def test_what_is_stored_times_the_scale_is_the_real_value():
    cache = cache_of(torch.float32)
    ones = torch.ones(1, 1, 2)
    write_kv_cache(ones, ones, cache, torch.tensor([4]), k_scale=2.0, v_scale=torch.tensor([4.0]))
    assert cache[1, 0, 0, 0].tolist() == [0.5, 0.5]
    assert cache[1, 1, 0, 0].tolist() == [0.25, 0.25]


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_saturates_and_keeps_nan(dtype):
    cache = cache_of(dtype)
    largest = torch.finfo(dtype).max
    key = torch.tensor([[[1e9, -1e9]]])
    write_kv_cache(key, torch.tensor([[[math.nan, math.inf]]]), cache, torch.tensor([4]))
    assert cache[1, 0, 0, 0].float().tolist() == [largest, -largest]
    assert cache[1, 1, 0, 0].float().isnan().tolist() == [True, False]
    assert cache[1, 1, 0, 0, 1].float().item() == largest


def test_int8_rounds_to_the_nearest_even_and_saturates():
    cache = torch.zeros(2, 2, 1, 1, 5, dtype=torch.int8)
    key = torch.tensor([[[0.5, 1.5, -2.5, 1000.0, -1000.0]]])
    write_kv_cache(key, key, cache, torch.tensor([1]))
    assert cache[1, 0, 0, 0].tolist() == [0, 2, -2, 127, -127]


@pytest.mark.parametrize("dtype", FP8)
def test_codes_of_the_cache_are_stored_as_they_are(dtype):
    cache = cache_of(dtype)
    codes = torch.tensor([[[1.5, -3.0]]]).to(dtype)
    write_kv_cache(codes, codes, cache, torch.tensor([4]), k_scale=7.0, v_scale=7.0)
    assert cache[1, 0, 0, 0].float().tolist() == [1.5, -3.0]


@pytest.mark.parametrize("dtype", [torch.int8, *FP8])
def test_a_scale_per_token_and_head_makes_the_largest_element_the_largest_code(dtype):
    cache = torch.zeros(2, 2, 4, 2, 3).to(dtype)
    scales = torch.zeros(2, 2, 4, 2)
    key = torch.tensor([[[1.0, -4.0, 2.0], [0.0, 0.0, 0.0]]])
    write_kv_cache(key, key / 2, cache, torch.tensor([5]), k_scale_cache=scales[0], v_scale_cache=scales[1])
    largest = largest_code(dtype)
    assert scales[0, 1, 1].tolist() == pytest.approx([4.0 / largest, 1e-6])
    assert scales[1, 1, 1].tolist() == pytest.approx([2.0 / largest, 1e-6])
    assert cache[1, 0, 1, 0, 1].float().item() == -largest
    torch.testing.assert_close(cache[1, 0, 1, 0].float() * scales[0, 1, 1, 0], key[0, 0], rtol=0.1, atol=0.02)
    assert scales.count_nonzero() == 4


def test_key_and_value_caches_may_come_apart():
    keys, values = torch.zeros(2, 4, 1, 2), torch.zeros(2, 4, 1, 3)
    write_kv_cache(torch.ones(1, 1, 2), torch.ones(1, 1, 3), (keys, values), torch.tensor([6]))
    assert (keys[1, 2].sum(), values[1, 2].sum()) == (2, 3)


@pytest.mark.parametrize(
    ("slots", "options", "message"),
    [
        ([12], {}, r"slot_mapping\[0\] is 12; a cache of 3 blocks of 4 has slots 0 to 11"),
        ([4, 5], {}, r"slot_mapping has 2 entries and key 1 tokens; give at most one slot"),
        (
            [4],
            {"k_scale": 1.0, "k_scale_cache": torch.zeros(3, 4, 1), "v_scale_cache": torch.zeros(3, 4, 1)},
            "k_scale or v_scale is given beside k_scale_cache and v_scale_cache; pass one kind",
        ),
    ],
)
def test_a_refused_write_changes_nothing(slots, options, message):
    cache = cache_of(torch.float32)
    with pytest.raises(InvalidInput, match=message):
        write_kv_cache(torch.ones(1, 1, 2), torch.ones(1, 1, 2), cache, torch.tensor(slots), **options)
    assert cache.count_nonzero() == 0


def test_blocks_are_copied_in_every_cache_and_negative_pairs_are_padding():
    caches = [torch.arange(4.0)[:, None], torch.arange(4.0)[:, None] * 10]
    copy_blocks(caches, torch.tensor([[1, 3], [-1, 2], [2, -1], [2, 2]]))
    assert caches[0].flatten().tolist() == [0, 1, 2, 1]
    assert caches[1].flatten().tolist() == [0, 10, 20, 10]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 4]], r"block_mapping\[0\] is \(0, 4\); the cache has blocks 0 to 3"),
        ([[0, 1], [2, 1]], r"block_mapping\[1\] writes block 1, which another pair reads or writes"),
        ([[0, 1], [1, 2]], r"block_mapping\[0\] writes block 1, which another pair reads or writes"),
    ],
)
def test_copies_that_depend_on_their_order_are_refused(pairs, message):
    with pytest.raises(InvalidInput, match=message):
        copy_blocks(torch.zeros(4, 1), torch.tensor(pairs))


def state(value: float, lse: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((1, 1, 2), value), torch.full((1, 1), lse)


def test_merging_weighs_by_the_exponential_of_the_lse():
    out, lse = merge_states(*state(1.0, math.log(3)), *state(5.0, 0.0))
    assert out.flatten().tolist() == pytest.approx([2.0, 2.0])
    assert lse.item() == pytest.approx(math.log(4))


def test_merging_is_exact_far_from_zero():
    out, lse = merge_states(*state(1.0, 5000.0), *state(3.0, 5000.0))
    assert out.flatten().tolist() == pytest.approx([2.0, 2.0])
    assert lse.item() == pytest.approx(5000.0 + math.log(2))


@pytest.mark.parametrize("empty_lse", [-math.inf, math.inf])
@pytest.mark.parametrize("swapped", [False, True])
def test_an_empty_state_leaves_the_other_unchanged_whatever_it_holds(empty_lse, swapped):
    pair = [state(math.nan, empty_lse), state(2.0, -700.0)]
    first, second = reversed(pair) if swapped else pair
    out, lse = merge_states(*first, *second)
    assert out.flatten().tolist() == [2.0, 2.0]
    assert lse.item() == -700.0


def test_two_empty_states_give_zeros_and_minus_infinity():
    out, lse = merge_states(*state(math.nan, -math.inf), *state(1.0, -math.inf))
    assert out.flatten().tolist() == [0.0, 0.0]
    assert lse.item() == -math.inf


def test_merged_results_keep_the_dtypes_of_the_first_state():
    out, lse = merge_states(torch.ones(1, 1, 2).bfloat16(), torch.zeros(1, 1), torch.ones(1, 1, 2), torch.zeros(1, 1))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    out, _ = merge_states(torch.ones(1, 1, 2).double(), torch.zeros(1, 1), torch.ones(1, 1, 2), torch.zeros(1, 1))
    assert out.dtype == torch.float64
