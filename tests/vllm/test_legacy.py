"""The helpers of the older attention stack, over this project's records."""

from __future__ import annotations

import re

import pytest

from torch_core.errors import InvalidInput
from torch_core.metadata import EncoderRow, SequenceRow, build_common_metadata
from torch_core.specs import KVCacheSpec
from torch_core.vllm import (
    AttentionType,
    BuilderConfig,
    CommonMetadataBuilder,
    TorchAttentionMetadataBuilder,
    get_num_prefill_decode_query_kv_tokens,
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
    is_block_tables_empty,
)

SPEC = KVCacheSpec(num_kv_heads=2, head_size=32, block_size=4, dtype="float32")
ROWS = [SequenceRow([5], 0, 3), SequenceRow([6], 2, 1)]


def refuses(message: str):
    return pytest.raises(InvalidInput, match=f"^{re.escape(message)}$")


def metadata(*, cross):
    encoder_rows = [EncoderRow([8, 9], 6, 6), EncoderRow([10], 4)] if cross else None
    step = build_common_metadata(ROWS, block_size=4, num_blocks=16, encoder_rows=encoder_rows)
    return TorchAttentionMetadataBuilder(SPEC, [], BuilderConfig(num_heads=2), "cpu").build(0, step)


@pytest.mark.parametrize(
    ("tables", "empty"), [(None, True), ({}, True), ({0: None, 1: None}, True), ({0: None, 1: [3]}, False)]
)
def test_tables_are_empty_without_any_blocks(tables, empty):
    assert is_block_tables_empty(tables) is empty


def test_collected_sequences_become_one_batch():
    builder = CommonMetadataBuilder(block_size=4, num_blocks=16)
    for row in ROWS:
        builder.add_seq_group(row)

    step = builder.build(max_blocks=2)

    assert step.seq_lens.tolist() == [3, 3]
    assert step.block_tables.shape == (2, 2)
    assert (builder.num_prefills, builder.num_prefill_tokens, builder.num_decode_tokens) == (1, 3, 1)
    assert (builder.context_lens, builder.prefill_seq_lens, builder.curr_seq_lens) == ([0, 2], [3], [3])


def test_a_graphs_padding_adds_empty_rows():
    builder = CommonMetadataBuilder(block_size=4, num_blocks=16)
    builder.add_seq_group(ROWS[1])

    step = builder.build(cuda_graph_pad_size=3)

    assert step.seq_lens.tolist() == [3, 0, 0, 0]
    assert step.slot_mapping.tolist() == [26, -1, -1, -1]


def test_a_new_step_forgets_the_one_before():
    builder = CommonMetadataBuilder(block_size=4, num_blocks=16)
    builder.add_seq_group(ROWS[0])
    builder.prepare()

    assert builder.build().num_reqs == 0
    assert builder.num_prefill_tokens == 0


def test_a_window_drops_the_slots_of_early_prompt_tokens_only():
    builder = CommonMetadataBuilder(block_size=4, num_blocks=16, sliding_window=2)
    for row in ROWS:
        builder.add_seq_group(row)

    step = builder.build(cuda_graph_pad_size=1)

    assert step.slot_mapping.tolist() == [-1, 21, 22, 26, -1]
    assert step.layout is not None
    assert step.layout["slot_mapping"].of(step.packed).tolist() == step.slot_mapping.tolist()


def test_encoder_fields_are_known_when_they_are_set():
    plain, cross = metadata(cross=False), metadata(cross=True)

    assert not is_all_encoder_attn_metadata_set(plain)
    assert not is_all_cross_attn_metadata_set(plain)
    assert is_all_encoder_attn_metadata_set(cross)
    assert is_all_cross_attn_metadata_set(cross)


def test_each_kind_of_attention_reads_its_own_lengths_and_tables():
    step = metadata(cross=True)

    for is_prompt in (False, True):
        found = get_seq_len_block_table_args(step, is_prompt, "decoder")
        assert found == (step.seq_lens, 3, step.block_table)
    assert get_seq_len_block_table_args(step, False, AttentionType.ENCODER_ONLY) == (step.seq_lens, 3, None)
    assert get_seq_len_block_table_args(step, False, AttentionType.ENCODER) == (step.encoder_seq_lens, 6, None)
    assert get_seq_len_block_table_args(step, False, "encoder_decoder") == (
        step.encoder_seq_lens,
        6,
        step.cross_block_tables,
    )


def test_each_kind_of_attention_counts_its_own_tokens():
    step = metadata(cross=True)

    assert get_num_prefill_decode_query_kv_tokens(step, "decoder") == (3, 3, 1)
    assert get_num_prefill_decode_query_kv_tokens(step, AttentionType.ENCODER_ONLY) == (3, 3, 1)
    assert get_num_prefill_decode_query_kv_tokens(step, AttentionType.ENCODER) == (6, 6, 0)
    assert get_num_prefill_decode_query_kv_tokens(step, AttentionType.ENCODER_DECODER) == (3, 6, 1)


def test_missing_encoder_fields_are_refused():
    step = metadata(cross=False)
    with refuses("the metadata has no encoder fields, which encoder_decoder attention needs."):
        get_seq_len_block_table_args(step, False, "encoder_decoder")
    with refuses("num_encoder_tokens of the metadata is None; encoder attention needs it."):
        get_num_prefill_decode_query_kv_tokens(step, "encoder")
    with refuses("attn_type is 'prefix'; it must be one of decoder, encoder, encoder_only, encoder_decoder."):
        get_seq_len_block_table_args(step, False, "prefix")
    with refuses("attn_type is 'prefix'; it must be one of decoder, encoder, encoder_only, encoder_decoder."):
        get_num_prefill_decode_query_kv_tokens(step, "prefix")
