"""Arguments of the CPU operations that do not fit are refused, with a message that names them, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.attention_cases import dense_case, paged_case
from torch_core import ops
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import AttentionSpec


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def paged(**changes: Any) -> None:
    """Two sequences of 20 and 3 tokens with 2 and 1 new ones, 6 heads on 2, head size 32, block size 16."""
    case = paged_case(1, seq_lens=[20, 3], query_lens=[2, 1])
    out = torch.zeros(3, 6, 32)
    try:
        case.run(ops.paged_attention, **{"out": out, **changes})
    finally:
        assert out.count_nonzero() == 0 or not changes


def test_arguments_that_fit_are_taken():
    paged()


PAGED = [
    ({"query": [1.0]}, r"query is a list; it must be a torch tensor"),
    ({"query": torch.ones(3, 6)}, r"query has shape \[3, 6\]; it must have 3 axes"),
    ({"query": torch.ones(3, 6, 32, dtype=torch.float64)}, r"query is float64 and the cache float32; cast one of them"),
    ({"query": torch.ones(3, 0, 32)}, r"with num_heads = 0, that of query"),
    ({"query": torch.ones(3, 6, 16)}, r"kv_cache has shape .*, head_size\] with head_size = 16, that of query"),
    (
        {"query": torch.ones(3, 5, 32), "out": None},
        r"query has 5 heads and the key cache 2; the first must be a multiple of the second",
    ),
    ({"kv_cache": torch.ones(4, 16, 2, 32)}, r"kv_cache has shape \[4, 16, 2, 32\]; it must have 5 axes"),
    ({"kv_cache": torch.ones(4, 3, 16, 2, 32)}, r"it must be \[num_blocks, 2, block_size, num_kv_heads, head_size\]"),
    ({"kv_cache": torch.ones(4, 2, 16, 2, 32).double()}, r"query is float32 and the cache float64; cast one of them"),
    ({"kv_cache": torch.ones(0, 2, 16, 2, 32)}, r"the cache has no block; block 0 at least must be there"),
    ({"kv_cache": torch.ones(4, 2, 16, 2, 32, device="meta")}, r"kv_cache is on meta and the other tensors on cpu"),
    (
        {"kv_cache": (torch.ones(4, 16, 2, 32), torch.ones(4, 8, 2, 32))},
        r"value_cache has shape \[4, 8, 2, 32\]; it must be \[.*\] with block_size = 16, that of key_cache",
    ),
    ({"block_tables": ints([0], [0], dtype=torch.int64)}, r"block_tables is int64; it must be int32"),
    ({"block_tables": ints(0, 0)}, r"block_tables has shape \[2\]; it must have 2 axes"),
    ({"block_tables": ints([0])}, r"block_tables has shape \[1, 1\]; .* with num_seqs = 2, that of query_start_loc"),
    ({"block_tables": ints([1, 6], [1, 0])}, r"block_tables\[0, 1\] is 6; the cache has blocks 0 to 5"),
    ({"block_tables": ints([1, 2], [-1, 0])}, r"block_tables\[1, 0\] is -1; the cache has blocks 0 to 5"),
    ({"seq_lens": ints(20)}, r"seq_lens has shape \[1\]; .* with num_seqs = 2, that of query_start_loc"),
    ({"seq_lens": torch.ones(2)}, r"seq_lens is float32; it must be int32"),
    ({"seq_lens": ints(20, 65)}, r"seq_lens\[1\] is 65; a row of block_tables holds 0 to 4 x 16 = 64 tokens"),
    ({"seq_lens": ints(-1, 3)}, r"seq_lens\[0\] is -1; a row of block_tables holds 0 to"),
    ({"seq_lens": ints(1, 3)}, r"seq_lens\[0\] is 1 and the sequence has 2 query rows; the new tokens are part of it"),
    (
        {"query_start_loc": ints(1, 2, 3)},
        r"query_start_loc starts with \[1\]; it must hold num_seqs \+ 1 offsets from 0",
    ),
    ({"query_start_loc": ints(0, 2, 1)}, r"query_start_loc\[2\] is 1, less than 2 before it; offsets never fall"),
    ({"query_start_loc": ints(0, 2, 4)}, r"query_start_loc\[-1\] is 4; query has only 3 rows"),
    ({"max_query_len": 1}, r"sequence 0 has 2 rows in query_start_loc; the stated maximum is 1"),
    ({"max_query_len": -1}, r"max_query_len is -1; it must be a static int, 0 or more"),
    ({"max_query_len": 2.0}, r"max_query_len is 2.0; it must be a static int, 0 or more"),
    ({"max_query_len": True}, r"max_query_len is True; it must be a static int, 0 or more"),
    ({"out_scale": 1.0}, r"out is float32 and out_scale is given; a scale is for an fp8 output: pass an fp8 out"),
    ({"k_scale": torch.ones(2)}, r"k_scale has shape \[2\]; it must be a number or one element"),
    ({"v_scale": torch.ones(1).double()}, r"v_scale is float64; it must be float32"),
    (
        {"alibi_slopes": torch.ones(2)},
        r"alibi_slopes has shape \[2\]; .* with num_heads = 6, that of query",
    ),
    ({"sinks": torch.ones(6, dtype=torch.int32)}, r"sinks is int32; it must be a floating point type"),
    (
        {"mm_prefix_range": torch.ones(2, 1, 3).int()},
        r"mm_prefix_range has shape .*; it must be \[num_seqs, ranges, 2\]",
    ),
    ({"seq_causal": torch.ones(3).bool()}, r"seq_causal has shape \[3\]; it must be \[num_seqs\] with num_seqs = 2"),
    ({"seq_causal": torch.ones(2)}, r"seq_causal is float32; it must be bool"),
    ({"qq_bias": torch.ones(1, 2)}, r"qq_bias has shape \[1, 2\]; it must be \[bias_rows, bias_rows\]"),
    ({"qq_bias": torch.ones(1, 1)}, r"qq_bias has shape \[1, 1\]; both sides must be at least max_query_len = 2"),
    (
        {"relative_bias": torch.ones(6, 4)},
        r"relative_bias has shape \[6, 4\]; it must have an odd number of distances, from -D to D",
    ),
    ({"k_scale_cache": torch.ones(6, 16, 2)}, r"k_scale_cache and v_scale_cache go together; give both or none"),
    (
        {"k_scale_cache": torch.ones(6, 16, 1), "v_scale_cache": torch.ones(6, 16, 2)},
        r"k_scale_cache has shape \[6, 16, 1\]; .* with num_kv_heads = 2, that of kv_cache",
    ),
]


@pytest.mark.parametrize(("changes", "message"), PAGED)
def test_paged_attention_names_what_does_not_fit(changes, message):
    with pytest.raises(InvalidInput, match=message):
        paged(**changes)


@pytest.mark.parametrize("function", [ops.paged_attention, ops.attention], ids=["paged", "dense"])
def test_an_argument_that_an_operation_does_not_have_is_no_argument(function):
    case = paged_case(1, seq_lens=[3], query_lens=[1]) if function is ops.paged_attention else None
    case = case or dense_case(1, query_lens=[3], key_lens=[5])
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        case.run(function, window=3)


def test_garbage_after_the_last_block_of_a_sequence_is_no_error():
    paged(block_tables=ints([1, 2, -1], [3, 1 << 30, -5]), out=None)


def test_an_output_of_another_shape_is_refused():
    with pytest.raises(InvalidInput, match=r"out has shape \[3, 6, 16\]; it must be \[3, 6, 32\]"):
        paged(out=torch.zeros(3, 6, 16))


def test_an_output_scale_without_an_output_is_refused():
    with pytest.raises(InvalidInput, match="a scale is for an fp8 output: pass an fp8 out, or out_dtype"):
        paged(out=None, out_scale=2.0)


def test_a_padding_row_may_have_a_query_and_no_tokens():
    paged(seq_lens=ints(20, 0), out=None)


def test_more_queries_than_keys_need_a_call_without_causal_mask():
    spec = AttentionSpec(scale=0.2, causal=False)
    paged(seq_lens=ints(1, 3), spec=spec, out=None)


@pytest.mark.parametrize("name", ["query", "kv_cache"])
def test_a_gradient_is_refused_where_one_would_be_lost(name):
    case = paged_case(1, seq_lens=[20], query_lens=[2])
    tensor = case.tensors()[name].requires_grad_()
    with pytest.raises(
        Unsupported, match=rf"{name} requires a gradient, .*torch.no_grad\(\) or pass {name}.detach\(\)"
    ):
        case.run(ops.paged_attention, **{name: tensor})
    with torch.no_grad():
        assert torch.equal(case.run(ops.paged_attention, **{name: tensor}), case.run(ops.paged_attention))


DENSE = [
    (
        {"query": torch.ones(3, 6, 32).to(torch.float8_e5m2)},
        r"query is float8_e5m2 and key float32; they must be equal",
    ),
    ({"key": torch.ones(5, 2, 16)}, r"key has shape \[5, 2, 16\]; .* with head_size = 32, that of query"),
    ({"key": torch.ones(5, 4, 32)}, r"value has shape \[5, 2, 32\]; .* with num_kv_heads = 4, that of key"),
    ({"value": torch.ones(5, 2, 32).int()}, r"value is int32; it must be a floating point type"),
    (
        {"key_start_loc": ints(0, 2, 3)},
        r"key_start_loc has shape \[3\]; .* num_seqs\+1 = 2, that of query_start_loc",
    ),
    ({"key_start_loc": ints(0, 6)}, r"key_start_loc\[-1\] is 6; key has only 5 rows"),
    ({"max_key_len": 4}, r"sequence 0 has 5 rows in key_start_loc; the stated maximum is 4"),
]


@pytest.mark.parametrize(("changes", "message"), DENSE)
def test_attention_names_what_does_not_fit(changes, message):
    case = dense_case(1, query_lens=[3], key_lens=[5])
    with pytest.raises(InvalidInput, match=message):
        case.run(ops.attention, **changes)


WRITE = [
    ({"key": torch.ones(2, 2, 16)}, r"kv_cache has shape \[4, 2, 4, 2, 8\]; .* with head_size = 16, that of key"),
    ({"value": torch.ones(2, 3, 8)}, r"value has shape \[2, 3, 8\]; .* with num_kv_heads = 2, that of key"),
    ({"key": torch.ones(2, 2, 8).to(torch.int8)}, r"key is int8 and the cache float32; give float32, bfloat16 or"),
    (
        {"slot_mapping": ints(1, 2, 3)},
        r"slot_mapping has 3 entries and key 2 tokens; give at most one slot",
    ),
    ({"slot_mapping": ints(1, 16)}, r"slot_mapping\[1\] is 16; a cache of 4 blocks of 4 has slots 0 to 15"),
    ({"slot_mapping": ints(1, 2, dtype=torch.int64)}, r"slot_mapping is int64; it must be int32"),
    ({"k_scale": torch.ones(2)}, r"k_scale has shape \[2\]; it must be a number or one element"),
    ({"v_scale_cache": torch.ones(4, 4, 2)}, r"k_scale_cache and v_scale_cache go together; give both or none"),
    (
        {"k_scale_cache": torch.ones(4, 4, 2), "v_scale_cache": torch.ones(4, 4, 2), "k_scale": 1.0},
        r"k_scale or v_scale is given beside k_scale_cache and v_scale_cache; pass one kind",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRITE)
def test_a_write_names_what_does_not_fit_and_changes_nothing(changes, message):
    cache = torch.zeros(4, 2, 4, 2, 8)
    tokens = torch.ones(2, 2, 8)
    arguments = {"key": tokens, "value": tokens, "kv_cache": cache, "slot_mapping": ints(4, 5), **changes}
    with pytest.raises(InvalidInput, match=message):
        ops.write_kv_cache(**arguments)
    assert cache.count_nonzero() == 0


def test_scales_per_token_and_head_need_a_cache_of_codes():
    tokens, scales = torch.ones(2, 2, 8), torch.ones(4, 4, 2)
    with pytest.raises(Unsupported, match="the cache is float32; scales per token and head need int8 or fp8"):
        ops.write_kv_cache(
            tokens, tokens, torch.zeros(4, 2, 4, 2, 8), ints(4, 5), k_scale_cache=scales, v_scale_cache=scales
        )


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (ints(0, 1), r"block_mapping has shape \[2\]; it must have 2 axes"),
        (ints([0, 1, 2]), r"block_mapping has shape \[1, 3\]; it must be \[num_pairs, 2\]"),
        (ints([0, 4]), r"block_mapping\[0\] is \(0, 4\); the cache has blocks 0 to 3"),
        (ints([-1, 0], [0, 1], [2, 1]), r"block_mapping\[2\] writes block 1, which another pair reads or writes"),
        (ints([0, 1], [1, 2]), r"block_mapping\[0\] writes block 1, .* give every destination once, and none that is"),
    ],
)
def test_a_copy_names_what_does_not_fit_and_changes_nothing(pairs, message):
    cache = torch.arange(4.0)
    with pytest.raises(InvalidInput, match=message):
        ops.copy_blocks(cache, pairs)
    assert cache.tolist() == [0, 1, 2, 3]


def test_a_cache_on_another_device_is_not_copied():
    with pytest.raises(InvalidInput, match=r"kv_cache is on meta and the other tensors on cpu; move it there"):
        ops.copy_blocks([torch.zeros(4), torch.zeros(4, device="meta")], ints([0, 1]))


@pytest.mark.parametrize(
    ("position", "tensor", "message"),
    [
        (0, torch.ones(2, 3), r"out_a has shape \[2, 3\]; it must have 3 axes"),
        (2, torch.ones(2, 3, 8), r"out_b has shape \[2, 3, 8\]; .* with head_size = 4, that of out_a"),
        (1, torch.ones(3, 2), r"lse_a has shape \[3, 2\]; .* with num_tokens = 2, that of out_a"),
        (3, torch.ones(2, 3).half(), r"lse_b is float16; it must be float32"),
    ],
)
def test_a_merge_names_what_does_not_fit(position, tensor, message):
    arguments = [torch.ones(2, 3, 4), torch.ones(2, 3), torch.ones(2, 3, 4), torch.ones(2, 3)]
    arguments[position] = tensor
    with pytest.raises(InvalidInput, match=message):
        ops.merge_states(*arguments)
