"""vLLM's names over this project's operations, on CPU tensors, against the reference."""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import reference
from tests.support.triton_ops import run_triton
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import AttentionSpec
from torch_core.vllm import ops as vllm_compat

BLOCK_SIZE, HEADS, KV_HEADS, SIZE = 4, 4, 2, 16
QUERY_LENS, SEQ_LENS = [3, 1, 5], [9, 14, 5]


@pytest.fixture
def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    width = 4
    tables = torch.randperm(width * len(SEQ_LENS), generator=generator).reshape(len(SEQ_LENS), width) + 1
    # vLLM's caches are views of one tensor.
    kv_cache = torch.randn(width * len(SEQ_LENS) + 1, 2, BLOCK_SIZE, KV_HEADS, SIZE, generator=generator)
    starts = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    return {
        "q": torch.randn(9, HEADS, SIZE, generator=generator),
        "kv_cache": kv_cache,
        "starts": starts,
        "seq_lens": torch.tensor(SEQ_LENS, dtype=torch.int32),
        "tables": tables.to(torch.int32),
    }


def _unified(
    batch, *, causal: Any = True, window=(-1, -1), softcap=0.0, descales=(None, None, None), out=None, **options
):
    key, value = batch["kv_cache"].unbind(1)
    out = torch.full_like(batch["q"], torch.nan) if out is None else out
    vllm_compat.unified_attention(
        batch["q"],
        key,
        value,
        out,
        batch["starts"],
        max(QUERY_LENS),
        batch["seq_lens"],
        max(SEQ_LENS),
        SIZE**-0.5,
        causal,
        window,
        batch["tables"],
        softcap,
        *descales,
        **options,
    )
    return out


def _expected(batch, *, spec=None, **options):
    arrays = (batch["q"], batch["kv_cache"], batch["tables"], batch["seq_lens"], batch["starts"])
    spec = spec or AttentionSpec(scale=SIZE**-0.5)
    return reference.paged_attention(*arrays, spec=spec, compute_dtype=torch.float64, **options)


def _spec(**options) -> AttentionSpec:
    return AttentionSpec(scale=SIZE**-0.5, **options)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("call", "spec"),
    [
        ({}, _spec()),
        ({"window": (3, 0)}, _spec(window_left=3)),
        ({"window": (3, 3), "causal": False}, _spec(causal=False, window_left=3, window_right=3)),
        ({"causal": False}, _spec(causal=False)),
        ({"softcap": 2.0}, _spec(logits_soft_cap=2.0)),
        ({"window": (3, 0), "chunk_lookback": 0}, _spec(attention_chunk=4)),
    ],
)
def test_unified_attention_translates_the_static_options(batch, call, spec):
    _close(_unified(batch, **call), _expected(batch, spec=spec))


def test_unified_attention_passes_the_arrays_on(batch):
    sinks, slopes = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    found = _unified(batch, sinks=sinks, alibi_slopes=slopes, use_alibi_sqrt=True)
    _close(found, _expected(batch, spec=_spec(use_alibi_sqrt=True), sinks=sinks, alibi_slopes=slopes))
    ranges = torch.tensor([[[1, 7]], [[0, 0]], [[2, 4]]], dtype=torch.int32)
    _close(_unified(batch, mm_prefix_range=ranges), _expected(batch, mm_prefix_range=ranges))
    flags = torch.tensor([True, False, False])
    _close(_unified(batch, causal=flags), _expected(batch, seq_causal=flags))
    bias = torch.randn(5, 5)
    _close(_unified(batch, qq_bias=bias), _expected(batch, qq_bias=bias))


def test_a_descale_may_be_a_number_one_element_or_a_repeated_view(batch):
    batch["kv_cache"] = batch["kv_cache"].to(torch.float8_e5m2)
    expected = _expected(batch, k_scale=0.5, v_scale=2.0)
    repeated = torch.tensor(0.5).expand(len(SEQ_LENS), KV_HEADS)
    for k_descale in (0.5, torch.tensor([0.5]), torch.tensor(0.5), repeated):
        _close(_unified(batch, descales=(None, k_descale, 2.0)), expected)


