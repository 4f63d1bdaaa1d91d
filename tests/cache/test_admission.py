"""Admission and progress: what is let in can finish alone in an empty pool, and what is refused could not."""

from __future__ import annotations

import random

import pytest

from torch_core.base.errors import OutOfBlocks, RequestTooLong
from torch_core.cache import CacheConfig, CacheGroup, CacheManager


def finishes_alone(cache: CacheManager, prompt: int, total: int, most: int, ahead: int) -> bool:
    """Runs one sequence with up to `ahead` steps in flight; says whether it came through."""
    cache.add("only", [1] * prompt)
    done, flying = 0, []
    while done < total:
        count = min(most, total - done)
        try:
            flying.append(cache.step([("only", count)]).step_id)
            done += count
            known = len(cache._state.sequences["only"].tokens)
            cache.append_tokens("only", [1] * max(0, done - known))
        except OutOfBlocks:
            if not flying:
                return False
            cache.retire(flying.pop(0))
        if len(flying) >= ahead:
            cache.retire(flying.pop(0))
    return True


@pytest.mark.parametrize("case", range(150))
def test_an_admitted_request_finishes_alone(case, seed):
    source = random.Random(seed)
    most = source.randint(1, 6)
    window, chunk = source.choice([(None, None), (source.randint(1, 7), None), (None, source.randint(1, 7))])
    groups = ()
    if source.random() < 0.3:
        groups = (CacheGroup(name="full"), CacheGroup(name="part", sliding_window=window, attention_chunk=chunk))
        window = chunk = None
    block_size = source.choice((1, 2, 3))
    prompt, new = source.randint(1, 12), source.randint(0, 8)
    admitted = []
    for num_blocks in range(2, 40):
        config = CacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            sliding_window=window,
            attention_chunk=chunk,
            groups=groups,
            max_step_tokens=most,
            watermark_blocks=min(1, num_blocks - 2),
        )
        cache = CacheManager(config)
        try:
            cache.check_admission("only", prompt, new)
        except RequestTooLong:
            continue
        admitted.append(num_blocks)
        assert finishes_alone(cache, prompt, prompt + new, most, ahead=source.randint(1, 3))
        if len(admitted) == 3:
            break
    assert admitted


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_request_that_is_refused_could_not_finish_alone(block_size):
    config = CacheConfig(num_blocks=5, block_size=block_size)
    cache = CacheManager(config)
    cache.check_admission("only", 2, 4 * block_size - 2)
    assert finishes_alone(cache, 2, 4 * block_size, 1, ahead=2)
    cache = CacheManager(config)
    with pytest.raises(RequestTooLong):
        cache.check_admission("only", 2, 4 * block_size - 1)
    assert not finishes_alone(cache, 2, 4 * block_size + 1, 1, ahead=2)
