"""The latent kernel and the write of latents in Triton's interpreter, on tiny problems."""

from __future__ import annotations

import pytest
import torch

from tests.support.attention_cases import assert_matches_reference
from tests.support.interpret import run_interpreted_operation
from tests.support.latent_cases import latent_case, random_latent_case
from tests.support.latent_writes import rotary_write
from tests.support.triton_ops import run_triton
from torch_core.base.specs import AttentionSpec
from torch_core.latent import choose
from torch_core.latent.call import LatentWriteCall
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec
from torch_core.reference import write_latent_cache


def _check(case, **changes):
    results = run_triton(case.call(with_lse=True, **changes))
    assert_matches_reference(case, results["out"], results["lse"])


@pytest.mark.parametrize("number", range(10))
def test_a_random_problem_is_as_exact_as_torch_in_its_dtype(number):
    _check(random_latent_case(number, max_seq_len=20, sizes=(16, 24)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_are_merged_and_rows_of_many_tiles_find_their_heads(dtype):
    """Two chunks of 128 keys, 3 x 7 rows in tiles of 16, an empty sequence and padding."""
    case = latent_case(
        5, seq_lens=[150, 0, 131], query_lens=[3, 0, 2], num_heads=7, kv_lora_rank=16, rope_dim=8, dtype=dtype,
        padding_tokens=2,
    )  # fmt: skip
    _check(case, kv_chunk_size=128)


def test_sequences_that_are_shorter_than_the_table_have_as_many_chunks(monkeypatch):
    monkeypatch.setattr(choose, "_WIDE_TABLE", 0)
    case = latent_case(
        9, seq_lens=[300, 0, 1020, 90], query_lens=[1, 0, 2, 1], num_heads=3, kv_lora_rank=16, rope_dim=8
    )
    call = case.call(with_lse=True)
    plan = plan_call(call.map(array_spec), DeviceLimits(arch=89, num_sms=6))
    scratch = {name: torch.full(spec.shape, torch.nan) for name, spec in plan.scratch}
    results = run_interpreted_operation(plan, {**call.arrays(), **scratch})
    assert_matches_reference(case, results["out"], results["lse"])
    # 128, 128 and 44 latents; 384, 384 and 252 of a full table.
    assert (~scratch["partial_max"][:, :, 0].isnan()).sum(1).tolist() == [3, 0, 0, 0, 3, 3, 0, 0]


def test_a_long_query_is_served_in_one_chunk():
    _check(latent_case(6, seq_lens=[40, 3], query_lens=[21, 1], num_heads=3, kv_lora_rank=16, rope_dim=8))


def test_a_window_reads_nothing_before_it():
    spec = AttentionSpec(scale=0.3, window_left=5)
    _check(latent_case(7, seq_lens=[150], query_lens=[2], num_heads=2, spec=spec, block_size=4), kv_chunk_size=128)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_rows_are_read_as_what_they_stand_for(dtype):
    _check(
        latent_case(
            8, seq_lens=[40, 3], query_lens=[2, 1], num_heads=3, kv_lora_rank=256, rope_dim=8, dtype=dtype, packed=True,
            block_size=4,
        )
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("is_neox_style", [False, True])
def test_a_write_rotates_and_packs_as_the_reference_does(dtype, is_neox_style, seed):
    call = rotary_write(seed, dtype, is_neox_style=is_neox_style)
    expected = call.map(torch.clone)
    run_triton(call)
    write_latent_cache(expected)
    assert torch.equal(call.latent_cache.view(torch.uint8), expected.latent_cache.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_a_write_stores_what_the_reference_stores(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    kv_c, k_pe = torch.randn(4, 12, generator=generator) * 5, torch.randn(4, 3, generator=generator)
    slots = torch.tensor([6, -1, 3], dtype=torch.int32)
    found, expected = torch.zeros(2, 4, 15, dtype=dtype), torch.zeros(2, 4, 15, dtype=dtype)
    scale = torch.tensor([0.3]) if dtype.itemsize == 1 else None
    call = LatentWriteCall(kv_c=kv_c, k_pe=k_pe, slot_mapping=slots, latent_cache=found, k_scale=scale)

    run_triton(call)
    write_latent_cache(call.with_arrays({"latent_cache": expected}))

    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
