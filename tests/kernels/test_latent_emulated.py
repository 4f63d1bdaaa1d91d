"""The Hopper latent kernel's own source without a GPU: chunks, several rows, sequences without keys."""

from __future__ import annotations

import pytest

from tests.support.attention_cases import assert_matches_reference
from tests.support.emulated.run import run_emulated_operation
from tests.support.latent_cases import latent_case
from torch_core.plan.plan import DeviceLimits
from torch_core.planner import plan_call
from torch_core.run import array_spec


@pytest.mark.parametrize(("heads", "query_len"), [(20, 1), (40, 2)])
def test_deepseeks_shapes_are_as_exact_as_torch(heads: int, query_len: int, seed: int) -> None:
    lengths = [300, 0, 65]
    case = latent_case(
        seed, seq_lens=lengths, query_lens=[min(n, query_len) for n in lengths], num_heads=heads, dtype="bfloat16",
        padding_tokens=2, kv_lora_rank=512, rope_dim=64, block_size=64,
    )  # fmt: skip
    call = case.call("cpu", with_lse=True, kv_chunk_size=128)
    plan = plan_call(call.map(array_spec), DeviceLimits())
    assert "hopper" in plan.launches[0].name
    found = run_emulated_operation(plan, call.arrays(), seed)
    assert_matches_reference(case, found["out"], found["lse"])
