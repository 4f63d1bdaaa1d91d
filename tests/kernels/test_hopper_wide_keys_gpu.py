"""Heads whose queries and keys have 192 elements and values 128, by the Hopper prefill kernel, on a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import AttentionCase, assert_matches_reference, dense_case
from tests.support.triton_ops import attention_with_lse, paged_attention_with_lse
from torch_core import ops
from torch_core.base.specs import AttentionSpec
from torch_core.launch.launcher import device_limits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

pytestmark = pytest.mark.gpu

_SIZES: dict[str, Any] = {"head_size": 192, "value_head_size": 128}


def _run(case: AttentionCase, warpgroups: int, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    plan = plan_call(case.call("cuda", **changes).map(array_spec), device_limits(torch.device("cuda", 0)))
    assert plan.launches[0].name == "hopper_prefill_kernel"
    assert dict(plan.launches[0].constexprs)["WARPGROUPS"] == warpgroups
    return case.run(attention_with_lse, device="cuda", **changes)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_problem_is_as_exact_as_torch_and_has_the_same_bits_in_every_tile(seed):
    rng = np.random.default_rng([seed, 16])
    group, num_seqs = int(rng.choice([1, 1, 4])), int(rng.choice([1, 3, 40]))
    key_lens = [int(rng.integers(0, 700 if num_seqs < 9 else 200)) for _ in range(num_seqs - 1)] + [600]
    query_lens = [min(n, int(rng.choice([0, 1, 100, n]))) for n in key_lens[:-1]] + [int(rng.integers(130, 500))]
    causal = bool(rng.random() < 0.7)
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["sinks"] = rng.standard_normal(2 * group).astype(np.float32)
    case = dense_case(
        seed, key_lens=key_lens, query_lens=query_lens, num_heads=2 * group, num_kv_heads=2,
        dtype=str(rng.choice(["bfloat16", "float16"])), padding_tokens=int(rng.choice([0, 5])),
        spec=AttentionSpec(
            scale=192**-0.5, causal=causal, window_left=int(rng.choice([0, 100])) if rng.random() < 0.3 else None
        ),
        **_SIZES, **options,
    )  # fmt: skip
    short = _run(case, 2, max_query_len=1000)
    assert_matches_reference(case, *short)
    tall = _run(case, 3, max_query_len=4096)
    for one, other in zip(short, tall, strict=True):
        assert torch.equal(one.float(), other.float())


def test_earlier_keys_are_merged_by_their_log_sum_exp(seed):
    """A prompt's second part over its first one, as chunks of cached context are."""
    case = dense_case(seed, key_lens=[900], query_lens=[300], num_heads=4, num_kv_heads=4, dtype="bfloat16", **_SIZES)
    arrays, starts = case.tensors("cuda"), torch.tensor([0, 300]).int().cuda()
    earlier, new = torch.tensor([0, 600]).int().cuda(), slice(600, 900)
    last = ops.attention_with_lse(
        arrays["query"], arrays["key"][new], arrays["value"][new], starts, starts, spec=case.spec, max_query_len=300
    )
    before = ops.attention_with_lse(
        arrays["query"], arrays["key"][:600], arrays["value"][:600], starts, earlier,
        spec=replace(case.spec, causal=False), max_query_len=300,
    )  # fmt: skip
    assert_matches_reference(case, *ops.merge_states(*last, *before))


def test_a_pair_of_paged_caches_gives_the_bits_of_dense_keys(seed):
    case = dense_case(seed, key_lens=[640], query_lens=[400], num_heads=2, num_kv_heads=2, dtype="bfloat16", **_SIZES)
    arrays = case.tensors("cuda")
    caches = tuple(
        torch.cat([torch.full_like(rows[:16], float("nan")), rows]).unflatten(0, (-1, 16))
        for rows in (arrays["key"], arrays["value"])
    )
    found = paged_attention_with_lse(
        arrays["query"], caches, torch.arange(1, 41).int().cuda()[None], torch.tensor([640]).int().cuda(),
        arrays["query_start_loc"], spec=case.spec, max_query_len=400, kv_chunk_size=1024,
    )  # fmt: skip
    for one, other in zip(found, _run(case, 2), strict=True):
        assert torch.equal(one.float(), other.float())