def test_a_cache_of_real_values_has_no_descale_as_its_write_has_no_scale(batch):
    _close(_unified(batch, descales=(None, 0.5, torch.ones(3, 2))), _expected(batch))


def test_scales_per_token_and_head_replace_the_descales(batch):
    scales = torch.rand(2, *batch["kv_cache"].shape[:1], BLOCK_SIZE, KV_HEADS) + 0.5
    batch["kv_cache"] = (batch["kv_cache"] * 20).round().clamp(-127, 127).to(torch.int8)
    found = _unified(batch, descales=(None, 9.0, 9.0), k_scale_cache=scales[0], v_scale_cache=scales[1])
    expected = _expected(batch, k_scale_cache=scales[0], v_scale_cache=scales[1])
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-3)


def test_an_fp8_output_is_scaled(batch):
    out = torch.zeros_like(batch["q"], dtype=torch.float8_e4m3fn)
    found = _unified(batch, out=out, output_scale=torch.tensor([0.02]))
    expected = (_expected(batch) / 0.02).clamp(-448, 448)
    assert found is out
    # One e4m3 rounding: half a unit in the last of three fraction bits, or half the smallest subnormal.
    assert ((found.float() - expected).abs() <= (expected.abs() / 16).clamp(min=2**-10) * 1.01).all()


def test_descales_may_differ_by_sequence_and_head(batch, within_bound):
    generator = torch.Generator().manual_seed(1)
    k_descale, v_descale = torch.rand(2, len(SEQ_LENS), KV_HEADS, generator=generator) + 0.25
    batch["kv_cache"] = batch["kv_cache"].to(torch.float8_e5m2)
    found = _unified(batch, descales=(None, k_descale, v_descale))
    expected = _descaled(batch, k_descale, v_descale)
    _close(found, expected)
    # One for each head, the same for all sequences; and an fp8 query with a scale of its own.
    _close(_unified(batch, descales=(None, k_descale[0], 2.0)), _descaled(batch, k_descale[:1].expand(3, 2), 2.0))
    coded = batch["q"].to(torch.float8_e4m3fn)
    batch["q"] = coded.float() * 0.5
    exact = _descaled(batch, k_descale, v_descale)
    batch["q"], out = coded, torch.full(batch["q"].shape, torch.nan, dtype=torch.bfloat16)
    found = _unified(batch, descales=(torch.tensor(0.5), k_descale, v_descale), out=out)
    # What a query that is multiplied by the rounded number would give.
    batch["q"] = (coded.float() * 0.5).bfloat16()
    within_bound(found, _descaled(batch, k_descale.bfloat16().float(), v_descale).bfloat16(), exact)
    _unified(batch, descales=(torch.full((3, 2), 0.5), None, None), out=out)


def test_descales_by_head_and_an_fp8_output(batch):
    v_descale = torch.rand(len(SEQ_LENS), KV_HEADS, generator=torch.Generator().manual_seed(2)) + 0.25
    batch["kv_cache"] = batch["kv_cache"].to(torch.float8_e5m2)
    out = torch.zeros_like(batch["q"], dtype=torch.float8_e4m3fn)
    found = _unified(batch, descales=(None, None, v_descale), out=out, output_scale=torch.tensor([0.001]))
    expected = (_descaled(batch, 1.0, v_descale) / 0.001).clamp(-448, 448)
    assert found.float().abs().max() == 448
    assert ((found.float() - expected).abs() <= (expected.abs() / 16).clamp(min=2**-10) * 1.01).all()


def test_descales_of_no_sequence_scale_nothing(batch):
    batch["kv_cache"] = batch["kv_cache"].to(torch.float8_e5m2)
    for name, rows in (("starts", 1), ("seq_lens", 0), ("tables", 0)):
        batch[name] = batch[name][:rows]
    none = torch.ones(0, KV_HEADS)
    assert (_unified(batch, descales=(None, none, none)) == 0).all()


