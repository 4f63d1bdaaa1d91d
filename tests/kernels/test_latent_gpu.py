"""Latent attention on a CUDA device against the float64 reference, and JAX's bits against torch's."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jattn
from tests.support.attention_cases import assert_matches_reference
from tests.support.latent_cases import latent_case, random_latent_case
from tests.support.latent_writes import rotary_write
from torch_core import ops, reference
from torch_core.base.specs import AttentionSpec
from torch_core.latent.call import LatentWriteCall

pytestmark = pytest.mark.gpu

HEADS = (1, 3, 9, 16, 63, 126, 128)
#: (query length, context of each sequence); the second has one sequence that is empty.
LENGTHS = ((1, (20, 140, 4096)), (2, (140, 0, 20)), (4, (4096, 20)), (8, (300,)))
DEEPSEEK: dict[str, Any] = {"kv_lora_rank": 512, "rope_dim": 64, "block_size": 64}


def _check(case) -> None:
    out, lse = case.run(ops.mla_attention_with_lse, device="cuda")
    assert_matches_reference(case, out, lse)


@pytest.mark.parametrize(("heads", "lengths"), list(itertools.product(HEADS, LENGTHS)))
def test_deepseeks_shapes_are_as_exact_as_torch(heads, lengths, seed):
    query_len, context = lengths
    _check(
        latent_case(
            seed, seq_lens=context, query_lens=[min(n, query_len) for n in context], num_heads=heads, dtype="bfloat16",
            padding_tokens=3, **DEEPSEEK,
        )
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("heads", [5, 64])
def test_other_dtypes_are_as_exact_as_torch(dtype, heads, seed):
    _check(latent_case(seed, seq_lens=[700, 64], query_lens=[2, 1], num_heads=heads, dtype=dtype, **DEEPSEEK))


@pytest.mark.parametrize("block_size", [1, 8, 16, 48, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_any_size_are_followed(block_size, causal, seed):
    """Short queries whose rows fill several tiles, in one chunk and in many, with sinks."""
    sizes = {**DEEPSEEK, "block_size": block_size}
    case = latent_case(
        seed, seq_lens=[333, 1, 70], query_lens=[3, 1, 2], num_heads=40, dtype="float16",
        spec=AttentionSpec(scale=0.07, causal=causal), sinks=np.linspace(-2, 2, 40, dtype=np.float32), **sizes,
    )  # fmt: skip
    for chunk in (None, 128, 1024):
        results = ops.run(case.call("cuda", with_lse=True, kv_chunk_size=chunk))
        assert_matches_reference(case, results["out"], results["lse"])


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("heads", [16, 128])
def test_quantised_latents_are_as_exact_as_torch(cache_dtype, heads, seed):
    scale = np.array([0.02 if cache_dtype == "int8" else 0.7], np.float32)
    _check(
        latent_case(
            seed, seq_lens=[1000, 33], query_lens=[1, 1], num_heads=heads, dtype="bfloat16", cache_dtype=cache_dtype,
            k_scale=scale, **DEEPSEEK,
        )
    )  # fmt: skip


@pytest.mark.parametrize("heads", [3, 16, 128])
@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_packed_rows_are_as_exact_as_torch(heads, query_len, dtype, seed):
    _check(
        latent_case(
            seed, seq_lens=[1000, 0, 33], query_lens=[query_len, 0, 1], num_heads=heads, dtype=dtype, packed=True,
            **DEEPSEEK,
        )
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_a_wide_random_problem_is_as_exact_as_torch_in_its_dtype(seed):
    _check(random_latent_case(seed, max_seq_len=400, sizes=(32, 100, 256, 512)))


def test_batches_of_64_find_their_chunks(seed):
    rng = np.random.default_rng(seed)
    lens = rng.integers(0, 600, 64).tolist()
    _check(
        latent_case(
            seed, seq_lens=lens, query_lens=[min(n, 1) for n in lens], num_heads=16, dtype="bfloat16", **DEEPSEEK
        )
    )


@pytest.mark.parametrize(("heads", "query_len", "short"), [(16, 1, 40), (128, 1, 20), (64, 2, 20)])
@pytest.mark.parametrize("cache", [{}, {"packed": True}, {"block_size": 1}, {"cache_dtype": "float8_e4m3fn"}])
def test_a_long_sequence_among_short_ones_is_read_by_many(heads, query_len, short, cache, seed):
    lens = [100] * short + [0, 3000]
    scale = {"k_scale": np.array([0.7], np.float32)} if "cache_dtype" in cache else {}
    _check(
        latent_case(
            seed, seq_lens=lens, query_lens=[min(n, query_len) for n in lens], num_heads=heads, dtype="bfloat16",
            padding_tokens=3, **{**DEEPSEEK, **cache, **scale},
        )
    )  # fmt: skip


@pytest.mark.parametrize("heads", [3, 16, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_jax_gives_torchs_bits(heads, packed, seed):
    case = latent_case(
        seed, seq_lens=[900, 64, 0], query_lens=[2, 1, 0], num_heads=heads, dtype="bfloat16", packed=packed, **DEEPSEEK
    )
    arrays = {name: jnp.asarray(array) for name, array in case.operands.items()}
    limits: dict[str, Any] = case.limits
    found = jax.jit(
        lambda arrays: jattn.mla_attention_with_lse(**arrays, **limits, scale=case.spec.scale, implementation="triton")
    )(arrays)
    expected = case.run(ops.mla_attention_with_lse, device="cuda")
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(np.array(ours, np.float32), theirs.float().cpu().numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("is_neox_style", [False, True])
def test_a_write_rotates_and_packs_as_the_reference_does(dtype, is_neox_style, seed):
    call = rotary_write(seed, dtype, is_neox_style=is_neox_style, rank=512, rope_dim=64, tokens=700)
    on_device = call.map(torch.Tensor.cuda)
    ops.run(on_device)
    reference.write_latent_cache(call)
    assert torch.equal(on_device.latent_cache.cpu().view(torch.uint8), call.latent_cache.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_write_stores_what_the_reference_stores(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    kv_c, k_pe = (torch.randn(700, size, generator=generator).bfloat16().cuda() for size in (512, 64))
    slots = torch.randperm(900, generator=generator)[:700].int().cuda()
    slots[3] = -1
    found, expected = torch.zeros(15, 64, 576, dtype=dtype, device="cuda"), torch.zeros(15, 64, 576, dtype=dtype)
    ops.write_latent_cache(kv_c, k_pe, found, slots, k_scale=0.5)
    reference.write_latent_cache(
        LatentWriteCall(kv_c=kv_c.cpu(), k_pe=k_pe.cpu(), slot_mapping=slots.cpu(), latent_cache=expected, k_scale=0.5)
    )
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
