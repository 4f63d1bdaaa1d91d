"""The prefix index finds the longest prefix there is, and keeps equal blocks of two sequences apart."""

from __future__ import annotations

import math
import random
from array import array

import pytest

from torch_core.cache import CacheConfig, CacheGroup, CacheManager
from torch_core.cache.config import GroupLayout
from torch_core.cache.keys import KeyChain
from torch_core.cache.prefix import PrefixIndex

LAYOUTS = {
    "full": [(2, None, None)],
    "window": [(2, 5, None)],
    "chunk": [(2, None, 6)],
    "full and window": [(2, None, None), (2, 4, None)],
    "two windows": [(2, 3, None), (2, 7, None)],
    "window, chunk and wide blocks": [(2, 4, None), (2, None, 8), (4, None, None)],
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_longer_prefix_exists_than_the_one_that_is_found(layout, verify, seed):
    source = random.Random(seed)
    groups = [
        GroupLayout(CacheGroup(name=str(i), block_size=b, sliding_window=w, attention_chunk=c), 1)
        for i, (b, w, c) in enumerate(LAYOUTS[layout])
    ]
    lengths = set()
    for _ in range(60):
        tokens = array("i", [source.randrange(2) for _ in range(40)])
        chains = [KeyChain(b"root", group.block_size, verify=verify) for group in groups]
        index = PrefixIndex(len(groups), verify=verify)
        present: list[set[int]] = []
        blocks = iter(range(1, 1000))
        for number, chain in enumerate(chains):
            count = len(tokens) // chain.block_size
            chain.extend(tokens, count)
            columns = {p for p in range(count) if source.random() < 0.9}
            for position in columns:
                index.publish(number, chain, [next(blocks)] * count, position, position + 1)
            present.append(columns)
        limit = source.randrange(len(tokens))
        length, tables = index.match(groups, chains, tokens, limit)
        assert length == longest(groups, present, limit)
        for number, (group, table) in enumerate(zip(groups, tables, strict=True)):
            needed = range(group.first_needed_token(length) // group.block_size, length // group.block_size)
            assert [p for p, block in enumerate(table) if block] == list(needed)
            assert all(index.keys[table[p]][:2] == (number, chains[number].digests[p]) for p in needed)
        lengths.add(length)
    assert len(lengths) > 3


def longest(groups, present, limit):
    """Tries every length."""
    align = math.lcm(*(group.block_size for group in groups))
    for length in range(limit // align * align, 0, -align):
        columns = [
            range(min(group.first_needed_token(length), length - 1) // group.block_size, length // group.block_size)
            for group in groups
        ]
        if all(set(needed) <= have for needed, have in zip(columns, present, strict=True)):
            return length
    return 0


def test_two_blocks_of_one_content_are_handed_out_oldest_first_and_forgotten_one_by_one():
    chain = KeyChain(b"root", 2)
    tokens = array("i", [1, 2])
    chain.extend(tokens, 1)
    index = PrefixIndex(1, verify=False)
    for block in (5, 6, 7):
        index.publish(0, chain, [block], 0, 1)
    assert index.find(0, chain, 0) == 5
    index.forget(6)
    assert index.find(0, chain, 0) == 5
    index.forget(5)
    assert index.find(0, chain, 0) == 7
    index.forget(7)
    assert index.find(0, chain, 0) is None
    assert not index.blocks[0]
    assert not index.twins[0]


def test_equal_prompts_of_one_step_keep_their_own_blocks_and_both_can_be_hit():
    cache = CacheManager(CacheConfig(num_blocks=12, block_size=2))
    for name in ("a", "b"):
        cache.add(name, [1, 2, 3, 4, 5])
    step = cache.step([("a", 5), ("b", 5)])
    tables = [row.block_ids for row in step.rows]
    assert not set(tables[0]) & set(tables[1])
    cache.retire(step.step_id)
    cache.finish("a")
    assert cache.add("c", [1, 2, 3, 4, 6]) == 4
    cache.audit()
