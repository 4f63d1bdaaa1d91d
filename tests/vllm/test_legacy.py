"""The helpers of the older attention stack, over this project's records."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import KVCacheSpec
from torch_core.metadata import EncoderRow, SequenceRow, build_common_metadata
from torch_core.vllm import (
    AttentionType,
    BuilderConfig,
    CommonMetadataBuilder,
    TorchAttentionMetadataBuilder,
    compute_slot_mapping,
    compute_slot_mapping_start_idx,
    get_num_prefill_decode_query_kv_tokens,
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
    is_block_tables_empty,
)

SPEC = KVCacheSpec(num_kv_heads=2, head_size=32, block_size=4, dtype="float32")
ROWS = [SequenceRow([5], 0, 4), SequenceRow([6], 2, 1)]


def refuses(message: str):
    return pytest.raises(InvalidInput, match=f"^{re.escape(message)}$")


def metadata(*, cross):
    encoder_rows = [EncoderRow([8, 9], 6, 6), EncoderRow([10], 4)] if cross else None
    step = build_common_metadata(ROWS, block_size=4, num_blocks=16, encoder_rows=encoder_rows)
    return TorchAttentionMetadataBuilder(SPEC, [], BuilderConfig(num_heads=2), "cpu").build(0, step)


@pytest.mark.parametrize(
    ("tables", "empty"), [(None, True), ({}, True), ({0: None, 1: None}, True), ({0: None, 1: [3]}, False), ([], False)]
)
def test_tables_are_empty_without_any_blocks(tables, empty):
    assert is_block_tables_empty(tables) is empty


class Builder(CommonMetadataBuilder):
    """What a backend that was written for vLLM has to say."""

    _metadata_cls = SimpleNamespace


class Placeholders:
    """Stands for the engine's map of one modality."""

    def __init__(self, ranges=()):
        self.ranges = list(ranges)

    def extend(self, other):
        self.ranges.extend(other.ranges)

    def index_map(self):
        return [index for part in self.ranges for index in part]


def group(is_prompt, *sequences, **changes):
    """A group of (id, new tokens, tokens before them) as the engine describes it."""
    ids, new, before = zip(*sequences, strict=True)
    totals = [sum(pair) for pair in zip(new, before, strict=True)]
    return SimpleNamespace(**{
        "is_prompt": is_prompt,
        "seq_ids": ids,
        "input_tokens": [[7] * count for count in new],
        "orig_seq_lens": totals,
        "seq_lens": totals,
        "query_lens": new,
        "context_lens": before,
        "curr_sliding_window_blocks": [0] * len(ids),
        "block_tables": {seq_id: [10 * seq_id, 10 * seq_id + 1, 10 * seq_id + 2] for seq_id in ids},
        "prefix_cache_hit": False,
        "multi_modal_placeholder_maps": None,
        **changes,
    })  # fmt: skip


def builder_of(*groups, sliding_window=None, chunked=False, **runner):
    runner = {"device": "cpu", "pin_memory": False, **runner}
    builder = Builder(
        SimpleNamespace(
            runner=SimpleNamespace(**runner),
            sliding_window=sliding_window,
            block_size=4,
            inter_data_list=groups,
            chunked_prefill_enabled=chunked,
        )
    )
    builder.prepare()
    return builder


def test_collected_sequences_become_one_batch():
    builder = builder_of(group(True, (1, 6, 0)), group(False, (2, 1, 8), (3, 1, 2)))

    step = builder.build([6, 9, 3], [6, 1, 1], -1, 3)

    assert (step.num_prefills, step.num_prefill_tokens, step.num_decode_tokens) == (1, 6, 2)
    assert (step.max_query_len, step.max_prefill_seq_len, step.max_decode_seq_len) == (6, 6, 9)
    assert step.seq_lens == [6, 9, 3]
    assert step.seq_lens_tensor.tolist() == [6, 9, 3]
    assert step.context_lens_tensor.tolist() == [0, 8, 2]
    assert step.query_start_loc.tolist() == [0, 6, 7, 8]
    assert step.seq_start_loc.tolist() == [0, 6, 15, 18]
    assert step.slot_mapping.tolist() == [40, 41, 42, 43, 44, 45, 88, 122]
    assert step.slot_mapping.dtype == torch.long
    assert step.block_tables.dtype == step.seq_lens_tensor.dtype == torch.int32
    assert step.enable_kv_scales_calculation
    assert not step.use_cuda_graph
    assert step.multi_modal_placeholder_index_maps == {}


