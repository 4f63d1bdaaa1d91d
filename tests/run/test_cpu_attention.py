"""The fast CPU attention against the reference, and against what must hold for any input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import (
    assert_as_exact,
    assert_matches_reference,
    dense_case,
    paged_case,
    random_dense_case,
    random_paged_case,
    to_torch,
)
from torch_core import ops
from torch_core.attention.cpu import rows as rows_module
from torch_core.attention.cpu.decode import padded_blocks
from torch_core.base.specs import AttentionSpec


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny problems on two threads of a busy machine mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", range(10))
def test_random_paged_batches_match_the_reference(number):
    for index in range(10):
        case = random_paged_case(1000 * number + index)
        assert_matches_reference(case, *case.run(ops.paged_attention_with_lse))


@pytest.mark.parametrize("number", range(5))
def test_random_dense_batches_match_the_reference(number):
    for index in range(10):
        case = random_dense_case(1000 * number + index)
        assert_matches_reference(case, *case.run(ops.attention_with_lse))


@pytest.mark.parametrize("block_size", [1, 16, 48, 256])
def test_every_length_around_an_edge_is_served(block_size):
    lengths = [1, 47, 48, 49, 63, 64, 65, 255, 256, 257, 300]
    case = paged_case(0, seq_lens=lengths, query_lens=[1] * len(lengths), block_size=block_size, head_size=16)
    assert_matches_reference(case, *case.run(ops.paged_attention_with_lse))


@pytest.mark.parametrize("poison", [math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("query_len", [1, 3])
def test_what_unused_slots_hold_is_never_read(poison, query_len):
    spec = AttentionSpec(scale=0.2, window_left=20)
    sizes = {"seq_lens": [70, 3, 40], "query_lens": [query_len] * 3, "spec": spec}
    clean = paged_case(4, **sizes, poison=0.0)
    output, lse = paged_case(4, **sizes, poison=poison).run(ops.paged_attention_with_lse)
    expected, expected_lse = clean.run(ops.paged_attention_with_lse)
    assert torch.equal(output, expected)
    assert torch.equal(lse, expected_lse)


def test_large_logits_match_the_reference():
    case = paged_case(2, seq_lens=[100, 30], query_lens=[1, 30], values="large")
    assert_matches_reference(case, *case.run(ops.paged_attention_with_lse))


def test_a_soft_cap_does_not_overflow_on_large_scores():
    spec = AttentionSpec(scale=1.0, logits_soft_cap=30.0)
    case = paged_case(2, seq_lens=[100, 30], query_lens=[1, 30], values="large", spec=spec)
    assert_matches_reference(case, *case.run(ops.paged_attention_with_lse))


@pytest.mark.parametrize("query_len", [1, 4])
def test_constant_values_come_out_to_rounding(query_len):
    case = paged_case(3, seq_lens=[77, 5], query_lens=[query_len] * 2)
    cache = case.tensors()["kv_cache"]
    cache[:, 1] = torch.where(cache[:, 1].isnan(), torch.nan, 1.0)
    output = case.run(ops.paged_attention, kv_cache=cache)
    # The weights' sum and their product with ones are each a sum of at most 77 roundings.
    torch.testing.assert_close(output, torch.ones_like(output), rtol=0, atol=77 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("query_len", [1, 4])
def test_a_zero_query_gives_the_mean_of_the_values(query_len):
    case = paged_case(3, seq_lens=[77], query_lens=[query_len], block_size=16)
    tensors = case.tensors()
    table = tensors["block_tables"][0, :5].long()
    values = tensors["kv_cache"][table, 1].flatten(0, 1)[:77]
    output = case.run(ops.paged_attention, query=torch.zeros_like(tensors["query"]))
    mean = values.double().mean(0).repeat_interleave(3, dim=0).float()
    torch.testing.assert_close(output[-1], mean, rtol=1e-5, atol=1e-6)


def test_equal_key_heads_make_grouped_attention_plain():
    case = paged_case(3, seq_lens=[77, 20], query_lens=[1, 6], num_heads=4, num_kv_heads=4)
    cache = case.tensors()["kv_cache"]
    cache[:, :, :, 1:] = cache[:, :, :, :1]
    grouped = case.run(ops.paged_attention, kv_cache=cache[:, :, :, :2].contiguous())
    torch.testing.assert_close(case.run(ops.paged_attention, kv_cache=cache), grouped)


def test_paged_attention_over_shuffled_blocks_is_dense_attention():
    case = paged_case(3, seq_lens=[77, 20], query_lens=[77, 20])
    tensors = case.tensors()
    keys, values = [], []
    for table, seq_len in zip(tensors["block_tables"], [77, 20], strict=True):
        tokens = tensors["kv_cache"][table[: -(-seq_len // 16)].long()].transpose(0, 1).flatten(1, 2)[:, :seq_len]
        keys.append(tokens[0])
        values.append(tokens[1])
    starts = tensors["query_start_loc"]
    expected = ops.attention(
        tensors["query"],
        torch.cat(keys),
        torch.cat(values),
        starts,
        starts,
        spec=case.spec,
        max_query_len=77,
        max_key_len=77,
    )
    torch.testing.assert_close(case.run(ops.paged_attention), expected)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 1, 0]])
def test_rows_without_keys_give_zeros_and_minus_infinity(query_lens):
    case = paged_case(1, seq_lens=[3, 0, 8], query_lens=query_lens, padding_tokens=3)
    output, lse = case.run(ops.paged_attention_with_lse)
    empty = torch.zeros(output.shape[0], dtype=torch.bool)
    empty[query_lens[0] : query_lens[0] + query_lens[1]] = True
    empty[sum(query_lens) :] = True
    assert torch.equal(output[empty], torch.zeros_like(output[empty]))
    assert torch.equal(lse[empty], torch.full_like(lse[empty], -math.inf))
    assert output[~empty].count_nonzero() == output[~empty].numel()


def test_a_batch_of_nothing_gives_nothing():
    case = paged_case(1, seq_lens=[], query_lens=[])
    output, lse = case.run(ops.paged_attention_with_lse)
    assert (output.shape, lse.shape) == ((0, 6, 32), (0, 6))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("query_len", [1, 4])
def test_out_may_be_a_strided_view_and_is_filled_whole(dtype, query_len):
    case = paged_case(1, seq_lens=[30, 9], query_lens=[query_len] * 2, dtype=dtype, padding_tokens=1)
    rows = 2 * query_len + 1
    out = torch.full((rows, 12, 32), math.nan, dtype=case.query_dtype)[:, ::2]
    assert case.run(ops.paged_attention, out=out) is out
    assert torch.equal(out, case.run(ops.paged_attention))


@pytest.mark.parametrize("query_len", [1, 4])
def test_queries_and_caches_may_be_strided_views(query_len):
    case = paged_case(1, seq_lens=[30, 9], query_lens=[query_len] * 2)
    tensors = case.tensors()
    query = torch.stack([tensors["query"]] * 2, dim=2)[:, :, 1]
    cache = torch.cat([tensors["kv_cache"]] * 2, dim=-1)[..., 32:]
    assert torch.equal(case.run(ops.paged_attention, query=query, kv_cache=cache), case.run(ops.paged_attention))
    transposed = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(case.run(ops.paged_attention, query=transposed), case.run(ops.paged_attention))


@pytest.mark.parametrize("query_len", [1, 4])
def test_key_and_value_caches_may_come_apart(query_len):
    case = paged_case(1, seq_lens=[30, 9], query_lens=[query_len] * 2)
    cache = case.tensors()["kv_cache"]
    assert torch.equal(
        case.run(ops.paged_attention, kv_cache=cache.unbind(1)),
        case.run(ops.paged_attention),
    )
    narrow = case.run(ops.paged_attention, kv_cache=(cache[:, 0], cache[:, 1, ..., :5].contiguous()))
    torch.testing.assert_close(narrow, case.run(ops.paged_attention)[..., :5])


@pytest.mark.parametrize("query_len", [1, 5])
def test_an_fp8_query_has_a_scale_and_gives_bfloat16(query_len):
    case = paged_case(
        1, seq_lens=[30, 9], query_lens=[query_len] * 2, dtype="float8_e4m3fn", q_scale=1.5, k_scale=0.5, v_scale=0.25
    )
    output, lse = case.run(ops.paged_attention_with_lse)
    assert output.dtype == torch.bfloat16
    assert_matches_reference(case, output, lse)


@pytest.mark.parametrize("query_len", [1, 5])
def test_an_fp8_output_is_divided_by_its_scale_and_saturates(query_len):
    case = paged_case(1, seq_lens=[30, 9], query_lens=[query_len] * 2, values="large")
    exact = case.run(ops.paged_attention)
    out = torch.empty(exact.shape, dtype=torch.float8_e4m3fn)
    case.run(ops.paged_attention, out=out, out_scale=torch.tensor([0.1]))
    assert torch.equal(out.float(), (exact / 0.1).clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert out.float().abs().max() == 448


def test_int8_codes_with_scales_of_tokens_and_heads_match_the_reference():
    case = paged_case(8, seq_lens=[70, 9, 20], query_lens=[1, 1, 7], cache_dtype="int8", dtype="bfloat16")
    rng = np.random.default_rng(0)
    shape = (*case.operands["kv_cache"].shape[:1], *case.operands["kv_cache"].shape[2:4])
    for name in ("k_scale_cache", "v_scale_cache"):
        case.options[name] = rng.uniform(0.01, 0.05, shape).astype(np.float32)
    assert_matches_reference(case, *case.run(ops.paged_attention_with_lse))


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 8.0}, {"window_left": 9}, {"causal": False}])
def test_a_bound_on_scores_cuts_long_queries_into_runs(options, monkeypatch):
    monkeypatch.setattr(rows_module, "_MAX_SCORE_ELEMENTS", 300)
    spec = AttentionSpec(scale=0.2, **options)
    case = paged_case(1, seq_lens=[70, 41, 20], query_lens=[70, 20, 20], spec=spec)
    assert_matches_reference(case, *case.run(ops.paged_attention_with_lse))
    dense = dense_case(1, query_lens=[50, 7], key_lens=[30, 60], spec=spec)
    assert_matches_reference(dense, *dense.run(ops.attention_with_lse))


def test_merged_halves_of_the_keys_are_the_whole():
    case = dense_case(2, query_lens=[7, 12], key_lens=[20, 30], spec=AttentionSpec(scale=0.2, causal=False))
    tensors = case.tensors()
    key, value = tensors["key"], tensors["value"]
    parts = []
    for pieces in ([slice(0, 5), slice(20, 40)], [slice(5, 20), slice(40, 50)]):
        lens = torch.tensor([0, *(piece.stop - piece.start for piece in pieces)]).cumsum(0).int()
        chosen: dict[str, Any] = {
            "key": torch.cat([key[p] for p in pieces]),
            "value": torch.cat([value[p] for p in pieces]),
        }
        parts += case.run(ops.attention_with_lse, key_start_loc=lens, **chosen)
    output, lse = ops.merge_states(*parts)
    exact, exact_lse = case.expected()
    same, same_lse = case.expected(torch.float32)
    assert_as_exact(output, exact, same, torch.float32)
    assert_as_exact(lse, exact_lse, same_lse, torch.float32)


def test_the_length_a_row_is_padded_to_is_enough_and_takes_few_values():
    lengths = [padded_blocks(keys, 16) * 16 for keys in range(1, 4097)]
    assert all(length >= keys for keys, length in enumerate(lengths, 1))
    assert all(length <= 1.5 * keys for keys, length in enumerate(lengths, 1) if keys > 256)
    assert len(set(lengths)) == 3 + 2 * 4


@pytest.mark.parametrize("options", [{}, {"window_left": 500}, {"attention_chunk": 700}])
@pytest.mark.parametrize("slopes", [None, np.linspace(0.001, 0.01, 6, dtype=np.float32)])
def test_long_rows_match_the_reference(options, slopes):
    spec = AttentionSpec(scale=0.2, **options)
    lengths = [1300, 256, 257, 3, 512, 900]
    extra = {} if slopes is None else {"alibi_slopes": slopes, "sinks": slopes}
    case = paged_case(6, seq_lens=lengths, query_lens=[1] * 6, spec=spec, **extra)
    assert_matches_reference(case, *case.run(ops.paged_attention_with_lse))


def test_numpy_and_torch_gather_the_same(monkeypatch):
    case = random_paged_case(11, rare=False)
    expected = case.run(ops.paged_attention)
    monkeypatch.setattr("torch_core.attention.cpu.gather._MAX_NUMPY_BYTES", 0)
    assert torch.equal(case.run(ops.paged_attention), expected)


@pytest.mark.parametrize("sink", [-np.inf, np.nan])
def test_a_sink_of_minus_infinity_is_none_and_one_of_nan_is_seen(sink, seed):
    case = dense_case(seed, key_lens=[3], query_lens=[5], num_heads=2)
    plain = case.run(ops.attention_with_lse)
    found = case.run(ops.attention_with_lse, sinks=torch.full((2,), sink))
    for with_sink, without in zip(found, plain, strict=True):
        assert torch.equal(with_sink[:2], without[:2])
        assert torch.equal(with_sink[2:], without[2:]) if sink == -np.inf else with_sink[2:].isnan().all()


def test_operands_are_not_changed():
    case = random_paged_case(12)
    tensors = case.tensors()
    before: dict[str, Any] = {name: x.clone() for name, x in tensors.items() if isinstance(x, torch.Tensor)}
    case.run(ops.paged_attention, **before)
    for name, x in before.items():
        assert to_bytes(x) == to_bytes(tensors[name]), name


def to_bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def test_to_torch_keeps_the_bits_of_every_dtype():
    case = paged_case(1, seq_lens=[3], query_lens=[1], dtype="bfloat16", cache_dtype="float8_e5m2")
    assert to_torch(case.operands["query"]).float().tolist() == case.operands["query"].astype(np.float32).tolist()


def test_a_negative_scale_under_a_causal_mask_matches_the_reference(seed):
    case = dense_case(seed, key_lens=[9, 4], query_lens=[9, 7], spec=AttentionSpec(scale=-0.2))
    assert_matches_reference(case, *case.run(ops.attention_with_lse))
