"""Builders of layers with a recurrent state: the fields by vLLM's names, and batches that they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_core import vllm
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import KVCacheSpec, StateCacheSpec
from torch_core.metadata import SequenceRow, build_common_metadata, metadata_layout, state_layout
from torch_core.ops import run
from torch_core.state.conv_call import CausalConvCall
from torch_core.vllm import BuilderConfig, StepBuffers

STATES = StateCacheSpec(shapes=((3, 8),), dtypes=("float32",))
BLOCKS = KVCacheSpec(num_kv_heads=1, head_size=8, block_size=4, dtype="float32")
SIZES = {"num_seqs": 4, "num_tokens": 16, "max_blocks": 3}
POOL: dict[str, Any] = {"block_size": 4, "num_blocks": 16, "num_slots": 9, **SIZES}
DECODE, CHUNK, PROMPT = (
    SequenceRow([1], 2, 1, "decode", 5),
    SequenceRow([2, 3, 4], 3, 6, "chunk", 7),
    SequenceRow([5], 0, 2, "prompt", 2),
)


def build(name: str, rows: list[SequenceRow], **drafts: Any) -> Any:
    builder = getattr(vllm, f"{name}MetadataBuilder")
    config = BuilderConfig(num_heads=1, mamba_chunk_size=4, num_speculative_tokens=2)
    return builder(STATES, ["layer"], config, "cpu").build(0, build_common_metadata(rows, **POOL), **drafts)


def test_gdn_has_a_slot_and_a_start_for_each_sequence():
    found = build("GDNAttention", [DECODE, CHUNK, PROMPT])
    assert (found.num_decodes, found.num_decode_tokens, found.num_prefills, found.num_prefill_tokens) == (1, 1, 2, 8)
    assert found.non_spec_state_indices_tensor.tolist() == [5, 7, 2, -1]
    assert found.non_spec_query_start_loc.tolist() == [0, 1, 7, 9, 9]
    assert found.has_initial_state.tolist() == [True, True, False, False]
    assert (found.num_actual_tokens, found.num_spec_decodes, found.spec_state_indices_tensor) == (9, 0, None)


def test_gdns_prefills_are_counted_from_the_first_one():
    found = build("GDNAttention", [DECODE, CHUNK, PROMPT])
    assert (found.prefill_query_start_loc.tolist(), found.prefill_state_indices.tolist()) == ([0, 6, 8], [7, 2])
    assert found.prefill_has_initial_state.tolist() == [True, False]
    assert build("GDNAttention", [DECODE]).prefill_state_indices is None


@pytest.mark.parametrize("name", ["GDNAttention", "ShortConvAttention", "LinearAttention", "Mamba2Attention"])
def test_a_prompt_of_one_token_is_a_prefill_whose_slot_has_anothers_state(name):
    found = build(name, [DECODE, SequenceRow([6], 0, 1, "prompt", 6), SequenceRow([7], 1, 1, "late", 7)])
    assert (found.num_decodes, found.num_decode_tokens, found.num_prefills, found.num_prefill_tokens) == (1, 1, 2, 2)
    if name.startswith("ShortConv"):
        assert found.has_initial_states_p.tolist() == [False, True]


def test_a_graph_is_captured_with_decodes_also_of_rows_without_a_past():
    builder = vllm.ShortConvAttentionMetadataBuilder(STATES, ["layer"], BuilderConfig(num_heads=1), "cpu")
    common = build_common_metadata([SequenceRow([6], 0, 1, "prompt", 6)], **POOL)
    assert builder.build(0, common).num_prefills == 1
    found = builder.build_for_cudagraph_capture(common)
    assert (found.num_decodes, found.num_prefills, found.state_indices_tensor_p) == (4, 0, None)


def test_padding_belongs_to_decodes_without_prefills():
    found = build("LinearAttention", [DECODE])
    assert (found.num_decodes, found.num_decode_tokens, found.num_prefills) == (4, 16, 0)
    assert found.state_indices_tensor.tolist() == [5, -1, -1, -1]


def test_a_convolution_has_its_decodes_and_prefills_apart():
    found = build("ShortConvAttention", [DECODE, CHUNK, PROMPT])
    assert (found.state_indices_tensor_d.tolist(), found.query_start_loc_d.tolist()) == ([[5]], [0, 1])
    assert (found.state_indices_tensor_p.tolist(), found.query_start_loc_p.tolist()) == ([7, 2], [0, 6, 8])
    assert found.has_initial_states_p.tolist() == [True, False]
    alone = build("ShortConvAttention", [DECODE])
    assert (alone.query_start_loc_p, alone.state_indices_tensor_p) == (None, None)


def test_mamba2_chunks_end_at_multiples_of_their_size_in_each_sequence():
    found = build("Mamba2Attention", [DECODE, CHUNK, PROMPT])
    assert found.cu_chunk_seqlen_p.tolist() == [0, 1, 5, 6, 8]
    assert (found.seq_idx_p.tolist(), found.last_chunk_indices_p.tolist()) == ([0, 0, 0, 1], [2, 3])
    assert (found.chunk_size, found.prep_initial_states) == (4, True)
    assert build("Mamba2Attention", [DECODE]).seq_idx_p is None


DRAFTS: dict[str, Any] = {
    "num_accepted_tokens": torch.tensor([1, 2, 1], dtype=torch.int32),
    "num_decode_draft_tokens_cpu": torch.tensor([-1, 2, -1]),
    "spec_state_indices": torch.tensor([[5, 0, 0], [6, 7, 8], [2, 0, 0]], dtype=torch.int32),
}
VERIFY = SequenceRow([6, 7], 3, 3, "verify", 6)


def test_gdn_has_spec_decodes_with_a_slot_for_each_token_apart():
    found = build("GDNAttention", [DECODE, VERIFY, PROMPT], **DRAFTS)
    # Kernels of prefills take the decode too.
    assert (found.num_decodes, found.num_prefills, found.num_prefill_tokens) == (0, 2, 3)
    assert (found.uniform_spec_sequence_length, found.spec_sequence_masks_cpu.tolist()) == (3, [False, True, False])
    assert found.prefill_state_indices is found.non_spec_state_indices_tensor
    assert (found.num_spec_decodes, found.num_spec_decode_tokens) == (1, 3)
    assert found.spec_state_indices_tensor.tolist() == [[6, 7, 8]]
    assert (found.spec_query_start_loc.tolist(), found.num_accepted_tokens.tolist()) == ([0, 3], [2])
    assert (found.spec_token_indx.tolist(), found.non_spec_token_indx.tolist()) == ([1, 2, 3], [0, 4, 5])
    assert found.non_spec_query_start_loc.tolist() == [0, 1, 3]
    assert found.non_spec_state_indices_tensor.tolist() == [5, 2]
    assert found.has_initial_state.tolist() == [True, False]


def test_gdn_takes_its_arguments_in_vllms_order_and_rows_in_any():
    builder = vllm.GDNAttentionMetadataBuilder(
        STATES, ["layer"], BuilderConfig(num_heads=1, num_speculative_tokens=2), "cpu"
    )
    common = build_common_metadata([VERIFY, DECODE], **POOL)
    slots = DRAFTS["spec_state_indices"][[1, 0]]
    found: Any = builder.build(0, common, torch.tensor([2, 1]), torch.tensor([2, -1]), spec_state_indices=slots)
    assert (found.spec_state_indices_tensor.tolist(), found.prefill_state_indices.tolist()) == ([[6, 7, 8]], [5])
    alone = builder.build(
        0, build_common_metadata([VERIFY], **POOL), torch.tensor([2]), torch.tensor([2]), spec_state_indices=slots[:1]
    )
    assert (alone.num_prefills, alone.non_spec_query_start_loc, alone.prefill_query_start_loc) == (0, None, None)


def test_a_short_chunk_of_a_prompt_is_no_row_with_drafts():
    chunk = SequenceRow([2, 3, 4], 3, 2, "chunk", 7)
    found = build(
        "ShortConvAttention",
        [VERIFY, DECODE, chunk],
        **(DRAFTS | {"num_decode_draft_tokens_cpu": torch.tensor([2, -1, -1])}),
    )
    assert (found.num_decodes, found.num_prefills, found.state_indices_tensor_p.tolist()) == (2, 1, [7])


@pytest.mark.parametrize("name", ["Mamba1Attention", "ShortConvAttention"])
def test_rows_with_drafts_are_decodes_of_a_mamba_and_have_their_slots(name):
    found = build(name, [DECODE, VERIFY, CHUNK], **DRAFTS)
    assert (found.num_decodes, found.num_decode_tokens, found.num_prefills) == (2, 4, 1)
    assert found.state_indices_tensor_d.tolist() == [[5, 0, 0], [6, 7, 8]]
    assert (found.num_accepted_tokens.tolist(), found.state_indices_tensor_p.tolist()) == ([1, 2], [7])


def test_slots_of_drafts_that_do_not_fit_are_refused():
    with pytest.raises(InvalidInput, match=r"num_accepted_tokens is None; with spec_state_indices it must be .3."):
        build("GDNAttention", [DECODE, VERIFY, PROMPT], **(DRAFTS | {"num_accepted_tokens": None}))
    with pytest.raises(InvalidInput, match=r"spec_state_indices has shape .3, 1.; .* .3, 3."):
        build("ShortConvAttention", [DECODE, VERIFY, PROMPT], **(DRAFTS | {"spec_state_indices": torch.ones(3, 1)}))
    with pytest.raises(Unsupported, match="linear attention has one slot"):
        build("LinearAttention", [DECODE, VERIFY, PROMPT], **DRAFTS)


def test_a_captured_step_reads_the_next_steps_slots_and_starts():
    layout = metadata_layout(**SIZES, extra=state_layout(4))
    buffers = StepBuffers(layout, "cpu")
    builder = vllm.GDNAttentionMetadataBuilder(STATES, ["layer"], BuilderConfig(num_heads=1, max_num_seqs=4), "cpu")
    found = []
    for step, rows in enumerate(([SequenceRow([1], 0, 1, "a", 3)], [DECODE])):
        common = build_common_metadata(rows, **POOL, layout=layout, buffer=buffers.host_buffer(step))
        found.append(builder.build(0, common, arrays=buffers.upload(step)))
    for name in ("has_initial_state", "non_spec_state_indices_tensor", "non_spec_query_start_loc"):
        assert getattr(found[0], name).data_ptr() == getattr(found[1], name).data_ptr()
    assert (found[0].has_initial_state[0], found[0].non_spec_state_indices_tensor[0]) == (True, 5)


def test_the_ops_take_the_fields():
    found = build("GDNAttention", [DECODE, CHUNK, PROMPT])
    states = torch.full((9, 3, 8), torch.nan)
    states[[5, 7]] = 1.0
    call = CausalConvCall(
        x=torch.ones(16, 8),
        weight=torch.ones(8, 4),
        query_start_loc=found.non_spec_query_start_loc,
        cache_indices=found.non_spec_state_indices_tensor,
        has_initial_state=found.has_initial_state,
        conv_states=states,
    )
    out = run(call)["out"]
    assert out[:, 0].tolist() == [4.0] * 7 + [1.0, 2.0] + [0.0] * 7
    assert states[2, :, 0].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("slots", "words"),
    [((5, 9), "sequence 1 is 9; .*from 1 to 8"), ((0, 5), "is 0; .*null slot"), ((5, 5), "is 5, which row 0 has too")],
)
def test_slots_that_cannot_be_are_refused(slots, words):
    rows = [SequenceRow([1 + index], 2, 1, None, slot) for index, slot in enumerate(slots)]
    with pytest.raises(InvalidInput, match=words):
        build_common_metadata(rows, **POOL)


def test_a_cache_of_the_other_kind_and_a_batch_without_slots_are_refused():
    config = BuilderConfig(num_heads=1, mamba_chunk_size=4)
    with pytest.raises(InvalidInput, match="StateCacheSpec"):
        vllm.GDNAttentionMetadataBuilder(BLOCKS, ["layer"], config, "cpu")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="is a StateCacheSpec"):
        vllm.TorchAttentionMetadataBuilder(STATES, ["layer"], config, "cpu")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="mamba_chunk_size"):
        vllm.Mamba2AttentionMetadataBuilder(STATES, ["layer"], BuilderConfig(num_heads=1), "cpu")
    common = build_common_metadata([DECODE], block_size=4, num_blocks=16)
    with pytest.raises(InvalidInput, match="has no state_slots"):
        vllm.GDNAttentionMetadataBuilder(STATES, ["layer"], config, "cpu").build(0, common)


def test_a_batch_that_is_built_leaves_those_that_were_built_before():
    builder = vllm.GDNAttentionMetadataBuilder(STATES, ["layer"], BuilderConfig(num_heads=1, max_num_seqs=4), "cpu")
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 8, "num_slots": 4}
    first, second = (
        builder.build(0, build_common_metadata([SequenceRow([1], computed, 1, None, 1)], **options))
        for computed in (3, 0)
    )
    assert (first.has_initial_state.tolist(), second.has_initial_state.tolist()) == ([True], [False])


def test_a_list_is_no_batch_of_a_layer_with_a_state():
    builder = vllm.GDNAttentionMetadataBuilder(STATES, ["layer"], BuilderConfig(num_heads=1), "cpu")
    with pytest.raises(InvalidInput, match=r"^common_attn_metadata is a list; build it with build_common_metadata\.$"):
        builder.build(0, [])  # type: ignore[arg-type]
