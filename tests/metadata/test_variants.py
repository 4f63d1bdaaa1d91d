"""Virtual batches of local attention, shared prefixes, encoder fields and context parallelism."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from torch_core.base.errors import InvalidInput, RequestTooLong
from torch_core.metadata import (
    EncoderRow,
    SequenceRow,
    build_common_metadata,
    build_dense_metadata,
    common_prefix_length,
    encoder_layout,
    get_dcp_local_seq_lens,
    get_dcp_local_slots,
    make_local_attention_virtual_batches,
    metadata_layout,
    prefix_piece_tokens,
    use_cascade_attention,
)

SHAPE: dict[str, Any] = {
    "num_query_heads": 32,
    "num_kv_heads": 8,
    "head_size": 128,
    "bytes_per_element": 2,
    "num_sms": 132,
}


def refuses(message: str, error: type[Exception] = InvalidInput):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("chunk_blocks", [1, 2, 3])
def test_virtual_batches_let_each_query_see_its_own_chunk(chunk_blocks, seed, random_rows):
    rng = np.random.default_rng(seed)
    block_size = 4
    chunk = chunk_blocks * block_size
    for _ in range(20):
        rows = random_rows(rng, block_size=block_size, num_blocks=256)
        step = build_common_metadata(rows, block_size=block_size, num_blocks=256, num_seqs=len(rows) + 1)

        local, make_block_tables = make_local_attention_virtual_batches(chunk, step)

        assert visible_slots(local, block_size) == [
            [row.block_ids[j // block_size] * block_size + j % block_size for j in range(p // chunk * chunk, p + 1)]
            for row in rows
            for p in range(row.num_computed_tokens, row.num_computed_tokens + row.num_new_tokens)
        ]
        other = make_block_tables(step.block_tables + 1000)
        live = np.arange(chunk_blocks) < -(-local.seq_lens // block_size)[:, None]
        assert ((other - 1000)[live] == local.block_tables[live]).all()


def visible_slots(step, block_size):
    """The slots that each query token of a causal batch sees."""
    out = []
    for row in range(step.num_reqs):
        begin, end = step.query_start_loc[row : row + 2]
        for index in range(begin, end):
            position = step.seq_lens[row] - (end - index)
            out.append(
                [step.block_tables[row, j // block_size] * block_size + j % block_size for j in range(position + 1)]
            )
    return out


@pytest.mark.parametrize("chunk", [0, 6])
def test_a_chunk_that_is_not_a_multiple_of_the_block_is_refused(chunk):
    step = build_common_metadata([SequenceRow([1], 0, 2)], block_size=4, num_blocks=4)
    with refuses(f"attn_chunk_size is {chunk}; it must be a positive multiple of the block size, 4."):
        make_local_attention_virtual_batches(chunk, step)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([SequenceRow([5, 6, 7], 9, 1), SequenceRow([5, 6, 8], 8, 3)], 8),
        ([SequenceRow([5, 6, 7], 9, 1), SequenceRow([5, 6], 7, 1)], 4),
        ([SequenceRow([5, 6], 4, 1), SequenceRow([7, 6], 4, 1)], 0),
        ([SequenceRow([5], 2, 1), SequenceRow([5], 3, 1)], 0),
        ([SequenceRow([5, 6, 7], 9, 1)], 0),
        ([], 0),
    ],
)
def test_the_common_prefix_is_made_of_whole_computed_blocks(rows, expected):
    base = build_common_metadata(
        [replace(row, block_ids=[10 * i + k for k in range(1, 9)]) for i, row in enumerate(rows)],
        block_size=4,
        num_blocks=128,
        max_blocks=3,
    )
    tables = np.zeros_like(base.block_tables)
    for index, row in enumerate(rows):
        tables[index, : len(row.block_ids)] = row.block_ids

    assert common_prefix_length(replace(base, block_tables=tables)) == expected


def test_cascade_is_chosen_for_many_sequences_with_a_long_prefix():
    assert use_cascade_attention(8192, np.ones(64), **SHAPE)


@pytest.mark.parametrize(
    "options",
    [{"use_alibi": True}, {"use_sliding_window": True}, {"use_local_attention": True}, {"dcp_world_size": 2}],
)
def test_cascade_is_off_for_masks_that_it_cannot_serve(options):
    assert not use_cascade_attention(8192, np.ones(64), **SHAPE, **options)


@pytest.mark.parametrize(("prefix", "reqs"), [(0, 64), (128, 64), (8192, 1), (512, 4), (256, 8)])
def test_cascade_is_off_where_it_would_lose(prefix, reqs):
    assert not use_cascade_attention(prefix, np.ones(reqs), **SHAPE)


# (sequences, shared tokens, microseconds of a step without and with cascade) on an H200: 32 query heads over 8 of 128,
# bfloat16, 64 tokens of its own for each sequence.
MEASURED = (
    (2, 256, 16.4, 17.8), (2, 512, 12.1, 20.6), (2, 1024, 13.4, 18.1), (2, 2048, 15.9, 19.4), (2, 4096, 21.9, 21.3),
    (2, 8192, 25.5, 24.5), (3, 256, 11.4, 17.9), (3, 512, 12.1, 17.7), (3, 1024, 13.5, 18.1), (3, 2048, 16.5, 19.6),
    (3, 4096, 22.0, 20.9), (3, 8192, 30.8, 24.3), (4, 256, 12.0, 18.2), (4, 512, 13.2, 18.6), (4, 1024, 16.2, 19.1),
    (4, 2048, 21.8, 20.0), (4, 4096, 25.4, 23.2), (4, 8192, 40.3, 25.3), (6, 256, 14.8, 18.1), (6, 512, 16.1, 18.6),
    (6, 1024, 18.7, 18.6), (6, 2048, 24.0, 19.8), (6, 4096, 31.9, 21.8), (6, 8192, 56.4, 27.2), (8, 256, 16.5, 20.4),
    (8, 512, 16.1, 18.9), (8, 1024, 21.3, 18.5), (8, 2048, 24.6, 19.7), (8, 4096, 41.3, 24.1), (8, 8192, 69.8, 25.4),
    (12, 256, 16.1, 18.5), (12, 512, 19.4, 19.5), (12, 1024, 25.1, 19.6), (12, 2048, 31.6, 20.9),
    (12, 4096, 51.6, 22.5), (12, 8192, 92.5, 26.3), (16, 256, 12.7, 19.4), (16, 512, 15.4, 19.5),
    (16, 1024, 25.1, 19.9), (16, 2048, 39.7, 21.2), (16, 4096, 68.0, 23.0), (16, 8192, 94.6, 28.9),
    (32, 256, 19.1, 23.9), (32, 512, 21.7, 23.9), (32, 1024, 30.3, 24.5), (32, 2048, 50.1, 27.1),
    (32, 4096, 113.6, 30.6), (32, 8192, 174.3, 42.5), (64, 256, 22.7, 23.3), (64, 512, 28.5, 24.0),
    (64, 1024, 44.3, 26.1), (64, 2048, 75.5, 29.6), (64, 4096, 167.8, 39.1), (64, 8192, 296.7, 49.9),
    (128, 256, 33.6, 32.0), (128, 512, 48.7, 34.7), (128, 1024, 79.5, 38.2), (128, 2048, 141.5, 48.2),
    (128, 4096, 307.3, 58.5), (128, 8192, 558.5, 80.3), (256, 256, 63.6, 46.0), (256, 512, 91.7, 48.0),
    (256, 1024, 152.4, 56.6), (256, 2048, 276.1, 74.6), (256, 4096, 563.0, 92.3), (256, 8192, 1065.8, 134.1),
)  # fmt: skip


def test_cascade_is_chosen_nowhere_where_it_was_measured_slower():
    for reqs, prefix, plain, cascade in MEASURED:
        if use_cascade_attention(prefix, np.ones(reqs), **SHAPE):
            assert cascade < plain, (reqs, prefix)


def test_cascade_is_chosen_wherever_it_was_measured_a_third_faster():
    for reqs, prefix, plain, cascade in MEASURED:
        if plain > 4 / 3 * cascade:
            assert use_cascade_attention(prefix, np.ones(reqs), **SHAPE), (reqs, prefix)


def test_cascade_is_off_without_multiprocessors():
    assert not use_cascade_attention(8192, np.ones(64), **{**SHAPE, "num_sms": 0})


def test_queries_of_a_prefix_are_cut_into_pieces_until_they_fill_a_device_alone():
    assert prefix_piece_tokens(64, num_query_heads=32, num_kv_heads=8) == 16
    assert prefix_piece_tokens(511, num_query_heads=32, num_kv_heads=8) == 511
    assert prefix_piece_tokens(64, num_query_heads=8, num_kv_heads=8) == 64
    assert prefix_piece_tokens(64, num_query_heads=100, num_kv_heads=1) == 1


def test_cascade_refuses_impossible_arguments():
    with refuses("common_prefix_len is -1; it cannot be negative."):
        use_cascade_attention(-1, np.ones(4), **SHAPE)
    with refuses("num_query_heads is 30; it must be a multiple of num_kv_heads, 8."):
        use_cascade_attention(512, np.ones(4), **{**SHAPE, "num_query_heads": 30})


ROWS = [SequenceRow([5], 0, 3, "a"), SequenceRow([6], 2, 1, "b")]


def build(encoder_rows, **options):
    return build_common_metadata(ROWS, block_size=4, num_blocks=32, encoder_rows=encoder_rows, num_seqs=3, **options)


def test_encoder_fields_say_what_is_read_and_what_is_written():
    step = build([EncoderRow([11, 12], 6, 6), EncoderRow([13], 4)])

    encoder = step.encoder
    assert encoder is not None
    assert step.packed is not None
    assert encoder.encoder_seq_lens.tolist() == [6, 4, 0]
    assert encoder.cross_block_tables.tolist() == [[11, 12], [13, 0], [0, 0]]
    assert encoder.cross_slot_mapping.tolist() == [44, 45, 46, 47, 48, 49]
    assert (encoder.num_encoder_tokens, encoder.max_encoder_seq_len) == (6, 6)
    assert step.encoder_seq_lens is encoder.encoder_seq_lens
    for value in (encoder.encoder_seq_lens, encoder.cross_block_tables, encoder.cross_slot_mapping):
        assert np.shares_memory(value, step.packed)


def test_encoder_fields_are_padded_to_their_layout():
    layout = metadata_layout(
        num_seqs=3,
        num_tokens=4,
        max_blocks=1,
        extra=encoder_layout(num_seqs=3, num_encoder_tokens=8, max_encoder_blocks=3),
    )

    step = build([EncoderRow([11, 12], 6, 2), EncoderRow([13], 4)], layout=layout)

    assert step.encoder is not None
    assert step.encoder.cross_slot_mapping.tolist() == [48, 49, -1, -1, -1, -1, -1, -1]
    plain = step.unpadded().encoder
    assert plain is not None
    assert plain.cross_slot_mapping.tolist() == [48, 49]
    assert plain.encoder_seq_lens.tolist() == [6, 4]


ENCODER_MISTAKES = {
    "one row only": (
        [EncoderRow([11], 4)],
        InvalidInput,
        "encoder_rows has 1 entries; the step has 2 rows.",
    ),
    "a share of a token": (
        [EncoderRow([11], 4), EncoderRow([12], 1.5)],  # type: ignore[arg-type]
        InvalidInput,
        "encoder_rows[1] has num_tokens 1.5; an EncoderRow has ints there.",
    ),
    "a tuple as a row": (
        [([11], 4), EncoderRow([12], 1)],
        InvalidInput,
        "encoder_rows[0] has num_tokens None; an EncoderRow has ints there.",
    ),
    "no encoder token": (
        [EncoderRow([11], 4), EncoderRow([], 0)],
        InvalidInput,
        (
            "encoder_rows[1] has num_tokens 0 and num_new_tokens 0 for sequence 'b'; the first must be at least 1 "
            "and the second from 0 to the first."
        ),
    ),
    "more new tokens than tokens": (
        [EncoderRow([11], 2, 3), EncoderRow([12], 1)],
        InvalidInput,
        (
            "encoder_rows[0] has num_tokens 2 and num_new_tokens 3 for sequence 'a'; the first must be at least 1 "
            "and the second from 0 to the first."
        ),
    ),
    "an id outside the pool": (
        [EncoderRow([11], 2), EncoderRow([32], 1)],
        InvalidInput,
        (
            "block_tables[1, 0] is 32; valid ids are 1..31 (pool of 32 blocks, 0 is the null block). Sequence 'b' "
            "has 1 tokens and needs 1 blocks."
        ),
    ),
    "too few blocks": (
        [EncoderRow([11], 5), EncoderRow([12], 1)],
        InvalidInput,
        "block_ids of sequence 'a' has 1 blocks; its 5 tokens need 2 blocks of 4. Allocate before building.",
    ),
}


@pytest.mark.parametrize("name", ENCODER_MISTAKES)
def test_encoder_mistakes_are_refused(name):
    rows, error, message = ENCODER_MISTAKES[name]
    with refuses(message, error):
        build(rows)


def test_encoder_rows_that_do_not_fit_their_layout_are_refused():
    extra = encoder_layout(num_seqs=3, num_encoder_tokens=1, max_encoder_blocks=1)
    layout = metadata_layout(num_seqs=3, num_tokens=4, max_blocks=1, extra=extra)
    with refuses(
        "encoder_seq_lens[0] is 6 (2 blocks of 4) but cross_block_tables has 1 columns for sequence 'a'.",
        RequestTooLong,
    ):
        build([EncoderRow([11, 12], 6), EncoderRow([13], 4)], layout=layout)
    with refuses(
        "encoder_rows have 3 new tokens; cross_slot_mapping has 1 entries. Pad to a larger bucket.",
        RequestTooLong,
    ):
        build([EncoderRow([11], 3, 3), EncoderRow([13], 4)], layout=layout)


def test_a_layout_without_encoder_fields_is_refused():
    layout = metadata_layout(num_seqs=3, num_tokens=4, max_blocks=1)
    with pytest.raises(InvalidInput, match=r"^name is 'encoder_seq_lens'; the packed layout has query_start"):
        build([EncoderRow([11], 3), EncoderRow([13], 4)], layout=layout)


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (3, 2), (4, 16)])
def test_every_token_lives_on_exactly_one_rank(world, interleave):
    lens = np.arange(0, 100, dtype=np.int32)
    by_rank = [
        get_dcp_local_seq_lens(lens, dcp_world_size=world, dcp_rank=rank, interleave_size=interleave)
        for rank in range(world)
    ]

    assert (np.sum(by_rank, axis=0) == lens).all()
    for rank, local in enumerate(by_rank):
        assert local.dtype == np.int32
        assert local.tolist() == [sum(t // interleave % world == rank for t in range(n)) for n in lens]


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 4)])
def test_every_new_token_has_a_slot_on_the_rank_where_it_lives(world, interleave):
    rows = [SequenceRow([5, 2, 3], 13, 9), SequenceRow([7], 0, 3)]
    step = build_common_metadata(rows, block_size=4 * world, num_blocks=8, num_tokens=16)
    place = {"dcp_world_size": world, "interleave_size": interleave}
    by_rank = [get_dcp_local_slots(step.slot_mapping, block_size=4, dcp_rank=rank, **place) for rank in range(world)]

    assert step.positions is not None
    for token, position in enumerate(step.positions[:12].tolist()):
        row = rows[0] if token < 9 else rows[1]
        owner = position // interleave % world
        local = position // (interleave * world) * interleave + position % interleave
        expected = [-1] * world
        expected[owner] = row.block_ids[local // 4] * 4 + local % 4
        assert [int(slots[token]) for slots in by_rank] == expected
    for slots in by_rank:
        assert slots[12:].tolist() == [-1] * 4
        assert slots.dtype == np.int32


def test_runs_that_blocks_do_not_hold_whole_are_refused():
    with refuses("interleave_size is 3; it must divide the block size, 4."):
        get_dcp_local_slots(np.zeros(1, np.int32), block_size=4, dcp_world_size=2, dcp_rank=0, interleave_size=3)


def test_impossible_ranks_are_refused():
    with refuses("dcp_rank is 2; it must be from 0 to 1."):
        get_dcp_local_seq_lens(np.ones(1, int), dcp_world_size=2, dcp_rank=2)
    with refuses("dcp_world_size is 0; it must be an int of at least 1."):
        get_dcp_local_seq_lens(np.ones(1, int), dcp_world_size=0, dcp_rank=0)


def test_a_dense_batch_has_positions_and_no_slots():
    step = build_dense_metadata([3, 2], num_seqs=3, num_tokens=8)

    assert step.query_start_loc.tolist() == [0, 3, 5, 5]
    assert step.seq_lens.tolist() == [3, 2, 0]
    assert step.positions.tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert step.slot_mapping.tolist() == [-1] * 8
    assert step.block_tables.shape == (3, 0)
    assert not step.causal


def test_dense_batches_that_do_not_fit_are_refused():
    with refuses("query_lens[1] is 0; it must be at least 1."):
        build_dense_metadata([3, 0])
    with refuses(
        "query_lens has 2 sequences of 5 tokens; it is padded to 1 and 5. Pad to a larger bucket.", RequestTooLong
    ):
        build_dense_metadata([3, 2], num_seqs=1)
