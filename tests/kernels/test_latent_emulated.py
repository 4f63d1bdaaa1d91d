"""The Hopper latent kernels' own source without a GPU: chunks, several rows, sequences without keys, 8-bit rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import assert_matches_reference
from tests.support.emulated.run import run_emulated_operation
from tests.support.latent_cases import latent_case
from torch_core.base.specs import AttentionSpec
from torch_core.latent import choose
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec


def _check(seed: int, kernel: str, limits: DeviceLimits | None = None, **options: Any) -> torch.Tensor:
    chunk = options.pop("kv_chunk_size", None)
    case = latent_case(seed, **{"dtype": "bfloat16", "kv_lora_rank": 512, "rope_dim": 64, **options})
    call = case.call("cpu", with_lse=True, kv_chunk_size=chunk)
    plan = plan_call(call.map(array_spec), limits or DeviceLimits())
    assert plan.launches[0].name == kernel
    found = run_emulated_operation(plan, call.arrays(), seed)
    assert_matches_reference(case, found["out"], found["lse"])
    return found["out"]


def test_chunks_and_sequences_without_keys_are_as_exact_as_torch(seed: int) -> None:
    _check(
        seed, "hopper_latent_kernel", seq_lens=[300, 0, 65], query_lens=[1, 0, 1], num_heads=20, padding_tokens=2,
        block_size=64, kv_chunk_size=128,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 2])
def test_sequences_in_a_wide_table_have_chunks_of_their_own(
    tokens: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 256 latents for 300, and of 640 for 1,200, where a full table has some of 768."""
    monkeypatch.setattr(choose, "_WIDE_TABLE", 0)
    _check(
        seed, "hopper_latent_kernel", DeviceLimits(num_sms=8), seq_lens=[300, 65, 1200], query_lens=[1, 1, tokens],
        num_heads=20, block_size=64,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [129, 448])
def test_blocks_of_eight_fill_the_ring_several_times(tokens: int, seed: int) -> None:
    """A last tile that is zeroed in part, and one that is whole."""
    _check(seed, "hopper_latent_kernel", seq_lens=[tokens], query_lens=[2], num_heads=9, block_size=8)


@pytest.mark.parametrize("scale", [pytest.param(0.15, marks=pytest.mark.nightly), 0.6])
def test_maxima_that_grow_by_a_few_bits_and_by_many_rescale_what_was_summed(scale: float, seed: int) -> None:
    """Of some rows and not of others, from the second tile on; weights are beyond 1 where nothing is rescaled."""
    _check(
        seed, "hopper_latent_kernel", seq_lens=[448], query_lens=[1], num_heads=20, block_size=64,
        spec=AttentionSpec(scale=scale),
    )  # fmt: skip


def test_rows_of_blocks_of_one_token_are_gathered(seed: int) -> None:
    """The ring comes round, to a last tile of one row; a sequence without a key, and padding."""
    _check(
        seed, "hopper_latent_kernel", seq_lens=[257, 3, 0], query_lens=[1, 0, 1], num_heads=9, padding_tokens=2,
        block_size=1,
    )  # fmt: skip


EIGHT_BITS: dict[str, dict[str, Any]] = {
    "fp8": {"cache_dtype": "float8_e4m3fn", "k_scale": np.array([0.7], np.float32)},
    "packed": {"packed": True},
}


@pytest.mark.parametrize("rows", EIGHT_BITS)
def test_few_rows_of_8_bits_are_as_exact_as_torch(rows: str, seed: int) -> None:
    _check(
        seed, "few_latent_kernel", seq_lens=[300, 0, 65], query_lens=[2, 0, 1], num_heads=5, padding_tokens=2,
        block_size=16, kv_chunk_size=128, **EIGHT_BITS[rows],
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "dtype"), [("fp8", "bfloat16"), ("fp8", "float16"), ("packed", "float16")])
def test_warpgroups_of_few_rows_take_turns_at_tiles(rows: str, dtype: str, seed: int) -> None:
    """Queries of as many e4m3 terms as their type has bits for; the ring comes round."""
    _check(
        seed, "few_latent_kernel", seq_lens=[1000, 1], query_lens=[1, 1], num_heads=16, block_size=64, dtype=dtype,
        kv_chunk_size=1024, **EIGHT_BITS[rows],
    )  # fmt: skip


@pytest.mark.parametrize(("num_heads", "kernel"), [(5, "few_latent_kernel"), (20, "hopper_latent_kernel")])
def test_packed_rows_of_blocks_of_one_token_are_gathered(num_heads: int, kernel: str, seed: int) -> None:
    _check(
        seed, kernel, seq_lens=[385, 3, 0], query_lens=[1, 0, 1], num_heads=num_heads, padding_tokens=2, block_size=1,
        packed=True,
    )  # fmt: skip


@pytest.mark.parametrize("rows", EIGHT_BITS)
def test_many_rows_of_8_bits_are_unpacked(rows: str, seed: int) -> None:
    """Chunks of one and of two tiles, and a sequence of several rows."""
    _check(
        seed, "hopper_latent_kernel", seq_lens=[300, 0, 65], query_lens=[4, 0, 1], num_heads=5, padding_tokens=2,
        block_size=16, kv_chunk_size=128, **EIGHT_BITS[rows],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("hopper_latent_kernel", {"num_heads": 20}),
        ("hopper_latent_kernel", {"num_heads": 20, "block_size": 1, "query_lens": [1, 0, 1, 1]}),
        ("few_latent_kernel", {"num_heads": 5, "packed": True}),
    ],
)
def test_a_long_sequence_among_short_ones_is_read_by_many(
    kernel: str, options: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight programs at a time: four chunks of 384 latents, where a full table has two of 640."""
    monkeypatch.setattr(choose, "_SHARED_TABLE", 0)
    monkeypatch.setattr(choose, "_SHARED_CHUNK", 0)
    case = {"seq_lens": [65, 0, 1200, 3], "query_lens": [1, 0, 2, 1], "padding_tokens": 2, "block_size": 64, **options}
    _check(seed, kernel, DeviceLimits(num_sms=8), **case)


@pytest.mark.parametrize(("seq_lens", "kept"), [((900, 1000, 950), 3), ((65, 100, 1200), 2), ((65, 300, 1200), 1)])
def test_bits_follow_from_neighbours_in_uneven_batches_alone(
    seq_lens: tuple[int, ...], kept: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in an even one, nor those of sequences that are one chunk of 256 latents in an uneven one."""
    case = {"seq_lens": seq_lens, "query_lens": [1] * 3, "num_heads": 20, "block_size": 64}
    found = []
    monkeypatch.setattr(choose, "_SHARED_CHUNK", 0)
    for table in (1 << 30, 0):
        monkeypatch.setattr(choose, "_SHARED_TABLE", table)
        plan_call.cache_clear()
        found.append(_check(seed, "hopper_latent_kernel", DeviceLimits(num_sms=8), **case))
    assert [torch.equal(*rows) for rows in zip(*found, strict=True)] == [True] * kept + [False] * (3 - kept)
