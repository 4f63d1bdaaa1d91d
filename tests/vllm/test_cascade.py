"""A shared prefix, attended once: the same results, and clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.backend_cases import (
    BLOCK,
    HEAD,
    HEADS,
    KV_HEADS,
    NUM_BLOCKS,
    ONES,
    SCALE,
    SPEC,
    Case,
    metadata_of,
    refuses,
    shared_prefix_rows,
)
from torch_core.base.errors import Unsupported
from torch_core.base.specs import AttentionSpec
from torch_core.metadata import (
    EncoderRow,
    SequenceRow,
    build_common_metadata,
    common_prefix_length,
    metadata_layout,
)
from torch_core.vllm import (
    AttentionType,
    BuilderConfig,
    StepBuffers,
    StepGraphs,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 3.0}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}])
def test_cascade_equals_plain_attention(options, new, rng, within_bound):
    case = Case(rng, shared_prefix_rows(5, 6, new=new), num_seqs=8, num_tokens=24)
    prefix = common_prefix_length(case.step)
    assert prefix == 6 * BLOCK
    impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, **options)
    metadata = metadata_of(case.step, prefix=prefix)
    assert metadata.use_cascade

    found, plain = case.run(impl, metadata), case.run(impl, metadata_of(case.step))

    spec = AttentionSpec(scale=SCALE, logits_soft_cap=options.get("logits_soft_cap"))
    within_bound(found, plain, case.expected(spec, sinks=options.get("sinks")))
    assert (found[case.step.num_actual_tokens :] == 0).all()


def test_cascade_without_the_causal_mask_equals_plain_attention(rng, within_bound):
    case = Case(rng, shared_prefix_rows(5, 6, new=3), causal=False)
    impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS)

    found, plain = case.run(impl, metadata_of(case.step, prefix=6 * BLOCK)), case.run(impl, metadata_of(case.step))

    within_bound(found, plain, case.expected(AttentionSpec(scale=SCALE, causal=False)))


def test_cascade_in_several_pieces_equals_plain_attention(rng, within_bound):
    case = Case(rng, shared_prefix_rows(9, 3, new=6), num_seqs=12, num_tokens=72)
    metadata = metadata_of(case.step, prefix=3 * BLOCK)
    assert metadata.cu_prefix_query_lens is not None
    assert metadata.shared_prefix is not None
    assert metadata.cu_prefix_query_lens.tolist() == [0, 32, 54, 54]
    assert metadata.shared_prefix.prefix_block_table.tolist() == [[1, 2, 3]] * 3

    impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS)
    found, plain = case.run(impl, metadata), case.run(impl, metadata_of(case.step))

    within_bound(found, plain, case.expected(AttentionSpec(scale=SCALE)))
    assert (found[case.step.num_actual_tokens :] == 0).all()
    none = metadata_of(case.step)
    assert (none.cu_prefix_query_lens, none.prefix_kv_lens, none.suffix_kv_lens) == (None, None, None)


def test_cascade_stores_a_quantised_output(rng):
    case = Case(rng, shared_prefix_rows(5, 6), num_seqs=8, num_tokens=8)
    impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS)
    scale = torch.tensor([0.05])
    exact = case.run(impl, metadata_of(case.step))
    output = torch.empty(exact.shape, dtype=torch.float8_e4m3fn)

    case.run(impl, metadata_of(case.step, prefix=6 * BLOCK), output=output, output_scale=scale)

    # Half a spacing of e4m3's numbers.
    assert (output.float() * scale - exact).abs().max() <= 2**-4 * exact.abs().max() + 1e-6


@pytest.mark.parametrize("tables", [([1, 2, 3], [1, 4, 5]), ([2, 1, 3], [1, 2, 4]), ([1, 2, 3], [4, 2, 5])])
def test_a_prefix_in_blocks_that_a_sequence_does_not_share_is_refused(tables):
    rows = [SequenceRow(list(table), 2 * BLOCK + 1, 1) for table in tables]
    step = build_common_metadata(rows, block_size=BLOCK, num_blocks=NUM_BLOCKS)
    shared = common_prefix_length(step)
    with refuses(
        f"common_prefix_len is {2 * BLOCK}; it must be a multiple of the block size, {BLOCK}, and at most {shared}, "
        "the tokens that all sequences had before the step, in the same blocks."
    ):
        metadata_of(step, prefix=2 * BLOCK)
    assert metadata_of(step, prefix=shared).use_cascade == (shared > 0)


def test_cascade_refuses_what_it_cannot_serve(rng):
    case = Case(rng, shared_prefix_rows(3, 2))
    metadata = metadata_of(case.step, prefix=8)
    with refuses(
        "cascade attention does not serve a sliding window; build the metadata with common_prefix_len=0.", Unsupported
    ):
        case.run(TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, sliding_window=64), metadata)
    with refuses("cascade attention does not serve ALiBi; build the metadata with common_prefix_len=0.", Unsupported):
        case.run(TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, alibi_slopes=[0.5, 0.25, 0.125, 0.0625]), metadata)


def test_a_refused_cascade_writes_nothing(rng):
    case = Case(rng, shared_prefix_rows(3, 2))
    before, output = case.cache.clone(), torch.empty_like(case.query)
    impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, sliding_window=64)

    with pytest.raises(Unsupported):
        impl.forward(ONES, case.query, case.key, case.value, case.cache, metadata_of(case.step, prefix=8), output)

    assert torch.equal(case.cache.nan_to_num(), before.nan_to_num())


def test_cross_attention_shares_no_prefix(rng):
    rows = shared_prefix_rows(3, 2)
    encoder_rows = [EncoderRow([36], 2, 2), EncoderRow([37], 2, 2), EncoderRow([38], 2, 2)]
    step = build_common_metadata(rows, block_size=BLOCK, num_blocks=NUM_BLOCKS, encoder_rows=encoder_rows)
    config = BuilderConfig(num_heads=HEADS, attn_type=AttentionType.ENCODER_DECODER)
    builder = TritonAttentionMetadataBuilder(SPEC, ["layer.0"], config, "cpu")

    assert not builder.use_cascade_attention(8192, np.ones(64), num_sms=132)
    with refuses("common_prefix_len is 8; encoder_decoder attention does not read the cache of the prefix: use 0."):
        builder.build(2 * BLOCK, step)


def test_a_captured_step_follows_the_lengths_and_tables_of_the_next_upload(rng):
    layout = metadata_layout(num_seqs=4, num_tokens=4, max_blocks=8)
    buffers = StepBuffers(layout, "cpu")
    builder = TritonAttentionMetadataBuilder(SPEC, ["layer.0"], BuilderConfig(num_heads=HEADS), "cpu")
    impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS)
    cache = torch.randn(SPEC.shape(NUM_BLOCKS))
    query = torch.randn(4, HEADS, HEAD)
    graphs, output, metadata = StepGraphs("cpu"), torch.empty_like(query), None

    def step():
        assert metadata is not None
        metadata.update_shared_prefix()
        return impl.forward(ONES, query, None, None, cache, metadata, output)

    first = [SequenceRow([1, 2, 20], 9, 1), SequenceRow([1, 2, 21, 22], 13, 1)]
    second = [SequenceRow([3, 4, 25, 26, 27], 18, 1), SequenceRow([3, 4, 28], 8, 1), SequenceRow([3, 4, 29], 10, 1)]
    for number, rows in enumerate((first, second)):
        common = build_common_metadata(
            rows, block_size=BLOCK, num_blocks=NUM_BLOCKS, num_seqs=4, num_tokens=4, max_blocks=8, layout=layout,
            buffer=buffers.host_buffer(number),
        )  # fmt: skip
        buffers.upload(number)
        if metadata is None:
            metadata = builder.build(2 * BLOCK, common, arrays=buffers.arrays)
            graphs.capture(0, step)

        found = graphs.replay(0).clone()

        eager = impl.forward(ONES, query, None, None, cache, builder.build(2 * BLOCK, common), torch.empty_like(query))
        assert torch.equal(found, eager), f"step {number}"
