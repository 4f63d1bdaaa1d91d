"""What the implementations compute: every option against the reference, on CPU tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support import reference
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
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import AttentionSpec
from torch_core.metadata import (
    EncoderRow,
    SequenceRow,
    build_common_metadata,
    build_dense_metadata,
)
from torch_core.vllm import (
    AttentionScales,
    AttentionType,
    BuilderConfig,
    TorchAttentionImpl,
    TorchAttentionMetadataBuilder,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

SLOPES = [0.5, 0.25, 0.125, 0.0625]
OPTIONS = {
    "plain": ({}, {}, {}),
    "sliding window": ({"sliding_window": 5}, {"window_left": 4}, {}),
    "soft cap": ({"logits_soft_cap": 2.0}, {"logits_soft_cap": 2.0}, {}),
    "soft cap of zero": ({"logits_soft_cap": 0}, {}, {}),
    "sinks": ({"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}, {}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}),
    "alibi": ({"alibi_slopes": SLOPES}, {}, {"alibi_slopes": torch.tensor(SLOPES)}),
    "alibi sqrt": (
        {"alibi_slopes": SLOPES, "use_alibi_sqrt": True},
        {"use_alibi_sqrt": True},
        {"alibi_slopes": torch.tensor(SLOPES)},
    ),
    "local attention": ({"attention_chunk": 8}, {"attention_chunk": 8}, {}),
}  # fmt: skip


@pytest.mark.parametrize("impl_cls", [TritonAttentionImpl, TorchAttentionImpl])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_equals_the_reference(name, impl_cls, rng, within_bound):
    arguments, spec_changes, options = OPTIONS[name]
    case = Case(rng, num_seqs=5, num_tokens=16)
    impl = impl_cls(HEADS, HEAD, SCALE, KV_HEADS, **arguments)
    spec = AttentionSpec(scale=SCALE, **spec_changes)

    found = case.run(impl, metadata_of(case.step))

    within_bound(found, case.expected(spec, None, **options), case.expected(spec, **options))
    assert (found[case.step.num_actual_tokens :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_layers_equal_the_reference(dtype, rng, within_bound):
    case = Case(rng, dtype=dtype)
    spec = AttentionSpec(scale=SCALE)

    found = case.run(TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS), metadata_of(case.step))

    within_bound(found, case.expected(spec, None), case.expected(spec))


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("stored_as_bytes", [False, True])
def test_an_fp8_cache_is_written_and_read_with_the_layers_scales(name, dtype, stored_as_bytes, rng, within_bound):
    case = Case(rng, cache_dtype=dtype)
    layer = AttentionScales.of(k_scale=0.25, v_scale=0.5)
    impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, kv_cache_dtype=name)
    spec = AttentionSpec(scale=SCALE)
    scales: dict[str, Any] = {"k_scale": 0.25, "v_scale": 0.5}

    cache = case.cache.view(torch.uint8) if stored_as_bytes else case.cache
    found = case.run(impl, metadata_of(case.step), layer, cache=cache)

    within_bound(found, case.expected(spec, None, **scales), case.expected(spec, **scales))


def test_a_quantised_query_is_read_with_its_scale(rng, within_bound):
    case = Case(rng, cache_dtype=torch.float8_e4m3fn)
    case.query = (case.query / 0.5).to(torch.float8_e4m3fn)
    impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, kv_cache_dtype="fp8")
    assert impl.supports_quant_query_input
    output = torch.empty(case.query.shape, dtype=torch.bfloat16)

    case.run(impl, metadata_of(case.step), AttentionScales.of(q_scale=0.5), output=output)

    spec = AttentionSpec(scale=SCALE)
    exact = case.expected(spec, q_scale=0.5, k_scale=1.0, v_scale=1.0)
    within_bound(output, exact.to(torch.bfloat16), exact)


def test_the_output_is_stored_quantised_when_it_has_a_scale(rng):
    case = Case(rng)
    output, scale = torch.empty(case.query.shape, dtype=torch.float8_e4m3fn), torch.tensor([0.01])
    impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS)

    case.run(impl, metadata_of(case.step), output=output, output_scale=scale)

    exact = case.run(impl, metadata_of(case.step))
    assert torch.equal(output.float(), (exact / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_flat_tensors_are_taken_as_heads(rng):
    case = Case(rng)
    impl, metadata = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS), metadata_of(case.step)

    flat = case.run(impl, metadata, query=case.query.flatten(1), key=case.key.flatten(1), value=case.value.flatten(1))

    assert torch.equal(flat.view_as(case.query), case.run(impl, metadata))


@pytest.mark.parametrize("name", ["query", "key", "value", "output"])
def test_other_heads_of_as_many_elements_are_refused_before_anything_is_written(name, rng):
    case = Case(rng)
    impl, metadata = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS), metadata_of(case.step)
    given = {"query": case.query, "key": case.key, "value": case.value, "output": torch.empty_like(case.query)}
    tokens, heads, size = given[name].shape
    given[name] = given[name].reshape(tokens * 2, heads // 2, size)
    before = case.cache.clone()
    with pytest.raises(
        InvalidInput, match=rf"{name} has shape .*; it must be \[num_tokens, {heads}, {size}\], or flat"
    ):
        impl.forward(ONES, given["query"], given["key"], given["value"], case.cache, metadata, given["output"])
    assert torch.equal(case.cache.nan_to_num(9.0), before.nan_to_num(9.0))


def test_a_profiling_run_clears_the_output(rng):
    case = Case(rng)

    assert (case.run(TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS), None) == 0).all()


def test_a_layer_that_shares_a_cache_reads_and_does_not_write(rng):
    case = Case(rng)
    metadata = metadata_of(case.step)
    own = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS)
    shared = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, kv_sharing_target_layer_name="layer.0")
    cache, output = case.cache.clone(), torch.empty_like(case.query)
    own.forward(ONES, case.query, case.key, case.value, cache, metadata, output)
    written = cache.clone()

    again = torch.empty_like(output)
    shared.forward(ONES, case.query, case.key * 9, case.value * 9, cache, metadata, again)

    assert torch.equal(again, output)
    assert torch.equal(cache.nan_to_num(7), written.nan_to_num(7))


def test_without_new_keys_nothing_is_written(rng):
    case = Case(rng)
    impl, metadata = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS), metadata_of(case.step)
    cache, output = case.cache.clone(), torch.empty_like(case.query)
    impl.forward(ONES, case.query, case.key, case.value, cache, metadata, output)

    assert torch.equal(case.run(impl, metadata, cache=cache, key=None, value=None), output)


def test_a_decoder_layer_follows_the_batch_when_it_is_not_causal(rng, within_bound):
    case = Case(rng, causal=False)
    spec = AttentionSpec(scale=SCALE, causal=False)

    found = case.run(TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS), metadata_of(case.step))

    within_bound(found, case.expected(spec, None), case.expected(spec))


@pytest.mark.parametrize("flags", [None, [True, False, True]])
def test_a_window_reaches_as_far_to_the_right_of_what_is_not_causal(flags, rng, within_bound):
    case = Case(rng, causal=flags is not None)
    given: dict[str, Any] = {} if flags is None else {"seq_causal": torch.tensor(flags)}
    builder = TritonAttentionMetadataBuilder(SPEC, [], BuilderConfig(num_heads=HEADS), "cpu")
    spec = AttentionSpec(scale=SCALE, causal=flags is not None, window_left=2, window_right=2)

    found = case.run(
        TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, sliding_window=3), builder.build(0, case.step, **given)
    )

    within_bound(found, case.expected(spec, None, **given), case.expected(spec, **given))


@pytest.mark.parametrize("prefix", [0, 8])
def test_each_sequence_follows_its_own_causal_flag(prefix, rng, within_bound):
    case = Case(rng, shared_prefix_rows(4, 2, new=4))
    flags = torch.tensor([True, False, False, True])
    builder = TritonAttentionMetadataBuilder(SPEC, [], BuilderConfig(num_heads=HEADS), "cpu")
    spec = AttentionSpec(scale=SCALE)

    found = case.run(
        TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS), builder.build(prefix, case.step, seq_causal=flags)
    )

    exact = case.expected(spec, seq_causal=flags)
    within_bound(found, case.expected(spec, None, seq_causal=flags), exact)
    assert not torch.allclose(exact, case.expected(spec))


def test_bidirectional_spans_are_seen(rng, within_bound):
    case = Case(rng)
    spans = torch.tensor([[[9, 10]], [[-1, -1]], [[2, 5]]], dtype=torch.int32)
    builder = TritonAttentionMetadataBuilder(SPEC, [], BuilderConfig(num_heads=HEADS), "cpu")
    spec = AttentionSpec(scale=SCALE)

    found = case.run(
        TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS), builder.build(0, case.step, mm_prefix_range=spans)
    )

    exact = case.expected(spec, mm_prefix_range=spans)
    within_bound(found, case.expected(spec, None, mm_prefix_range=spans), exact)
    assert not torch.allclose(exact, case.expected(spec))


@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER, AttentionType.ENCODER_ONLY])
@pytest.mark.parametrize("window", [None, 3])
def test_encoders_attend_to_all_of_their_input_without_a_cache(attn_type, window, rng, within_bound):
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
    query, key, value = (torch.randn(12, heads, HEAD, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    step = build_dense_metadata([5, 1, 4], num_seqs=4, num_tokens=12)
    impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, attn_type=attn_type, sliding_window=window)
    output = torch.full_like(query, float("nan"))

    impl.forward(ONES, query, key, value, None, metadata_of(step, attn_type=attn_type), output)

    side = None if window is None else window - 1
    spec = AttentionSpec(scale=SCALE, causal=False, window_left=side, window_right=side)
    starts = torch.from_numpy(step.query_start_loc.copy())
    arguments = {"spec": spec, "max_query_len": 5, "max_key_len": 5}
    within_bound(
        output,
        reference.attention(query, key, value, starts, starts, **arguments),
        reference.attention(query, key, value, starts, starts, **arguments, compute_dtype=torch.float64),
    )
    assert (output[10:] == 0).all()


@pytest.mark.parametrize("option", ["seq_causal", "mm_prefix_range"])
def test_encoders_follow_flags_and_spans_too(option, rng, within_bound):
    # With spans an encoder is no plain one: a window bounds what else it sees.
    window = None if option == "seq_causal" else 1
    impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, attn_type="encoder", sliding_window=window)
    case = Case(rng, [SequenceRow([5, 6], 0, 5), SequenceRow([7, 8], 0, 6)])
    value = {
        "seq_causal": torch.tensor([True, False]),
        "mm_prefix_range": torch.tensor([[[1, 3]], [[0, 4]]], dtype=torch.int32),
    }[option]
    options: Any = {option: value}
    builder = TritonAttentionMetadataBuilder(SPEC, ["layer.0"], BuilderConfig(num_heads=HEADS), "cpu")

    output = case.run(impl, builder.build(0, case.step, **options))

    side = None if window is None else window - 1
    starts = torch.from_numpy(case.step.query_start_loc.copy())
    arguments = {"spec": AttentionSpec(scale=SCALE, causal=False, window_left=side, window_right=side), option: value}
    inputs = (case.query, case.key, case.value, starts, starts)
    exact = reference.attention(*inputs, **arguments, max_query_len=6, compute_dtype=torch.float64)
    within_bound(output, reference.attention(*inputs, **arguments, max_query_len=6), exact)


def test_cross_attention_writes_the_encoders_keys_once_and_reads_them_afterwards(rng, within_bound):
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
    impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, attn_type="encoder_decoder")
    cache = torch.full(SPEC.shape(NUM_BLOCKS), float("nan"))
    encoder_key, encoder_value = (torch.randn(8, KV_HEADS, HEAD, generator=generator) for _ in "kv")
    lengths, blocks = [6, 2], [[21, 22], [23]]
    for computed, new, written in ((0, 5, True), (5, 1, False)):
        rows = [SequenceRow([5, 6], computed, new), SequenceRow([7, 8], computed, new)]
        encoder_rows = [
            EncoderRow(ids, length, length if written else 0) for ids, length in zip(blocks, lengths, strict=True)
        ]
        step = build_common_metadata(
            rows, block_size=BLOCK, num_blocks=NUM_BLOCKS, encoder_rows=encoder_rows, num_seqs=3, num_tokens=12
        )
        query = torch.randn(12, HEADS, HEAD, generator=generator)
        output = torch.full_like(query, float("nan"))
        keys = (encoder_key, encoder_value) if written else (None, None)

        impl.forward(ONES, query, *keys, cache, metadata_of(step, attn_type=AttentionType.ENCODER_DECODER), output)

        starts = torch.from_numpy(step.query_start_loc.copy())
        ends = torch.tensor([0, 6, 8, 8], dtype=torch.int32)
        arguments = {"spec": AttentionSpec(scale=SCALE, causal=False), "max_query_len": 5, "max_key_len": 6}
        inputs = (query, encoder_key, encoder_value, starts, ends)
        exact = reference.attention(*inputs, **arguments, compute_dtype=torch.float64)
        within_bound(output, reference.attention(*inputs, **arguments), exact)


MISTAKES = {
    "no output": ({"output": None}, InvalidInput, "output is None; pass a tensor like query, which forward writes."),
    "block scales": (
        {"output_block_scale": torch.ones(1)},
        Unsupported,
        "output_block_scale is given; the output can be stored with one static scale only.",
    ),
    "a list": ({"output": [[1.0] * 4]}, InvalidInput, "output is a list; it must be a torch tensor."),
    "a key alone": ({"value": None}, InvalidInput, "value is None; give key and value, or none to write nothing."),
    "another block size": (
        {"cache": torch.zeros(NUM_BLOCKS, 2, 8, KV_HEADS, HEAD)},
        InvalidInput,
        (
            "kv_cache has shape (40, 2, 8, 2, 32); the metadata is for (num_blocks, 2, 4, 2, 32). It was built for "
            "another block size."
        ),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_before_anything_is_written(name, rng):
    changes, error, message = MISTAKES[name]
    case = Case(rng)
    with refuses(message, error):
        case.run(TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS), metadata_of(case.step), **changes)


def test_metadata_of_another_cache_group_is_refused(rng):
    case = Case(rng)
    with refuses("cache_group of the metadata is 0; this layer is in group 1."):
        case.run(TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, cache_group=1), metadata_of(case.step))


def test_a_missing_cache_or_key_is_refused(rng):
    case = Case(rng)
    output = torch.empty_like(case.query)
    decoder = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS)
    with refuses("kv_cache is None; decoder attention reads its keys from it."):
        decoder.forward(ONES, case.query, case.key, case.value, None, metadata_of(case.step), output)
    cache: Any = case.cache.tolist()
    with refuses("kv_cache is a list; it must be a torch tensor."):
        decoder.forward(ONES, case.query, case.key, case.value, cache, metadata_of(case.step), output)
    encoder = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, attn_type="encoder")
    with refuses("key or value is None; encoder attention has no cache to read them from."):
        encoder.forward(ONES, case.query, None, None, None, metadata_of(case.step), output)
    cross = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, attn_type="encoder_decoder")
    with refuses("cross_block_tables of the metadata is None; cross attention needs it. Build it with encoder_rows."):
        cross.forward(ONES, case.query, case.key, case.value, case.cache, metadata_of(case.step), output)


CONSTRUCTION = {
    "small heads": ({"head_size": 16}, "head_size is 16; TritonAttentionImpl needs at least 32."),
    "uneven heads": ({"num_kv_heads": 3}, "num_heads is 4; it must be a multiple of num_kv_heads, 3."),
    "an unknown cache dtype": (
        {"kv_cache_dtype": "nf4"},
        "kv_cache_dtype is 'nf4'; it must be one of auto, float32, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2, int8.",
    ),
    "an empty window": (
        {"sliding_window": 0},
        "sliding_window is 0; it must be an int of at least 1, or None for off.",
    ),
    "a window to two sides": (
        {"sliding_window": (3, 3)},
        "sliding_window is (3, 3); it must be an int of at least 1, or None for off.",
    ),
    "too few sinks": ({"sinks": torch.zeros(3)}, "sinks has shape (3,); it must be (4,), one per query head."),
    "sinks in a list": ({"sinks": [0.0] * 4}, "sinks is a list; it must be a tensor of 4 numbers."),
    "no scale": ({"scale": None}, "scale is None; it must be a number, usually head_size ** -0.5."),
    "a flag as scale": ({"scale": True}, "scale is True; it must be a number, usually head_size ** -0.5."),
    "too few slopes": ({"alibi_slopes": [1.0]}, "alibi_slopes has 1 entries; it must have 4."),
    "a slope without an end": (
        {"alibi_slopes": [1.0, float("inf"), 1.0, 1.0]},
        "alibi_slopes is [1.0, inf, 1.0, 1.0]; it must be of finite numbers.",
    ),
    "an unknown kind": (
        {"attn_type": "prefix"},
        "attn_type is 'prefix'; it must be one of decoder, encoder, encoder_only, encoder_decoder.",
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTION)
def test_layers_that_make_no_sense_are_refused(name):
    changes, message = CONSTRUCTION[name]
    with refuses(message):
        TritonAttentionImpl(**{"num_heads": 4, "head_size": 32, "scale": 0.5, "num_kv_heads": 2, **changes})


def test_small_heads_are_served_on_the_cpu_with_any_number_as_scale():
    scales: list[Any] = [0.5, np.float32(0.5), np.int64(1)]
    for scale in scales:
        assert TorchAttentionImpl(4, 8, scale).head_size == 8


BUILDS = {
    "another block size": (
        {"block_size": 8},
        {},
        ("block_size of the metadata is 8; a, b, c and 1 more layers have 4. Build it with block_size=4."),
    ),
    "another group": (
        {},
        {"cache_group": 2},
        "cache_group of the metadata is 0; a, b, c and 1 more layers have 2. Build it with cache_group=2.",
    ),
    "no encoder": (
        {},
        {"attn_type": AttentionType.ENCODER_DECODER},
        (
            "encoder of the metadata is None; cross attention of a, b, c and 1 more layers needs it. Build it with "
            "encoder_rows."
        ),
    ),
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_batch_for_another_cache_is_refused(name):
    build, config, message = BUILDS[name]
    builder = TorchAttentionMetadataBuilder(SPEC, ["a", "b", "c", "d"], BuilderConfig(num_heads=4, **config), "cpu")
    step = build_common_metadata([SequenceRow([3], 2, 1)], **{"block_size": 4, "num_blocks": 8, **build})
    with refuses(message):
        builder.build(0, step)


def test_a_configuration_of_another_kind_is_refused():
    config: Any = {}
    with refuses("vllm_config is a dict; pass a BuilderConfig."):
        TorchAttentionMetadataBuilder(SPEC, ["a"], config, "cpu")


@pytest.mark.parametrize("prefix", [-4, 2, 8])
def test_a_prefix_that_the_batch_does_not_have_is_refused(prefix):
    builder = TorchAttentionMetadataBuilder(SPEC, [], BuilderConfig(num_heads=4), "cpu")
    step = build_common_metadata([SequenceRow([3, 4], 5, 1)], block_size=4, num_blocks=8)
    with refuses(
        f"common_prefix_len is {prefix}; it must be a multiple of the block size, 4, and at most 5, the tokens that "
        "all sequences had before the step, in the same blocks."
    ):
        builder.build(prefix, step)


def test_a_batch_that_is_no_metadata_is_refused():
    builder = TorchAttentionMetadataBuilder(SPEC, ["a"], BuilderConfig(num_heads=4), "cpu")
    with refuses("common_attn_metadata is a list; build it with build_common_metadata."):
        builder.build(0, [SequenceRow([3], 2, 1)])  # type: ignore[arg-type]
