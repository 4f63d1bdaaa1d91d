"""What the attention plans choose from shapes, and what they refuse."""

from __future__ import annotations

import pytest

from tests.support.attention_plans import dense_plan, paged_plan
from torch_core.attention.kernels.split.plan import chunk_size
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import ArraySpec, AttentionSpec
from torch_core.launch.plan import DeviceLimits, OperationPlan


def _kernels(plan: OperationPlan) -> list[str]:
    return [launch.name.removeprefix("attention_").removesuffix("_kernel") for launch in plan.launches]


def test_decode_runs_chunks_and_merges_them():
    assert _kernels(paged_plan()) == ["split", "combine"]


@pytest.mark.parametrize(
    ("num_seqs", "query_len", "ahead"), [(4, 1, True), (8, 1, True), (1, 1, False), (32, 8, False)]
)
def test_little_scratch_of_few_chunks_is_read_beside_the_lengths(num_seqs, query_len, ahead):
    tables = ArraySpec((num_seqs, 512), "int32")
    plan = paged_plan(num_seqs=num_seqs, num_tokens=num_seqs * query_len, max_query_len=query_len, block_tables=tables)
    assert dict(plan.launches[1].constexprs)["AHEAD"] == ahead


@pytest.mark.parametrize(("shared_memory", "stages"), [(232_448, 3), (148_480, 3), (101_376, 2)])
def test_heads_of_512_have_as_many_stages_as_fit(shared_memory, stages):
    plan = paged_plan(head_size=512, limits=DeviceLimits(shared_memory=shared_memory))
    assert plan.launches[0].num_stages == dict(plan.launches[0].constexprs)["STAGES"] == stages


def test_a_full_batch_of_short_tables_needs_no_merge():
    plan = paged_plan(num_seqs=256, block_tables=ArraySpec((256, 32), "int32"))
    assert _kernels(plan) == ["split"]
    assert plan.scratch == ()


def test_one_long_query_runs_the_rows_kernel_alone():
    limits = DeviceLimits(arch=80)
    assert _kernels(paged_plan(num_seqs=1, num_tokens=100, max_query_len=100, limits=limits)) == ["rows"]


def test_a_mixed_batch_runs_both_kernels():
    limits = DeviceLimits(arch=80)
    assert _kernels(paged_plan(num_tokens=400, max_query_len=100, limits=limits)) == ["rows", "split", "combine"]


def test_speculative_rows_run_the_split_kernel():
    assert _kernels(paged_plan(num_tokens=32, max_query_len=8)) == ["split", "combine"]


def test_bidirectional_ranges_run_the_rows_kernel():
    assert _kernels(paged_plan(mm_prefix_range=ArraySpec((4, 1, 2), "int32"))) == ["rows"]


def test_dense_attention_runs_the_rows_kernel():
    assert _kernels(dense_plan(max_query_len=100)) == ["rows"]


def test_a_window_bounds_the_scratch():
    full, windowed = (paged_plan(spec=AttentionSpec(scale=1.0, window_left=left)) for left in (None, 127))
    assert dict(windowed.scratch)["partial_out"].size < dict(full.scratch)["partial_out"].size


def test_the_lse_is_an_output_when_asked_for():
    assert [name for name, _ in paged_plan(with_lse=True).outputs] == ["out", "lse"]
    assert [name for name, _ in paged_plan().outputs] == ["out"]


def test_an_output_with_strides_is_planned_in_place():
    plan = paged_plan(out=ArraySpec((4, 8, 128), "bfloat16", (2048, 256, 1)))
    assert plan.in_place == ("out",)
    assert plan.outputs == ()


def test_a_fixed_chunk_size_holds_for_every_batch_size():
    for num_seqs in (1, 64):
        plan = paged_plan(num_seqs=num_seqs, kv_chunk_size=256)
        assert dict(plan.launches[0].constexprs)["CHUNK"] == 256


