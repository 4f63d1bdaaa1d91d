"""Latent attention and the write of latents on CPU tensors, against the reference and against the plain form of MLA."""

from __future__ import annotations

import pytest
import torch

from tests.support import reference
from tests.support.attention_cases import assert_matches_reference
from tests.support.latent_cases import latent_case, random_latent_case
from tests.support.latent_writes import rotary_write
from torch_core import ops
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec, LatentCacheSpec
from torch_core.latent.call import LatentWriteCall
from torch_core.reference import write_latent_cache


@pytest.mark.parametrize("number", range(4))
def test_random_batches_match_the_reference(number):
    for index in range(10):
        case = random_latent_case(1000 * number + index)
        assert_matches_reference(case, *case.run(ops.mla_attention_with_lse))


def test_the_absorbed_form_is_the_plain_form(seed):
    """Keys and values projected up for each head, as the paper writes it, against what is absorbed."""
    generator = torch.Generator().manual_seed(seed)
    heads, nope, rope, rank, value_size, length = 3, 8, 4, 16, 6, 11

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, latent, rotary = normal(2, heads, nope + rope), normal(length, rank), normal(length, rope)
    to_key, to_value = normal(heads, nope, rank), normal(heads, value_size, rank)
    key = torch.cat([torch.einsum("hdr,tr->thd", to_key, latent), rotary[:, None].expand(-1, heads, -1)], -1)
    value = torch.einsum("hvr,tr->thv", to_value, latent)
    spec, starts = AttentionSpec(scale=(nope + rope) ** -0.5), torch.tensor([0, 2]).int()
    plain = reference.attention(
        query, key, value, starts, torch.tensor([0, length]).int(), spec=spec, max_query_len=2,
        compute_dtype=torch.float64,
    )  # fmt: skip

    absorbed = torch.cat([torch.einsum("thd,hdr->thr", query[..., :nope], to_key), query[..., nope:]], -1)
    latents = torch.zeros(4, 4, rank + rope)
    ops.write_latent_cache(latent.float(), rotary.float(), latents, torch.arange(4, 4 + length).int())
    out = ops.mla_attention(
        absorbed.float(), latents, torch.tensor([[1, 2, 3]]).int(), torch.tensor([length]).int(), starts,
        kv_lora_rank=rank, spec=spec, max_query_len=2,
    )  # fmt: skip

    torch.testing.assert_close(torch.einsum("thr,hvr->thv", out.double(), to_value), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("scale", [None, 0.5, torch.tensor([0.25])])
def test_a_write_stores_what_the_reference_stores(dtype, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    kv_c, k_pe = torch.randn(5, 12, generator=generator) * 9, torch.randn(6, 4, generator=generator)
    slots = torch.tensor([7, -1, 0, 11], dtype=torch.int32)
    found, expected = torch.zeros(3, 4, 16, dtype=dtype), torch.zeros(3, 4, 16, dtype=dtype)

    ops.write_latent_cache(kv_c, k_pe, found, slots, k_scale=scale)
    write_latent_cache(LatentWriteCall(kv_c=kv_c, k_pe=k_pe, slot_mapping=slots, latent_cache=expected, k_scale=scale))

    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert found.float().abs().sum(-1).flatten().nonzero().flatten().tolist() == [0, 7, 11]


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_packed_rows_are_read_as_what_they_stand_for(dtype, query_len, seed):
    case = latent_case(
        seed, seq_lens=[40, 0, 7], query_lens=[query_len, 0, 1], num_heads=3, kv_lora_rank=256, rope_dim=8, dtype=dtype,
        packed=True, padding_tokens=1,
    )  # fmt: skip
    assert_matches_reference(case, *case.run(ops.mla_attention_with_lse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("is_neox_style", [False, True])
def test_a_write_rotates_and_packs_as_the_reference_does(dtype, is_neox_style, seed):
    call = rotary_write(seed, dtype, is_neox_style=is_neox_style)
    expected = call.map(torch.clone)
    ops.run(call)
    write_latent_cache(expected)
    assert torch.equal(call.latent_cache.view(torch.uint8), expected.latent_cache.view(torch.uint8))


def test_a_packed_row_is_flash_mlas(seed):
    """512 e4m3, four scales, 64 bfloat16: 656 bytes, whose scales bring each group's largest element to 448."""
    generator = torch.Generator().manual_seed(seed)
    kv_c, k_pe = torch.randn(1, 512, generator=generator), torch.randn(1, 64, generator=generator).bfloat16()
    cache = torch.zeros(1, 1, 656, dtype=torch.uint8)
    ops.write_latent_cache(kv_c, k_pe, cache, torch.tensor([0]).int())
    row = cache.flatten()
    groups, scales = kv_c.view(4, 128), row[512:528].view(torch.float32)
    assert torch.equal(scales, groups.abs().amax(1) / 448)
    assert torch.equal(row[:512].view(torch.float8_e4m3fn).float().view(4, 128).abs().amax(1), torch.full((4,), 448.0))
    torch.testing.assert_close(row[:512].view(torch.float8_e4m3fn).float().view(4, 128) * scales[:, None], groups,
                               rtol=2**-4, atol=float(scales.max()) * 2**-10)  # fmt: skip
    assert torch.equal(row[528:].view(torch.bfloat16), k_pe[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_cache": torch.zeros(4, 2, 4, 1, 48)}, "latent_cache has shape .4, 2, 4, 1, 48.; it must have 3 axes"),
        ({"query": torch.zeros(1, 2, 40)}, "latent_cache has shape .* with head_size = 40, that of query"),
        ({"kv_lora_rank": 50}, "kv_lora_rank is 50 and latent_cache has rows of 48; a row is the latent and, after it"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be an int of at least 1"),
        ({"latent_cache": torch.zeros(0, 4, 48)}, "the cache has no block"),
        ({"latent_cache": torch.zeros(4, 4, 48, dtype=torch.float16)}, "query is float32 and the cache float16; cast"),
        ({"seq_lens": torch.tensor([300]).int()}, r"seq_lens\[0\] is 300; a row of block_tables holds 0 to"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_the_fix(change, message):
    case = latent_case(1, seq_lens=[9], query_lens=[1], num_heads=2)
    with pytest.raises(InvalidInput, match=message):
        case.run(ops.mla_attention, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_pe": torch.zeros(2, 5)}, "kv_c has 12 elements, k_pe 5, and latent_cache rows of 16; a row is the first"),
        ({"kv_c": torch.zeros(1, 12)}, "slot_mapping has 2 entries and kv_c 1 tokens; give at most one slot"),
        ({"kv_c": torch.zeros(2, 12).int()}, "kv_c is int32 and latent_cache float32; give float32, bfloat16"),
        ({"latent_cache": torch.zeros(3, 4, 16).int()}, "latent_cache is int32; it must be one of float32"),
        ({"latent_cache": torch.zeros(3, 2, 4, 1, 16)}, "latent_cache has shape .*; it must have 3 axes"),
        ({"latent_cache": torch.zeros(3, 4, 16).byte()}, "kv_lora_rank is 12 and rope_dim 4; a packed row has"),
        ({"kv_c": torch.ones(2, 128), "latent_cache": torch.zeros(3, 4, 16).byte()}, "rows of 16 bytes; .* has 140"),
        (
            {"kv_c": torch.ones(2, 128), "latent_cache": torch.zeros(3, 4, 140).byte(), "k_scale": 2.0},
            "k_scale is given and latent_cache packed; packed rows have scales of their own",
        ),
        ({"positions": torch.zeros(2).int()}, "one of cos_sin_cache and positions is None; a rotary key is rotated"),
        ({"cos_sin_cache": torch.ones(3, 2), "positions": torch.zeros(2).int()}, "k_pe has 4 elements and cos_sin_"),
        ({"cos_sin_cache": torch.ones(3, 4), "positions": torch.zeros(1).int()}, "2 entries and positions 1; give"),
        ({"cos_sin_cache": torch.ones(3, 4), "positions": torch.tensor([0, 3]).int()}, r"positions\[1\] is 3; cos_sin"),
        ({"slot_mapping": torch.tensor([1, 12]).int()}, r"slot_mapping\[1\] is 12; a cache of 3 blocks of 4 has"),
    ],
)  # fmt: skip
def test_a_bad_write_is_refused_and_changes_nothing(change, message):
    arguments = {
        "kv_c": torch.ones(2, 12),
        "k_pe": torch.ones(2, 4),
        "latent_cache": torch.zeros(3, 4, 16),
        "slot_mapping": torch.tensor([0, 1]).int(),
        **change,
    }
    with pytest.raises(InvalidInput, match=message):
        ops.write_latent_cache(**arguments)
    assert not arguments["latent_cache"].any()


def test_a_plain_cache_cannot_be_given_to_latent_attention_nor_the_reverse():
    case = latent_case(1, seq_lens=[9], query_lens=[1], num_heads=2)
    arrays = case.tensors()
    with pytest.raises(InvalidInput, match=r"kv_cache has shape .*; it must have 5 axes"):
        ops.paged_attention(
            arrays["query"], arrays["latent_cache"],
            *(arrays[name] for name in ("block_tables", "seq_lens", "query_start_loc")),
            spec=case.spec, max_query_len=1,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 200}, "kv_lora_rank is 200 and rope_dim 64; a packed row has a latent of a multiple of 128"),
        ({"kv_lora_rank": 128}, "latent_cache is uint8 with rows of 280 bytes; .* 128 and .* 136 elements has 404"),
        ({"k_scale": 0.5}, "k_scale is given and latent_cache packed"),
    ],
)
def test_packed_rows_that_do_not_fit_are_refused(change, message):
    case = latent_case(1, seq_lens=[9], query_lens=[1], num_heads=2, kv_lora_rank=256, rope_dim=8, packed=True)
    case.operands["query"] = case.operands["query"][..., :264]
    with pytest.raises(InvalidInput, match=message):
        case.run(ops.mla_attention, **change)


def test_a_spec_of_latents_says_what_is_wrong():
    with pytest.raises(InvalidInput, match="kv_lora_rank is 96 and rope_dim 8; a packed row has"):
        LatentCacheSpec(kv_lora_rank=96, rope_dim=8, block_size=64, dtype="uint8")
    with pytest.raises(InvalidInput, match="rope_dim is 0; it must be from 1 to 65536"):
        LatentCacheSpec(kv_lora_rank=512, rope_dim=0, block_size=64, dtype="bfloat16")