def test_a_prompts_table_is_read_after_a_prefix_hit_or_in_chunks_only():
    prompt, decode = group(True, (1, 4, 4)), group(False, (2, 1, 8))
    hit = group(True, (1, 4, 4), prefix_cache_hit=True, curr_sliding_window_blocks=[1])

    assert builder_of(prompt, decode).build([8, 9], [4, 1], -1, 2).block_tables.tolist() == [[0, 0, 0], [20, 21, 22]]
    found = builder_of(prompt, decode, chunked=True).build([8, 9], [4, 1], -1, 2).block_tables
    assert found.tolist() == [[10, 11, 12], [20, 21, 22]]
    assert builder_of(hit).build([8], [4], -1, 1).block_tables.tolist() == [[10, 11, 12]]


def test_a_window_of_blocks_shortens_a_decodes_table():
    decode = group(False, (2, 1, 8), (3, 1, 4), curr_sliding_window_blocks=[2, 0])

    assert builder_of(decode).build([9, 5], [1, 1], -1, 2).block_tables.tolist() == [[21, 22, 0], [30, 31, 32]]


def test_a_profiling_run_has_no_tables_and_no_slots():
    for tables in (None, {1: None}):
        prompt = group(True, (1, 3, 0), block_tables=tables)
        step = builder_of(prompt, chunked=True).build([3], [3], -1, 1)
        assert step.slot_mapping.tolist() == [-1, -1, -1]
        assert step.block_tables.shape == (1, 0)


def test_placeholders_of_all_prompts_are_joined_by_modality():
    maps = [{"image": Placeholders([range(2, 4)])}, {"image": Placeholders([range(5, 6)]), "audio": Placeholders()}]
    prompts = [group(True, (index, 6, 0), multi_modal_placeholder_maps=found) for index, found in enumerate(maps)]
    decode = group(False, (5, 1, 3), multi_modal_placeholder_maps={"image": Placeholders([range(9)])})

    step = builder_of(*prompts, decode).build([6, 6, 4], [6, 6, 1], -1, 3)

    assert step.multi_modal_placeholder_index_maps == {"image": [2, 3, 5], "audio": []}
    assert maps[0]["image"].ranges == [range(2, 4)]


def test_a_graphs_padding_adds_slots_and_takes_the_runners_tables():
    tables = np.full((4, 5), 9, np.int32)
    builder = builder_of(group(False, (2, 1, 8)), graph_block_tables=tables)

    step = builder.build([9, 1, 1], [1, 1, 1], 2, 3)

    assert step.slot_mapping.tolist() == [88, -1, -1]
    assert step.num_decode_tokens == 3
    assert step.use_cuda_graph
    assert step.block_tables.tolist() == [[20, 21, 22, 9, 9], [9] * 5, [9] * 5]


def test_a_new_step_forgets_the_one_before():
    builder = builder_of(group(True, (1, 3, 0)))
    builder.build([3], [3], -1, 1)
    builder.prepare()

    assert builder.build([3], [3], -1, 1).num_prefills == 1


def test_a_window_drops_the_slots_of_early_prompt_tokens_only():
    builder = builder_of(group(True, (1, 4, 0)), group(False, (2, 1, 2)), sliding_window=3)

    assert builder.build([4, 3], [4, 1], -1, 2).slot_mapping.tolist() == [-1, 41, 42, 43, 82]


def test_a_decode_has_one_new_token_and_a_step_has_a_query():
    with refuses("query_lens of sequence 2 is 3; one that is not a prompt has one new token."):
        builder_of(group(False, (2, 3, 2))).build([5], [3], -1, 1)
    for lens in ([], [0]):
        with refuses(f"query_lens is {lens}; a step has at least one new token."):
            builder_of().build(lens, lens, -1, 0)


