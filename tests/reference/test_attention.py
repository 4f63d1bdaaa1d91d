"""The reference attention against torch's own, against written-out formulas, and against what must always hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.support import reference
from tests.support.attention_cases import assert_as_exact, dense_case, paged_case, random_paged_case, to_torch
from torch_core.attention.reference.sequence import attend_sequence
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec

PLAIN = AttentionSpec(scale=1.0)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_score(*scores: float) -> dict[str, Any]:
    """One query and head whose scores at scale 1 are `scores`, and values that are the unit vectors."""
    keys = len(scores)
    return {
        "query": torch.ones(1, 1, 1, dtype=torch.float64),
        "key": torch.tensor(scores, dtype=torch.float64)[:, None, None],
        "value": torch.eye(keys, dtype=torch.float64)[:, None],
    }


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_plain_attention_is_torchs(num_heads, num_kv_heads, causal, seed):
    query = random(7, num_heads, 16, seed=seed)
    key, value = random(2, 7, num_kv_heads, 16, seed=seed + 1)
    output, _ = attend_sequence(query, key, value, spec=AttentionSpec(scale=0.3, causal=causal))
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(output, expected[0].transpose(0, 1))


def test_the_lse_is_the_logarithm_of_the_sum_of_exponentials():
    _, lse = attend_sequence(**one_score(1.0, 2.0, -1.0), spec=AttentionSpec(scale=1.0, causal=False))
    assert lse.item() == pytest.approx(math.log(math.exp(1) + math.exp(2) + math.exp(-1)))
    assert lse.dtype == torch.float64


def test_a_sink_takes_its_share_and_no_value():
    output, lse = attend_sequence(**one_score(1.0, 2.0), spec=PLAIN, sinks=torch.tensor([0.5]))
    total = math.exp(1) + math.exp(2) + math.exp(0.5)
    assert output.flatten().tolist() == pytest.approx([math.exp(1) / total, math.exp(2) / total])
    assert lse.item() == pytest.approx(math.log(total))


def test_the_soft_cap_comes_before_the_bias():
    slopes = torch.tensor([3.0])
    spec = AttentionSpec(scale=2.0, logits_soft_cap=5.0)
    _, lse = attend_sequence(**one_score(4.0, 1.0), spec=spec, alibi_slopes=slopes)
    scores = [5 * math.tanh(8 / 5) - 3, 5 * math.tanh(2 / 5)]
    assert lse.item() == pytest.approx(math.log(sum(map(math.exp, scores))))


def test_a_soft_cap_holds_for_scores_that_would_overflow_an_exponential():
    spec = AttentionSpec(scale=1.0, logits_soft_cap=30.0)
    output, lse = attend_sequence(**one_score(1e6, -1e6), spec=spec)
    assert output.flatten().tolist() == pytest.approx([1.0, math.exp(-60)])
    assert lse.item() == pytest.approx(30.0)


def test_huge_scores_do_not_overflow():
    output, lse = attend_sequence(**one_score(1e4, 1e4 - 1), spec=PLAIN)
    assert output.flatten().tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])
    assert lse.item() == pytest.approx(1e4 + math.log(1 + math.exp(-1)))


def test_very_negative_scores_are_not_taken_for_hidden_ones():
    output, lse = attend_sequence(**one_score(-1e6, -1e6), spec=PLAIN)
    assert output.flatten().tolist() == [0.5, 0.5]
    assert lse.item() == pytest.approx(-1e6)


@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0])])
def test_a_row_that_sees_nothing_gives_zeros_and_minus_infinity(sinks):
    query = torch.ones(2, 1, 1, dtype=torch.float64)
    output, lse = attend_sequence(query, query[:1], query[:1], spec=PLAIN, sinks=sinks)
    assert output[0].item() == 0
    assert lse[0].item() == -math.inf
    assert output[1].item() > 0


def test_a_sequence_without_keys_gives_zeros_and_minus_infinity():
    output, lse = attend_sequence(torch.ones(2, 1, 1), torch.ones(0, 1, 1), torch.ones(0, 1, 3), spec=PLAIN)
    assert torch.equal(output, torch.zeros(2, 1, 3))
    assert torch.equal(lse, torch.full((2, 1), -math.inf))


def test_minus_infinity_between_new_tokens_hides_a_key():
    bias = torch.tensor([[0.0, 0.0], [-math.inf, 0.0]])
    query = torch.ones(2, 1, 1)
    value = torch.tensor([[[1.0]], [[3.0]]])
    output, lse = attend_sequence(query, query, value, spec=PLAIN, qq_bias=bias)
    assert output.flatten().tolist() == [1.0, 3.0]
    assert lse.flatten().tolist() == [1.0, 1.0]


def test_constant_values_come_out_unchanged(seed):
    case = random_paged_case(seed)
    kv_cache = case.operands["kv_cache"].copy()
    kv_cache[:, 1] = 1
    output, lse = case.run(
        reference.paged_attention_with_lse,
        kv_cache=to_torch(kv_cache),
        v_scale=None,
        k_scale_cache=None,
        v_scale_cache=None,
        sinks=None,
        compute_dtype=torch.float64,
    )
    expected = (lse > -math.inf).double()[..., None].expand_as(output)
    torch.testing.assert_close(output, expected)


def test_a_zero_query_gives_the_mean_of_the_visible_values():
    value = random(5, 1, 3, seed=0)
    query = torch.zeros(5, 1, 2, dtype=torch.float64)
    output, _ = attend_sequence(query, random(5, 1, 2, seed=1), value, spec=AttentionSpec(scale=1.0, window_left=2))
    torch.testing.assert_close(output[4, 0], value[2:, 0].mean(0))
    torch.testing.assert_close(output[1, 0], value[:2, 0].mean(0))


def test_equal_key_heads_make_grouped_attention_plain(seed):
    query = random(4, 4, 8, seed=seed)
    key, value = random(2, 6, 1, 8, seed=seed)
    grouped, _ = attend_sequence(query, key.expand(-1, 2, -1), value.expand(-1, 2, -1), spec=PLAIN)
    single, _ = attend_sequence(query, key, value, spec=PLAIN)
    torch.testing.assert_close(grouped, single)


def test_paged_attention_is_dense_attention_over_the_gathered_tokens():
    case = paged_case(3, seq_lens=[37, 5, 20], query_lens=[1, 5, 9], block_size=16)
    tensors = case.tensors()
    keys, values = [], []
    for table, seq_len in zip(tensors["block_tables"], [37, 5, 20], strict=True):
        tokens = tensors["kv_cache"][table[: -(-seq_len // 16)].long()].transpose(0, 1).flatten(1, 2)[:, :seq_len]
        keys.append(tokens[0])
        values.append(tokens[1])
    expected, expected_lse = reference.attention_with_lse(
        tensors["query"],
        torch.cat(keys),
        torch.cat(values),
        tensors["query_start_loc"],
        torch.tensor([0, 37, 42, 62]),
        spec=case.spec,
    )
    output, lse = case.run(reference.paged_attention_with_lse)
    assert torch.equal(output, expected)
    assert torch.equal(lse, expected_lse)


def test_scales_multiply_what_is_stored():
    case = paged_case(5, seq_lens=[9], query_lens=[2], k_scale=0.5, v_scale=torch.tensor([3.0]), q_scale=2.0)
    plain = paged_case(5, seq_lens=[9], query_lens=[2])
    output = case.run(reference.paged_attention, compute_dtype=torch.float64)
    expected = plain.run(reference.paged_attention, compute_dtype=torch.float64)
    torch.testing.assert_close(output, 3 * expected)


def test_scales_of_tokens_and_heads_multiply_what_is_stored():
    case = paged_case(6, seq_lens=[9], query_lens=[2], cache_dtype="int8")
    cache = case.tensors()["kv_cache"].double()
    scales = torch.rand(2, *cache.shape[:1], *cache.shape[2:4], dtype=torch.float64)
    real = torch.stack([cache[:, 0] * scales[0, ..., None], cache[:, 1] * scales[1, ..., None]], dim=1)
    options: dict[str, Any] = {"compute_dtype": torch.float64}
    output = case.run(reference.paged_attention, k_scale_cache=scales[0], v_scale_cache=scales[1], **options)
    torch.testing.assert_close(output, case.run(reference.paged_attention, kv_cache=real, **options))


def test_key_and_value_caches_may_come_apart_and_differ_in_head_size():
    case = paged_case(7, seq_lens=[20], query_lens=[3])
    keys, values = case.tensors()["kv_cache"].unbind(1)
    output = case.run(reference.paged_attention, kv_cache=(keys, values[..., :5]))
    torch.testing.assert_close(output, case.run(reference.paged_attention)[..., :5])


def test_a_flag_per_sequence_sets_its_causal_mask():
    case = dense_case(8, key_lens=[4, 4], query_lens=[4, 4])
    both = case.run(reference.attention, seq_causal=torch.tensor([True, False]))
    assert torch.equal(both[:4], case.run(reference.attention)[:4])
    everything = AttentionSpec(scale=case.spec.scale, causal=False)
    assert torch.equal(both[4:], case.run(reference.attention, spec=everything)[4:])


def test_padding_rows_and_empty_sequences_give_zeros_and_minus_infinity():
    case = paged_case(9, seq_lens=[0, 3, 0], query_lens=[0, 2, 0], padding_tokens=2)
    output, lse = case.run(reference.paged_attention_with_lse)
    assert torch.equal(output[2:], torch.zeros(2, 6, 32))
    assert torch.equal(lse[2:], torch.full((2, 6), -math.inf))
    assert output[:2].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "compute_dtype", "output_dtype", "lse_dtype"),
    [
        ("bfloat16", None, torch.bfloat16, torch.float32),
        ("float32", torch.float64, torch.float64, torch.float64),
        ("float16", torch.float16, torch.float16, torch.float32),
        ("float8_e4m3fn", None, torch.bfloat16, torch.float32),
    ],
)
def test_the_dtypes_of_the_results(dtype, compute_dtype, output_dtype, lse_dtype):
    case = paged_case(1, seq_lens=[3], query_lens=[1], dtype=dtype)
    output, lse = case.run(reference.paged_attention_with_lse, compute_dtype=compute_dtype)
    assert (output.dtype, lse.dtype) == (output_dtype, lse_dtype)


def test_out_is_written_and_returned():
    case = paged_case(1, seq_lens=[3], query_lens=[1])
    out = torch.full((1, 6, 32), math.nan)
    assert case.run(reference.paged_attention, out=out) is out
    assert torch.equal(out, case.run(reference.paged_attention))


def test_an_fp8_output_is_divided_by_its_scale_and_saturates():
    case = dense_case(1, key_lens=[2], query_lens=[2])
    value = torch.full((2, 2, 32), 1040.0)
    out = torch.empty(2, 6, 32, dtype=torch.float8_e4m3fn)
    case.run(reference.attention, value=value, out=out, out_scale=10.0)
    assert torch.equal(out.float(), torch.full((2, 6, 32), 104.0))
    case.run(reference.attention, value=value, out=out, out_scale=1.0)
    assert torch.equal(out.float(), torch.full((2, 6, 32), 448.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": [1, 2]}, r"query_start_loc starts with \[1\]; it must hold num_seqs \+ 1 offsets"),
        ({"query_start_loc": [0, 2, 1], "seq_lens": [3, 3]}, r"query_start_loc\[2\] is 1, less than 2 before it"),
        ({"query_start_loc": [0, 9]}, r"query_start_loc\[-1\] is 9; query has only 2 rows"),
        ({"max_query_len": 1}, r"sequence 0 has 2 rows in query_start_loc; the stated maximum is 1"),
        ({"seq_lens": [3, 3]}, r"seq_lens has 2 entries and query_start_loc 2; they need num_seqs and num_seqs \+ 1"),
        ({"seq_lens": [99]}, r"seq_lens\[0\] is 99; a row of block_tables holds 0 to 3 x 16 = 48 tokens"),
        ({"seq_lens": [-1]}, r"seq_lens\[0\] is -1"),
        ({"block_tables": [[1, 7, 0]], "seq_lens": [17]}, r"block_tables\[0, 1\] is 7; the cache has blocks 0 to 3"),
    ],
)
def test_paged_arguments_that_do_not_fit_are_named(changes, message):
    case = paged_case(1, seq_lens=[3], query_lens=[2])
    tensors: dict[str, Any] = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in changes.items()}
    with pytest.raises(InvalidInput, match=message):
        case.run(reference.paged_attention, **tensors)


def test_dense_offsets_of_different_length_are_refused():
    case = dense_case(1, key_lens=[3], query_lens=[2])
    with pytest.raises(InvalidInput, match=r"key_start_loc has 3 entries and query_start_loc 2; both need num_seqs"):
        case.run(reference.attention, key_start_loc=torch.tensor([0, 1, 3]))


@pytest.mark.parametrize("overflow", [math.inf, math.nan])
def test_where_a_plain_computation_overflows_it_bounds_no_error(overflow: float):
    exact, plain = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([overflow, 2.25, 3.0])
    for error in (0.4, -0.4):
        assert_as_exact(exact + error, exact, plain, torch.float16)
    with pytest.raises(AssertionError, match=r"the bound is 5\.0"):
        assert_as_exact(exact + torch.tensor([0.6, 0, 0]), exact, plain, torch.float16)
    with pytest.raises(AssertionError, match="off by nan"):
        assert_as_exact(plain * math.nan, exact, plain, torch.float16)