def test_chunks_grow_with_the_static_size_of_the_batch():
    sizes = [chunk_size(num_seqs=n, table_tokens=8192, head_programs=8, key_bytes=2) for n in (1, 2, 8, 64, 4096)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "heads"),
    [(64, 32, 1), (128, 32, 2), (256, 32, 4), (1024, 32, 8), (1024, 12, 4)],
)
def test_a_program_merges_several_heads_of_many_rows(num_seqs, num_heads, heads):
    cache = ArraySpec((64, 2, 16, 4, 128), "bfloat16")
    query, tables = ArraySpec((num_seqs, num_heads, 128), "bfloat16"), ArraySpec((num_seqs, 576), "int32")
    _, combine = paged_plan(num_seqs=num_seqs, query=query, block_tables=tables, kv_cache=cache).launches
    assert (combine.grid, dict(combine.constexprs)["HEADS"]) == ((num_seqs, num_heads // heads), heads)


@pytest.mark.parametrize("key_bytes", [1, 2, 4])
@pytest.mark.parametrize("table_tokens", [16, 1000, 1088, 2112, 8192, 8256, 100_000])
def test_chunks_are_multiples_of_128_of_about_equal_length(table_tokens, key_bytes):
    for num_seqs in (1, 3, 16, 24, 200):
        chunk = chunk_size(num_seqs=num_seqs, table_tokens=table_tokens, head_programs=8, key_bytes=key_bytes)
        assert chunk % 128 == 0
        chunks = -(-table_tokens // chunk)
        # Rounding up to one of four sizes in each octave leaves the last chunk at most so much shorter.
        small = num_seqs * table_tokens * 8 <= 1 << 17
        assert small or chunks == 1 or chunk <= 1.25 * -(-table_tokens // chunks) + 128


@pytest.mark.parametrize(
    ("blocks", "changes", "size_and_number"),
    [
        (4096, {}, None),
        (4160, {}, (1280, 64)),
        (65536, {}, (16384, 64)),
        (65536, {"kv_chunk_size": 256}, None),
        (65536, {"spec": AttentionSpec(scale=1.0, window_left=127)}, None),
    ],
)
def test_chunks_of_one_sequence_in_a_wide_table_follow_from_its_length(blocks, changes, size_and_number):
    plan = paged_plan(num_seqs=1, block_tables=ArraySpec((1, blocks), "int32"), **changes)
    constants = dict(plan.launches[0].constexprs)
    assert constants["LEAST"] == (None if size_and_number is None else 128)
    if size_and_number is not None:
        assert (constants["CHUNK"], dict(plan.scratch)["partial_max"].shape[1]) == size_and_number


@pytest.mark.parametrize(
    ("num_seqs", "blocks", "changes", "keys_and_number"),
    [
        # One chunk for the longest: nothing to merge.
        (128, 256, {}, None),
        (256, 256, {}, None),
        (256, 576, {}, (1024, 8)),
        (128, 576, {}, (1024, 9)),
        (64, 576, {}, (704, 9)),
        # Two waves at most are filled: one by four chunks, or three; two by six.
        (48, 256, {}, (1024, 4)),
        (64, 188, {}, (1024, 3)),
        (64, 250, {}, (768, 6)),
        # Eight chunks in runs of two.
        (32, 576, {}, (1024, 8)),
        (32, 384, {}, (256, 4)),
        # The chunks of a full table are small.
        (4, 64, {}, None),
        (128, 576, {"kv_chunk_size": 4096}, None),
        (128, 576, {"spec": AttentionSpec(scale=1.0, window_left=4999)}, None),
    ],
)
def test_sequences_in_a_wide_table_have_smaller_chunks(num_seqs, blocks, changes, keys_and_number):
    plan = paged_plan(num_seqs=num_seqs, block_tables=ArraySpec((num_seqs, blocks), "int32"), **changes)
    constants = dict(plan.launches[0].constexprs)
    assert (constants["LEAST"] is not None) == (keys_and_number is not None)
    if keys_and_number is not None:
        assert (constants["LEAST"], dict(plan.scratch)["partial_max"].shape[1]) == keys_and_number


@pytest.mark.parametrize(
    ("num_seqs", "blocks", "keys"),
    [(1, 512, 128), (64, 32, 128), (128, 32, 64), (64, 512, 64), (32, 64, 128), (32, 128, 64)],
)
def test_tiles_are_tall_where_a_multiprocessor_has_one_program_of_them(num_seqs, blocks, keys):
    plan = paged_plan(num_seqs=num_seqs, block_tables=ArraySpec((num_seqs, blocks), "int32"))
    assert dict(plan.launches[0].constexprs)["BLOCK_N"] == keys


def test_partial_results_of_smaller_chunks_have_a_limit():
    wide = ArraySpec((512, 576), "int32")
    for tokens in (1, 8):
        query = ArraySpec((512 * tokens, 8, 128), "bfloat16")
        plan = paged_plan(num_seqs=512, query=query, block_tables=wide, max_query_len=tokens)
        assert dict(plan.launches[0].constexprs)["LEAST"] is not None
        assert dict(plan.scratch)["partial_out"].size * 4 <= 1 << 26


def test_equal_shapes_share_a_plan():
    assert paged_plan() is paged_plan()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"query": ArraySpec((4, 8), "bfloat16")}, r"query has shape \[4, 8\]; it must have 3 axes"),
        ({"query": ArraySpec((4, 7, 128), "bfloat16")}, "query has 7 heads and the key cache 2"),
        ({"query": ArraySpec((4, 8, 64), "bfloat16")}, "with head_size = 64, that of query"),
        ({"query": ArraySpec((0, 8, 128), "bfloat16")}, "call is an empty paged_attention; return empty outputs"),
        ({"kv_cache": ArraySpec((64, 3, 16, 2, 128), "bfloat16")}, "kv_cache has shape"),
        ({"kv_cache": (ArraySpec((9, 16, 2, 128), "bfloat16"), ArraySpec((9, 8, 2, 128), "bfloat16"))},
         "with block_size = 16, that of key_cache"),
        ({"kv_cache": (ArraySpec((9, 16, 128), "bfloat16"),) * 2}, "must have 4 axes"),
        ({"seq_lens": ArraySpec((3,), "int32")}, r"seq_lens has shape \[3\]; .* with num_seqs = 4"),
        ({"seq_lens": ArraySpec((4,), "int64")}, "seq_lens is int64; it must be int32"),
        ({"block_tables": ArraySpec((3, 512), "int32")}, "block_tables has shape"),
        ({"max_query_len": -1}, "max_query_len is -1"),
        ({"out": ArraySpec((4, 8, 64), "bfloat16")}, "out has shape"),
        ({"sinks": ArraySpec((2,), "float32")}, r"sinks has shape \[2\]"),
        ({"k_scale": ArraySpec((2,), "float32")}, "must be a number or one element"),
        ({"k_scale_cache": ArraySpec((64, 16, 2), "float32")}, "go together; give both or none"),
        ({"k_scale_cache": ArraySpec((64, 16, 1), "float32"), "v_scale_cache": ArraySpec((64, 16, 1), "float32")},
         r"k_scale_cache has shape \[64, 16, 1\]"),
        ({"kv_cache": ArraySpec((64, 2, 16, 2, 128), "float16")}, "query is bfloat16 and the cache float16"),
        ({"query": ArraySpec((4, 8, 128), "int8")}, "query is int8"),
        ({"out_dtype": "int8"}, "out is int8"),
        ({"kv_cache": (ArraySpec((9, 16, 2, 128), "bfloat16"), ArraySpec((9, 16, 2, 128), "float16"))},
         "keys are bfloat16 and values float16"),
        ({"mm_prefix_range": ArraySpec((4, 2), "int32")}, "mm_prefix_range has shape"),
        ({"qq_bias": ArraySpec((4, 5), "float32")}, "qq_bias has shape"),
        ({"seq_causal": ArraySpec((5,), "bool")}, "seq_causal has shape"),
        ({"kv_chunk_size": 100}, "kv_chunk_size is 100"),
        ({"kv_chunk_size": 64}, "kv_chunk_size is 64"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(changes, text):
    with pytest.raises(InvalidInput, match=text):
        paged_plan(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"query": ArraySpec((4, 8, 576), "bfloat16"), "kv_cache": ArraySpec((64, 2, 16, 2, 576), "bfloat16")},
         "head_size is 576 and its limit 512, which .* 'triton' does not serve; implementation 'torch' or 'xla' does"),
        ({"kv_cache": ArraySpec((4, 2, 512, 2, 128), "bfloat16")}, "block_size is 512"),
        ({"query": ArraySpec((4, 8, 128), "bfloat16", (1, 4, 32))}, "query has strides"),
        ({"block_tables": ArraySpec((4, 512), "int32", (1024, 2))}, "block_tables has strides"),
        ({"alibi_slopes": ArraySpec((8,), "float32", (2,))}, "alibi_slopes has strides"),
        ({"kv_cache": ArraySpec((64, 2, 16, 2, 128), "int8"), "k_scale_cache": ArraySpec((64, 16, 2), "float32"),
          "v_scale_cache": ArraySpec((64, 16, 2), "float32", (64, 4, 2))}, "have different strides"),
    ],
)  # fmt: skip
def test_combinations_that_the_kernels_do_not_serve_say_why(changes, text):
    with pytest.raises(Unsupported, match=text):
        paged_plan(**changes)


def test_dense_8_bit_keys_need_a_paged_cache():
    keys = ArraySpec((300, 2, 128), "float8_e4m3fn")
    with pytest.raises(InvalidInput, match="8-bit keys need a paged cache"):
        dense_plan(key=keys, value=keys)


def test_a_dense_fp8_query_is_refused():
    fp8 = ArraySpec((300, 2, 128), "float8_e4m3fn")
    with pytest.raises(Unsupported, match=r"query is float8_e4m3fn, which .* no implementation does"):
        dense_plan(query=ArraySpec((300, 8, 128), "float8_e4m3fn"), key=fp8, value=fp8)


@pytest.mark.parametrize("arch", [80, 86])
def test_e4m3_is_refused_where_the_device_has_no_instructions_for_it(arch):
    cache = ArraySpec((64, 2, 16, 2, 128), "float8_e4m3fn")
    with pytest.raises(
        Unsupported, match=rf"kv_cache is float8_e4m3fn on a device of compute capability {arch / 10}; .* need 8\.9"
    ):
        paged_plan(kv_cache=cache, limits=DeviceLimits(arch=arch))
    assert _kernels(paged_plan(kv_cache=cache, limits=DeviceLimits(arch=89))) == ["split", "combine"]