@pytest.mark.parametrize("new", [3, 255, 256, 600])
def test_slots_are_those_of_the_table_for_few_tokens_and_for_many(new):
    table, slots = list(range(7, 7 + 160)), [5]
    compute_slot_mapping(False, slots, 3, new + 2, 2, 0, 4, {3: table})

    assert slots == [5] + [table[p // 4] * 4 + p % 4 for p in range(2, new + 2)]


def test_slots_begin_after_the_start_index_or_the_context():
    slots: list[int] = []
    compute_slot_mapping(False, slots, 0, 8, 5, 6, 4, {0: [1, 2]})
    assert slots == [-1, 10, 11]
    with refuses("block_tables[0] has 1 blocks of 4; the sequence has 8 tokens."):
        compute_slot_mapping(False, slots, 0, 8, 5, 6, 4, {0: [1]})
    assert slots == [-1, 10, 11]


@pytest.mark.parametrize(
    ("arguments", "start"),
    [((True, 6, 5, 4), 2), ((True, 3, 0, 4), 0), ((True, 6, 0, None), 0), ((False, 6, 0, 4), 0)],
)
def test_only_a_prompts_last_window_gets_slots_whatever_its_context(arguments, start):
    assert compute_slot_mapping_start_idx(*arguments) == start


def test_encoder_fields_are_known_when_they_are_set():
    plain, cross = metadata(cross=False), metadata(cross=True)

    assert not is_all_encoder_attn_metadata_set(plain)
    assert not is_all_cross_attn_metadata_set(plain)
    assert is_all_encoder_attn_metadata_set(cross)
    assert is_all_cross_attn_metadata_set(cross)


def test_each_kind_of_attention_reads_its_own_lengths_and_tables():
    step = metadata(cross=True)

    assert get_seq_len_block_table_args(step, True, "decoder") == (step.seq_lens, 4, step.block_table)
    assert get_seq_len_block_table_args(step, False, "decoder") == (step.seq_lens, 3, step.block_table)
    assert get_seq_len_block_table_args(step, True, AttentionType.ENCODER_ONLY) == (step.seq_lens, 4, None)
    assert get_seq_len_block_table_args(step, False, AttentionType.ENCODER) == (step.encoder_seq_lens, 6, None)
    assert get_seq_len_block_table_args(step, False, "encoder_decoder") == (
        step.encoder_seq_lens,
        6,
        step.cross_block_tables,
    )


def test_older_metadata_is_read_by_its_own_names():
    older = SimpleNamespace(
        seq_lens=[3, 4], seq_lens_tensor="lens", max_prefill_seq_len=4, max_decode_seq_len=3, block_tables="tables",
        encoder_seq_lens=[6], encoder_seq_lens_tensor="encoder lens", max_encoder_seq_len=6,
        cross_block_tables="cross tables", cross_slot_mapping="slots",
    )  # fmt: skip

    assert get_seq_len_block_table_args(older, False, "decoder") == ("lens", 3, "tables")
    assert get_seq_len_block_table_args(older, True, "encoder") == ("encoder lens", 6, None)
    assert get_seq_len_block_table_args(older, True, "encoder_decoder") == ("encoder lens", 6, "cross tables")
    older.encoder_seq_lens_tensor = None
    assert not is_all_encoder_attn_metadata_set(older)


def test_each_kind_of_attention_counts_its_own_tokens():
    step = metadata(cross=True)

    assert get_num_prefill_decode_query_kv_tokens(step, "decoder") == (4, 4, 1)
    assert get_num_prefill_decode_query_kv_tokens(step, AttentionType.ENCODER_ONLY) == (4, 4, 1)
    assert get_num_prefill_decode_query_kv_tokens(step, AttentionType.ENCODER) == (6, 6, 0)
    assert get_num_prefill_decode_query_kv_tokens(step, AttentionType.ENCODER_DECODER) == (4, 6, 1)


def test_missing_encoder_fields_are_refused():
    step = metadata(cross=False)
    with refuses("attn_metadata has no encoder fields; encoder_decoder attention needs them."):
        get_seq_len_block_table_args(step, False, "encoder_decoder")
    with refuses("num_encoder_tokens of the metadata is None; encoder attention needs it."):
        get_num_prefill_decode_query_kv_tokens(step, "encoder")
    with refuses("attn_type is 'prefix'; it must be one of decoder, encoder, encoder_only, encoder_decoder."):
        get_seq_len_block_table_args(step, False, "prefix")
    with refuses("attn_type is 'prefix'; it must be one of decoder, encoder, encoder_only, encoder_decoder."):
        get_num_prefill_decode_query_kv_tokens(step, "prefix")