def test_descales_of_another_shape_are_refused(batch):
    batch["kv_cache"] = batch["kv_cache"].to(torch.float8_e5m2)
    with pytest.raises(InvalidInput, match=r"k_descale has shape \[4, 2\]; .* \[num_seqs, num_kv_heads\], \[3, 2\]"):
        _unified(batch, descales=(None, torch.rand(4, 2), None))


def _descaled(batch, k_descale, v_descale):
    """The reference, sequence by sequence and head by head, on a cache of real values."""
    cache, rows = batch["kv_cache"].double(), []
    for seq in range(len(SEQ_LENS)):
        scales = torch.stack([torch.as_tensor(x).expand(3, 2)[seq].double() for x in (k_descale, v_descale)])
        rows.append(_expected({**batch, "q": batch["q"].double(), "kv_cache": cache * scales[None, :, None, :, None]}))
    ends = [0, 3, 4, 9]
    return torch.cat([rows[seq][ends[seq] : ends[seq + 1]] for seq in range(3)])


class _Mode(enum.Enum):
    INT4_PER_TOKEN_HEAD = 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rswa_window": 4, "rswa_prefix_lens": torch.zeros(3)}, "rswa_window and rswa_prefix_lens: a prefix"),
        ({"kv_quant_mode": _Mode.INT4_PER_TOKEN_HEAD}, "caches are 8-bit or wider"),
        ({"window": (3, 0), "chunk_lookback": 1}, "chunk_lookback is 1; a chunk sees itself only"),
        (
            {"window": (3, 0), "mm_prefix_range": torch.zeros(3, 1, 2), "mm_prefix_clamp_sliding_window": True},
            "prefix ranges always reach past the window",
        ),
        (
            {
                "window": (3, 0),
                "chunk_lookback": 0,
                "mm_prefix_range": torch.zeros(3, 1, 2),
                "mm_prefix_clamp_sliding_window": True,
            },
            "prefix ranges always reach past the window",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(batch, options, message):
    batch["kv_cache"] = batch["kv_cache"].to(torch.float8_e5m2)
    with pytest.raises(Unsupported, match=message):
        _unified(batch, **options)


def _packed(seed: int):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(9, HEADS, SIZE, generator=generator)
    key, value = torch.randn(2, 9, KV_HEADS, SIZE, generator=generator)
    return query, key, value, torch.tensor([0, 3, 4]), torch.tensor([3, 1, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({}, _spec()),
        ({"is_causal": False}, _spec(causal=False)),
        (
            {"is_causal": False, "sliding_window_q": 2, "sliding_window_k": 1},
            _spec(causal=False, window_left=2, window_right=1),
        ),
        ({"sliding_window_q": 0, "softmax_scale": 0.3}, AttentionSpec(scale=0.3)),
    ],
)
def test_context_attention_fwd_is_dense_attention(options, spec, seed):
    query, key, value, starts, lens = _packed(seed)
    sinks = torch.arange(4.0)
    out = torch.full_like(query, torch.nan)
    vllm_compat.context_attention_fwd(query, key, value, out, starts, lens, 5, sinks=sinks, **options)
    offsets = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    bounds = {"max_query_len": 5, "max_key_len": 5, "compute_dtype": torch.float64}
    _close(out, reference.attention(query, key, value, offsets, offsets, spec=spec, sinks=sinks, **bounds))


def test_context_attention_fwd_takes_padding_between_the_sequences(seed):
    packed, lens = _packed(seed), torch.tensor([3, 1, 5], dtype=torch.int32)
    padded = [torch.full((20, *array.shape[1:]), torch.nan) for array in packed[:3]]
    live = torch.cat([torch.arange(start, start + length) for start, length in ((1, 3), (7, 1), (12, 5))])
    for array, full in zip(packed, padded, strict=False):
        full[live] = array
    out, alone = torch.full_like(padded[0], torch.nan), torch.empty_like(packed[0])

    vllm_compat.context_attention_fwd(padded[0], padded[1], padded[2], out, torch.tensor([1, 7, 12]), lens, 5)

    vllm_compat.context_attention_fwd(*packed[:3], alone, packed[3], lens, 5)
    _close(out[live], alone)
    out[live] = 0
    assert (out == 0).all()


def test_the_kernels_of_context_attention_fwd_take_padding_longer_than_the_bound(seed, monkeypatch):
    # As on CUDA, where a gap between two sequences is not held to the bound on their lengths.
    monkeypatch.setattr(
        "torch_core.vllm.ops.attention.run",
        lambda call: run_triton(replace(call, max_query_len=5, max_key_len=5)),
    )
    packed, lens = _packed(seed), torch.tensor([3, 1, 5], dtype=torch.int32)
    query, key, value = (torch.full((150, *array.shape[1:]), torch.nan) for array in packed[:3])
    live = torch.cat([torch.arange(start, start + length) for start, length in ((0, 3), (7, 1), (140, 5))])
    for array, full in zip(packed, (query, key, value), strict=False):
        full[live] = array
    out, alone = torch.full_like(query, torch.nan), torch.empty_like(packed[0])

    vllm_compat.context_attention_fwd(query, key, value, out, torch.tensor([0, 7, 140]), lens, 5)

    vllm_compat.context_attention_fwd(*packed[:3], alone, packed[3], lens, 5)
    _close(out[live], alone)
    out[live] = 0
    assert (out == 0).all()


def test_context_attention_fwd_takes_any_head_size(seed):
    query, key, value, starts, lens = _packed(seed)
    out = torch.full_like(query[..., :13], torch.nan)
    vllm_compat.context_attention_fwd(query[..., :13], key[..., :13], value[..., :13], out, starts, lens, 5)
    offsets, spec = torch.tensor([0, 3, 4, 9], dtype=torch.int32), AttentionSpec(scale=13**-0.5)
    bounds = {"max_query_len": 5, "max_key_len": 5, "compute_dtype": torch.float64}
    arrays = (x[..., :13].contiguous() for x in (query, key, value))
    _close(out, reference.attention(*arrays, offsets, offsets, spec=spec, **bounds))


def test_context_attention_fwd_takes_no_sequence(seed):
    query, key, value, starts, lens = _packed(seed)
    out = torch.full_like(query, torch.nan)
    vllm_compat.context_attention_fwd(query, key, value, out, starts[:0], lens[:0], 5)
    assert (out == 0).all()


def test_context_attention_fwd_refuses_a_sink_on_key_0(seed):
    query, key, value, starts, lens = _packed(seed)
    with pytest.raises(Unsupported, match="sinks_bias_key0 is True; a sink is no bias on key 0 here: use False"):
        vllm_compat.context_attention_fwd(
            query, key, value, query, starts, lens, 5, sinks=torch.ones(4), sinks_bias_key0=True
        )


def test_merge_attn_states_takes_heads_first_and_copies_tokens_without_a_prefix(seed):
    generator = torch.Generator().manual_seed(seed)
    prefix, suffix = torch.randn(2, 6, HEADS, SIZE, generator=generator)
    prefix_lse, suffix_lse = torch.randn(2, HEADS, 6, generator=generator)
    output, lse = torch.empty_like(prefix), torch.empty(HEADS, 6)
    vllm_compat.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, lse, prefill_tokens_with_context=4)
    expected, expected_lse = reference.merge_states(prefix, prefix_lse.T, suffix, suffix_lse.T)
    _close(output[:4], expected[:4])
    _close(lse[:, :4], expected_lse[:4].T)
    assert torch.equal(output[4:], suffix[4:])
    assert torch.equal(lse[:, 4:], suffix_lse[:, 4:])


