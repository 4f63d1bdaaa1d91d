"""Static buffers, graph capture states and step graphs; on the CPU a graph is the function itself."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import KVCacheSpec
from torch_core.metadata import (
    EncoderRow,
    SequenceRow,
    build_common_metadata,
    encoder_layout,
    metadata_layout,
)
from torch_core.vllm import (
    BuilderConfig,
    CommonAttentionState,
    ContextParallel,
    StepBuffers,
    StepGraphs,
    TritonAttentionMetadataBuilder,
    get_num_prefill_decode_query_kv_tokens,
    get_seq_len_block_table_args,
    upload,
)

SPEC = KVCacheSpec(num_kv_heads=2, head_size=32, block_size=4, dtype="float32")


def refuses(message: str, error: type[Exception] = InvalidInput):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def layout_for(size):
    return metadata_layout(num_seqs=size, num_tokens=size, max_blocks=4)


def cross_layout(size):
    extra = encoder_layout(num_seqs=size, num_encoder_tokens=8, max_encoder_blocks=2)
    return metadata_layout(num_seqs=size, num_tokens=size, max_blocks=4, extra=extra)


def decode(size, buffer=None, lengths=(5, 9)):
    rows = [SequenceRow([4 * i + k for k in range(1, 5)], length, 1) for i, length in enumerate(lengths)]
    return build_common_metadata(
        rows, block_size=4, num_blocks=64, num_seqs=size, num_tokens=size, max_blocks=4, layout=layout_for(size),
        buffer=buffer,
    )  # fmt: skip


def test_uploaded_tensors_outlive_the_host_buffer():
    buffer = np.zeros(layout_for(2).num_elements, np.int32)
    arrays = upload(decode(2, buffer), "cpu")
    buffer[:] = 99

    assert arrays["seq_lens"].tolist() == [6, 10]


def test_derived_metadata_is_uploaded_array_by_array():
    arrays = upload(decode(4).unpadded(), "cpu")

    assert {name: tuple(tensor.shape) for name, tensor in arrays.items()} == {
        "query_start_loc": (3,),
        "seq_lens": (2,),
        "block_tables": (2, 4),
        "slot_mapping": (2,),
        "positions": (2,),
    }


def test_derived_metadata_takes_its_encoder_fields_along():
    step = build_common_metadata(
        [SequenceRow([1], 1, 1)], block_size=4, num_blocks=8, encoder_rows=[EncoderRow([2], 3, 3)], num_seqs=2
    )

    assert upload(step.unpadded(), "cpu")["cross_slot_mapping"].tolist() == [8, 9, 10]


def test_static_tensors_keep_their_addresses_and_take_each_step_in_one_copy(monkeypatch):
    buffers = StepBuffers(layout_for(4), "cpu")
    addresses = {name: tensor.data_ptr() for name, tensor in buffers.arrays.items()}
    copies = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *args, **kw: copies.append(1) or copy(self, *args, **kw))
    for step, lengths in enumerate([(5, 9), (6, 10, 3), (7,)]):
        host = decode(4, buffers.host_buffer(step), lengths)

        arrays = buffers.upload(step)

        assert len(copies) == step + 1
        assert arrays["seq_lens"].tolist() == host.seq_lens.tolist()
        assert arrays["block_tables"].tolist() == host.block_tables.tolist()
        assert {name: tensor.data_ptr() for name, tensor in arrays.items()} == addresses


def test_a_host_buffer_is_not_given_out_before_its_copy():
    buffers = StepBuffers(layout_for(4), "cpu", depth=2)
    first, second = buffers.host_buffer(0), buffers.host_buffer(1)
    assert not np.shares_memory(first, second)

    with pytest.raises(InvalidInput, match=r"^step is 2; all 2 host buffers are taken \(oldest step 0\): upload one"):
        buffers.host_buffer(2)
    buffers.upload(0)
    assert buffers.host_buffer(2) is first


def test_steps_in_flight_have_numbers_of_their_own():
    buffers = StepBuffers(layout_for(4), "cpu")
    buffers.host_buffer(0)
    for _ in range(2):
        with refuses("step is 0; it has a host buffer: steps in flight need different numbers."):
            buffers.host_buffer(0)
        if 0 in buffers._taken:
            buffers.upload(0)
    with refuses("depth is 0; it must be an int of at least 1."):
        StepBuffers(layout_for(4), "cpu", depth=0)


def test_a_step_without_a_buffer_cannot_be_uploaded():
    with refuses("step is 3; it took no host buffer: build into host_buffer(3) first."):
        StepBuffers(layout_for(4), "cpu").upload(3)


@pytest.fixture
def builder():
    return TritonAttentionMetadataBuilder(SPEC, ["layer.0"], BuilderConfig(num_heads=4), "cpu")


@pytest.fixture
def state(builder):
    return CommonAttentionState(builder, layout_for, "cpu")


def test_captured_metadata_is_empty_until_a_step_is_prepared(state):
    with state.graph_capture(max_batch_size=8):
        metadata = state.graph_capture_get_metadata_for_batch(4)
    assert metadata.seq_lens.tolist() == [0] * 4
    assert metadata.slot_mapping.tolist() == [-1] * 4
    assert metadata.max_query_len == 1

    step = decode(4, state.host_buffer(4, step=0))
    state.prepare_graph_input_buffers(4, 0, step)

    assert metadata.seq_lens.tolist() == [6, 10, 0, 0]
    assert metadata.slot_mapping.tolist() == step.slot_mapping.tolist()
    assert metadata.block_table.tolist() == step.block_tables.tolist()
    inputs = state.get_graph_input_buffers(4)
    assert sorted(inputs) == ["block_tables", "query_start_loc", "seq_lens", "slot_mapping"]
    assert inputs["seq_lens"].data_ptr() == metadata.seq_lens.data_ptr()


def test_encoder_decoder_models_have_more_inputs(builder):
    state = CommonAttentionState(builder, cross_layout, "cpu")
    with state.graph_capture(max_batch_size=2):
        metadata = state.graph_capture_get_metadata_for_batch(2, is_encoder_decoder_model=True)

    assert metadata.encoder_seq_lens.tolist() == [0, 0]
    assert metadata.cross_slot_mapping.tolist() == [-1] * 8
    assert set(state.get_graph_input_buffers(2, is_encoder_decoder_model=True)) == {
        "block_tables", "query_start_loc", "seq_lens", "slot_mapping",
        "encoder_seq_lens", "cross_slot_mapping", "cross_block_tables",
    }  # fmt: skip


def test_captured_metadata_counts_the_rows_that_a_step_may_fill(builder):
    state = CommonAttentionState(builder, cross_layout, "cpu")
    with state.graph_capture(max_batch_size=2):
        metadata = state.graph_capture_get_metadata_for_batch(2, True)

    assert metadata.num_actual_tokens == 2
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (2, 2, 0)
    assert (metadata.max_prefill_seq_len, metadata.max_decode_seq_len) == (0, 16)
    assert get_num_prefill_decode_query_kv_tokens(metadata, "encoder_decoder") == (0, 8, 2)
    assert get_seq_len_block_table_args(metadata, False, "encoder_decoder")[1] == 8


def test_captured_rows_of_several_tokens_are_prefills(builder):
    state = CommonAttentionState(
        builder, lambda size: metadata_layout(num_seqs=size, num_tokens=3 * size, max_blocks=4), "cpu"
    )
    with state.graph_capture(max_batch_size=2):
        metadata = state.graph_capture_get_metadata_for_batch(2)

    assert (metadata.num_prefills, metadata.num_prefill_tokens, metadata.num_decodes) == (2, 6, 0)
    assert metadata.max_prefill_seq_len == 16


def test_a_clone_starts_with_nothing_captured(state):
    with state.graph_capture(max_batch_size=4):
        state.graph_capture_get_metadata_for_batch(4)
        clone = state.graph_clone(4)

    with refuses("batch_size is 4; captured are: none. Pad to one of them."):
        clone.get_graph_input_buffers(4)


def test_capture_mistakes_are_refused(state):
    with refuses("Nothing is being captured; do this inside `with state.graph_capture(max_batch_size)`."):
        state.graph_capture_get_metadata_for_batch(4)
    with state.graph_capture(max_batch_size=4):
        state.graph_capture_get_metadata_for_batch(2)
        state.graph_capture_get_metadata_for_batch(4)
        with refuses("batch_size is 8; this capture is for 1 to 4 sequences."):
            state.graph_capture_get_metadata_for_batch(8)
        with refuses("layout has no encoder fields; add those of encoder_layout for cross attention."):
            state.graph_capture_get_metadata_for_batch(2, is_encoder_decoder_model=True)
    with refuses("batch_size is 3; captured are: 2, 4. Pad to one of them."):
        state.host_buffer(3, step=0)
    with refuses(
        "metadata is padded to 2 sequences and 2 tokens; the graph of batch size 4 has another layout. Build it "
        "with that layout."
    ):
        state.prepare_graph_input_buffers(4, 0, decode(2))


def test_a_replay_reads_what_its_inputs_hold_now():
    graphs, value = StepGraphs("cpu"), torch.zeros(2)
    graphs.capture(2, lambda: value * 2)
    value.fill_(3)

    assert graphs.replay(2).tolist() == [6, 6]
    assert graphs.keys == (2,)


def test_a_size_that_was_not_captured_is_refused():
    graphs = StepGraphs("cpu")
    graphs.capture(2, lambda: None)
    graphs.capture(4, lambda: None)
    with refuses("key is 3; captured are: 2, 4."):
        graphs.replay(3)
    with refuses("key is 4; a graph was captured for it: give each graph its own key."):
        graphs.capture(4, lambda: None)


def test_another_cache_group_reuses_the_metadata_with_its_own_tables(builder):
    metadata = builder.build(0, decode(2))
    tables, slots = torch.full((2, 3), 7, dtype=torch.int32), torch.tensor([28, 29], dtype=torch.int32)
    other = TritonAttentionMetadataBuilder(SPEC, ["layer.1"], BuilderConfig(num_heads=4, cache_group=1), "cpu")

    updated = other.update_block_table(metadata, tables, slots)

    assert updated.block_table is tables
    assert updated.slot_mapping is slots
    assert updated.cache_group == 1
    assert updated.seq_lens is metadata.seq_lens
    assert metadata.cache_group == 0


def test_a_draft_step_is_built_like_any_other(builder):
    draft = builder.build_for_drafting(decode(2), draft_index=1)

    assert draft.seq_lens.tolist() == [6, 10]
    assert not draft.use_cascade


def test_rows_are_counted_as_decodes_and_prefills(builder):
    rows = [SequenceRow([1, 2], 4, 1), SequenceRow([3], 0, 3), SequenceRow([4], 2, 1)]

    metadata = builder.build(0, build_common_metadata(rows, block_size=4, num_blocks=8, num_seqs=5))

    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 2)
    assert (metadata.num_prefills, metadata.num_prefill_tokens) == (1, 3)
    assert (metadata.max_prefill_seq_len, metadata.max_decode_seq_len) == (3, 5)


def test_a_prepared_step_has_a_ranks_lengths_and_slots_where_the_captured_one_reads_them():
    place = ContextParallel(dcp_world_size=2, dcp_rank=1)
    builder = TritonAttentionMetadataBuilder(SPEC, [], BuilderConfig(num_heads=2, context_parallel=place), "cpu")
    state = CommonAttentionState(builder, layout_for, "cpu")
    with state.graph_capture(2):
        captured = state.graph_capture_get_metadata_for_batch(2)
    assert captured.dcp_local_seq_lens.tolist() == [0, 0]

    rows = [SequenceRow([1, 2], 9, 1), SequenceRow([3], 4, 1)]
    common = build_common_metadata(
        rows, block_size=8, num_blocks=64, num_seqs=2, num_tokens=2, max_blocks=4, layout=layout_for(2),
        buffer=state.host_buffer(2, 0),
    )  # fmt: skip
    state.prepare_graph_input_buffers(2, 0, common)

    # Of 10 tokens and of 5, this rank has those at odd positions; the new ones are at 9 and at 4.
    assert captured.dcp_local_seq_lens.tolist() == [5, 2]
    assert captured.slot_mapping.tolist() == [2 * 4, -1]


def test_a_step_over_ranks_is_captured_empty_whatever_batch_it_is_captured_with():
    place = ContextParallel(dcp_world_size=2)
    builder = TritonAttentionMetadataBuilder(SPEC, [], BuilderConfig(num_heads=2, context_parallel=place), "cpu")
    buffers = StepBuffers(layout_for(2), "cpu")
    common = build_common_metadata(
        [SequenceRow([1, 2], 9, 1)], block_size=8, num_blocks=64, num_seqs=2, num_tokens=2, max_blocks=4,
        layout=layout_for(2), buffer=buffers.host_buffer(0),
    )  # fmt: skip

    captured = builder.build_for_cudagraph_capture(common, arrays=buffers.upload(0))

    assert captured.dcp_local_seq_lens is not None
    assert captured.dcp_local_seq_lens.tolist() == captured.seq_lens.tolist() == [0, 0]
    assert captured.slot_mapping.tolist() == [-1, -1]
