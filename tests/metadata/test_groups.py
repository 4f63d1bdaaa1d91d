"""Groups of neighbouring sequences that share a prefix: the same as by comparing every pair, in pieces that fit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torch_core.metadata import PrefixGroups, SequenceRow, build_common_metadata, prefix_groups

SHAPE = {"num_query_heads": 32, "num_kv_heads": 8, "head_size": 128, "bytes_per_element": 2, "num_sms": 132}


def found(rows: list[SequenceRow], piece_tokens: int = 16, max_pieces: int = 64) -> PrefixGroups | None:
    metadata = build_common_metadata(rows, block_size=4, num_blocks=4096)
    return prefix_groups(metadata, piece_tokens=piece_tokens, max_pieces=max_pieces)


def group(first_block: int, prefix_blocks: int, size: int, own_block: int) -> list[SequenceRow]:
    prefix = [*range(first_block, first_block + prefix_blocks)]
    return [SequenceRow([*prefix, own_block + index], 4 * prefix_blocks + 1, 1) for index in range(size)]


def test_groups_and_what_lies_between_them_are_cut_into_pieces() -> None:
    rows = [*group(1, 0, 2, 50), *group(10, 3, 5, 60), *group(20, 2, 2, 80), *group(30, 0, 1, 90)]

    groups = found(rows, piece_tokens=3)

    assert groups is not None
    assert groups.prefix_lens.tolist() == [0, 0, 12, 12, 12, 12, 12, 8, 8, 0]
    assert groups.piece_starts == [0, 2, 5, 7, 9, 10]


def test_the_block_that_a_sequence_is_writing_to_belongs_to_no_prefix() -> None:
    groups = found([SequenceRow([1, 2], 7, 1), SequenceRow([1, 3], 5, 1)])

    assert groups is not None
    assert groups.prefix_lens.tolist() == [4, 4]


def test_a_neighbour_that_shares_little_does_not_shorten_a_groups_prefix() -> None:
    rows = [*group(10, 8, 3, 100), SequenceRow([10, 200, 201], 9, 1), *group(10, 1, 1, 300)]

    groups = found(rows)

    assert groups is not None
    assert groups.prefix_lens.tolist() == [32, 32, 32, 4, 4]


def test_sequences_that_share_nothing_are_no_groups() -> None:
    assert found(group(1, 0, 4, 10)) is None
    assert found(group(1, 5, 1, 10)) is None


def test_more_pieces_than_there_is_room_for_are_no_groups() -> None:
    rows = [row for number in range(4) for row in group(1 + 10 * number, 2, 2, 100 + 10 * number)]

    assert found(rows, max_pieces=4) is not None
    assert found(rows, max_pieces=3) is None


def test_groups_of_16_on_a_long_prompt_pay_and_pairs_on_a_short_one_do_not() -> None:
    long = PrefixGroups(np.full(1024, 4096, np.int32), [*range(0, 1025, 16)])
    short = PrefixGroups(np.full(8, 64, np.int32), [*range(0, 9, 2)])

    assert long.pays(**SHAPE)
    assert not short.pays(**SHAPE)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=20))
def test_every_sequence_of_a_piece_has_the_blocks_of_its_prefix(sequences) -> None:
    rows, own = [], 1000
    for family, shared, more in sequences:
        blocks = [*range(1 + 10 * family, 1 + 10 * family + shared), *range(own, own + more)]
        own += more
        rows.append(SequenceRow(blocks, 4 * len(blocks) - 1, 1))

    groups = found(rows, piece_tokens=4)

    if groups is None:
        assert all(a.block_ids[0] != b.block_ids[0] for a, b in pairwise(rows))
        return
    assert groups.piece_starts[0] == 0
    assert groups.piece_starts[-1] == len(rows)
    for first, end in pairwise(groups.piece_starts):
        assert 0 < end - first <= 4
        assert len(set(groups.prefix_lens[first:end].tolist())) == 1
        blocks = groups.prefix_lens[first] // 4
        assert len({tuple(row.block_ids[:blocks]) for row in rows[first:end]}) == 1
        assert all(row.num_computed_tokens >= 4 * blocks for row in rows[first:end])