def test_merge_attn_states_scales_an_fp8_output(seed):
    generator = torch.Generator().manual_seed(seed)
    prefix, suffix = torch.randn(2, 6, HEADS, SIZE, generator=generator)
    lse = torch.zeros(HEADS, 6)
    output = torch.zeros_like(prefix, dtype=torch.float8_e4m3fn)
    vllm_compat.merge_attn_states(output, prefix, lse, suffix, lse, output_scale=0.001)
    assert output.float().abs().max() == 448
    expected = ((prefix + suffix) / 2 / 0.001).clamp(-448, 448)
    assert ((output.float() - expected).abs() <= expected.abs() / 16 + 2**-10).all()


@pytest.mark.parametrize(
    ("kv_cache_dtype", "stored"),
    [
        ("auto", torch.float32),
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_reshape_and_cache_flash_writes_bytes_as_the_cache_dtype(kv_cache_dtype, stored, seed):
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, 5, KV_HEADS, SIZE, generator=generator)
    slots = torch.tensor([7, -1, 3, 0])
    cache = torch.zeros(2, 2, BLOCK_SIZE, KV_HEADS, SIZE, dtype=stored)
    expected = cache.clone()
    scales = (torch.tensor(0.5), torch.tensor(0.25))
    seen = cache if kv_cache_dtype == "auto" else cache.view(torch.uint8)
    k_cache, v_cache = seen.unbind(1)
    vllm_compat.triton_reshape_and_cache_flash(key, value, k_cache, v_cache, slots, kv_cache_dtype, *scales)
    used = {} if kv_cache_dtype == "auto" else {"k_scale": scales[0], "v_scale": scales[1]}
    reference.write_kv_cache(key, value, expected, slots, **used)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("coded", [False, True])
def test_reshape_and_cache_flash_takes_a_scale_for_each_head(coded, seed):
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, 5, KV_HEADS, SIZE, generator=generator) * 100
    stored, slots = torch.float8_e4m3fn, torch.tensor([7, -1, 3, 0, 1])
    k_scale, v_scale = torch.tensor([0.5, 3.0]), torch.tensor([0.1])
    if coded:
        key, value = key.to(stored), value.to(stored)
    cache = torch.zeros(2, 2, BLOCK_SIZE, KV_HEADS, SIZE, dtype=stored)
    expected = cache.clone()
    k_cache, v_cache = cache.view(torch.uint8).unbind(1)
    vllm_compat.triton_reshape_and_cache_flash(key, value, k_cache, v_cache, slots, "fp8", k_scale, v_scale)
    for head in range(KV_HEADS):
        part = slice(head, head + 1)
        arrays = (key[:, part], value[:, part], expected[..., part, :], slots)
        reference.write_kv_cache(*arrays, k_scale=k_scale[head], v_scale=v_scale)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_reshape_and_cache_flash_refuses_other_scales():
    key, cache = torch.zeros(3, KV_HEADS, SIZE), torch.zeros(2, BLOCK_SIZE, KV_HEADS, SIZE, dtype=torch.uint8)
    with pytest.raises(
        Unsupported, match=r"k_scale has shape \[3\]; one element, or a view that repeats it, is served"
    ):
        vllm_compat.triton_reshape_and_cache_flash(
            key, key, cache, cache.clone(), torch.tensor([0]), "fp8", torch.ones(3), None
        )


