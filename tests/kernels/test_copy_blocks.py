"""The block copy kernel, in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.support import reference
from tests.support.triton_ops import copy_blocks
from torch_core.base.errors import InvalidInput, Unsupported

PAIRS = torch.tensor([[1, 4], [0, 2], [-1, -1], [1, 3]], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_whole_blocks_are_copied_and_padding_pairs_skipped(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    caches = [torch.randn(5, 2, 4, 3, 24, generator=generator).to(dtype) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        reference.copy_blocks(cache, PAIRS)
    copy_blocks(caches, PAIRS)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))


def test_a_strided_cache_and_a_cache_of_scales_are_copied_too(seed):
    generator = torch.Generator().manual_seed(seed)
    strided = torch.randn(5, 3, 4, 2, 8, generator=generator).permute(0, 3, 2, 1, 4)
    scales = torch.randn(5, 4, 3, generator=generator)
    for cache in (strided, scales):
        expected = cache.clone()
        reference.copy_blocks(expected, PAIRS)
        copy_blocks(cache, PAIRS)
        torch.testing.assert_close(cache, expected, rtol=0, atol=0)


def test_a_pair_beyond_the_pool_copies_nothing():
    guarded = torch.arange(6.0).reshape(6, 1)
    copy_blocks(guarded[:5], torch.tensor([[0, 5], [5, 0]], dtype=torch.int32))
    assert guarded.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_no_pairs_are_no_launch():
    cache = torch.ones(2, 4)
    copy_blocks(cache, torch.zeros(0, 2, dtype=torch.int32))
    assert (cache == 1).all()


@pytest.mark.parametrize(
    ("cache", "pairs", "message"),
    [
        (torch.zeros(()), PAIRS, r"kv_cache has shape \[\]; it must have 1 to 5 axes"),
        (torch.zeros(3, 2), PAIRS.long(), "block_mapping is int64; it must be int32"),
        (torch.zeros(3, 2), PAIRS.flatten(), r"block_mapping has shape \[8\]; it must have 2 axes"),
        (torch.zeros(3, 2), PAIRS.float(), "block_mapping is float32"),
        (torch.zeros(3, 2), PAIRS.T.contiguous().T, "block_mapping has strides"),
    ],
)
def test_a_wrong_argument_is_named(cache, pairs, message):
    with pytest.raises((InvalidInput, Unsupported), match=message):
        copy_blocks(cache, pairs)