def test_reshape_and_cache_flash_diffkv_splits_the_last_axis(seed):
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(3, KV_HEADS, 24, generator=generator), torch.randn(3, KV_HEADS, 8, generator=generator)
    cache = torch.zeros(2, BLOCK_SIZE, KV_HEADS, 32)
    slots = torch.tensor([7, -1, 2])
    vllm_compat.triton_reshape_and_cache_flash_diffkv(key, value, cache, slots, "auto", None, None)
    assert torch.equal(cache[1, 3], torch.cat([key[0], value[0]], -1))
    assert torch.equal(cache[0, 2], torch.cat([key[2], value[2]], -1))
    with pytest.raises(InvalidInput, match=r"kv_cache has 32 elements per head; key and value have \[24, 24\]"):
        vllm_compat.triton_reshape_and_cache_flash_diffkv(key, key, cache, slots, "auto", None, None)


def test_reshape_and_cache_flash_per_token_head_quant_writes_scales(seed):
    key, value = torch.randn(2, 3, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(seed))
    k_cache, v_cache = torch.zeros(2, 2, BLOCK_SIZE, KV_HEADS, SIZE, dtype=torch.int8)
    k_scales, v_scales = torch.zeros(2, 2, BLOCK_SIZE, KV_HEADS)
    slots = torch.tensor([7, -1, 2])
    vllm_compat.triton_reshape_and_cache_flash_per_token_head_quant(
        key, value, k_cache, v_cache, k_scales, v_scales, slots, None
    )
    stored = k_cache[1, 3].float() * k_scales[1, 3][:, None]
    torch.testing.assert_close(stored, key[0], rtol=0, atol=float(key.abs().max()) / 127)
    with pytest.raises(Unsupported, match="caches are 8-bit or wider"):
        vllm_compat.triton_reshape_and_cache_flash_per_token_head_quant(
            key, value, k_cache, v_cache, k_scales, v_scales, slots, _Mode.INT4_PER_TOKEN_HEAD
        )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("starts", torch.Tensor.long, r"^cu_seqlens_q is int64; it must be int32"),
        ("tables", torch.Tensor.long, r"^block_table is int64; it must be int32"),
        ("seq_lens", torch.Tensor.tolist, r"^seqused_k is a list; it must be a torch tensor"),
    ],
)
def test_an_error_has_the_operations_own_name_of_the_argument(batch, name, change, message):
    batch[name] = change(batch[name])
    with pytest.raises(InvalidInput, match=message):
        _unified(batch)


def test_a_cache_of_real_values_is_no_memory_of_fp8():
    cache, rows = torch.zeros(1, 4, 1, 8), torch.zeros(1, 1, 8)
    with pytest.raises(InvalidInput, match=r"^key_cache is torch\.float32; it must be uint8 or torch\.float8_e4m3fn"):
        vllm_compat.triton_reshape_and_cache_flash(
            rows, rows, cache, cache, torch.zeros(1, dtype=torch.int32), "fp8", None, None
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype is 'nvfp4'; use one of auto"),
        ({"interleaved_v_pack_factor": 4}, "interleaved_v_pack_factor is 4; values are not interleaved here: use 0"),
        ({"key_cache": torch.zeros(1, 1, 1, 1, 1)}, "key_cache has 5 axes"),
    ],
)
def test_reshape_and_cache_flash_refuses_what_it_cannot_store(change, message):
    arguments = {
        "key": torch.zeros(1, 1, 8),
        "value": torch.zeros(1, 1, 8),
        "key_cache": torch.zeros(1, 4, 1, 8),
        "value_cache": torch.zeros(1, 4, 1, 8),
        "slot_mapping": torch.zeros(1, dtype=torch.int32),
        "kv_cache_dtype": "auto",
        "k_scale": None,
        "v_scale": None,
    }
    with pytest.raises(Unsupported, match=message):
        vllm_compat.triton_reshape_and_cache_flash(**{**arguments, **change})


def test_unified_attention_diffkv_takes_values_of_another_size(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(13, BLOCK_SIZE, KV_HEADS, SIZE + 8, generator=generator)
    k, v = packed[..., :SIZE], packed[..., SIZE:]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out = torch.full((9, HEADS, 8), torch.nan)
    vllm_compat.unified_attention_diffkv(
        batch["q"], k, v, out, batch["starts"], batch["seq_lens"], SIZE**-0.5, True, (3, 0), batch["tables"], 0,
        sinks=sinks,
    )  # fmt: skip
    batch["kv_cache"] = (k, v)
    _close(out, _expected(batch, spec=_spec(window_left=3), sinks=sinks))


def test_unified_attention_diffkv_takes_descales_last(batch, seed):
    packed = torch.randn(13, BLOCK_SIZE, KV_HEADS, SIZE + 8, generator=torch.Generator().manual_seed(seed))
    coded = packed.to(torch.float8_e5m2)
    batch["q"] = batch["q"].to(torch.float8_e5m2)
    batch["kv_cache"] = caches = coded[..., :SIZE], coded[..., SIZE:]
    out = torch.full((9, HEADS, 8), torch.nan)
    vllm_compat.unified_attention_diffkv(
        batch["q"], *caches, out, batch["starts"], batch["seq_lens"], SIZE**-0.5, True, (-1, -1), batch["tables"], 0,
        5, None, None, False, None, None, None, None, None, torch.tensor(0.5), torch.tensor(2.0), torch.tensor(0.25),
    )  # fmt: skip
    _close(out, _expected(batch, k_scale=0.5, v_scale=2.0, q_scale=0.25, out_dtype="float32"))
