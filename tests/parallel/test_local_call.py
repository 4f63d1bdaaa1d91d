"""A call on one rank's keys: merged over the ranks it is the call on all of them, whatever the mask counts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import torch_core.ops
from tests.support.attention_cases import (
    AttentionCase,
    assert_matches_reference,
    paged_case,
    random_paged_case,
    to_torch,
)
from tests.support.ranks import of_rank
from torch_core.attention.call import PagedCall
from torch_core.attention.context_parallel import context_call, local_call, merge_parts
from torch_core.base.errors import Unsupported
from torch_core.base.specs import AttentionSpec

SINKS = np.linspace(-1, 2, 6).astype(np.float32)
SLOPES = np.linspace(0.1, 1, 6).astype(np.float32)
LENS, ONE, SEVERAL = [70, 0, 33, 5, 1, 129], [1, 0, 1, 1, 1, 1], [3, 0, 1, 5, 1, 2]


def mask(**options: Any) -> AttentionSpec:
    return AttentionSpec(scale=0.2, **options)


CASES: dict[str, dict[str, Any]] = {
    "decode": {"query_lens": ONE},
    "decode, sinks and a soft cap": {"query_lens": ONE, "spec": mask(logits_soft_cap=5.0), "sinks": SINKS},
    "several tokens": {"query_lens": SEVERAL, "padding_tokens": 2},
    "several tokens that all see all": {"query_lens": SEVERAL, "spec": mask(causal=False)},
    "window": {"query_lens": SEVERAL, "spec": mask(window_left=17), "sinks": SINKS},
    "window of one block": {"query_lens": ONE, "spec": mask(window_left=1)},
    "chunk": {"query_lens": SEVERAL, "spec": mask(attention_chunk=20)},
    "window and chunk": {"query_lens": ONE, "spec": mask(attention_chunk=32, window_left=9)},
    "8-bit cache": {"query_lens": SEVERAL, "cache_dtype": "int8", "k_scale": 0.025, "v_scale": 0.03},
    "bfloat16": {"query_lens": SEVERAL, "dtype": "bfloat16"},
}
ALIBI: dict[str, dict[str, Any]] = {
    "ALiBi": {"query_lens": SEVERAL, "alibi_slopes": SLOPES},
    "ALiBi where a row has no query": {"query_lens": ONE, "alibi_slopes": SLOPES, "sinks": SINKS, "padding_tokens": 2},
    "ALiBi and window": {"query_lens": SEVERAL, "alibi_slopes": SLOPES, "spec": mask(window_left=30)},
}
EACH = [(name, *ranks) for name in CASES for ranks in ((2, 1), (3, 4))] + [(name, 3, 1) for name in ALIBI]


def call_of(case: AttentionCase, world: int, rank: int, interleave: int) -> PagedCall[torch.Tensor]:
    arrays: dict[str, Any] = {**case.operands, **case.options}
    for name in {"kv_cache", "k_scale_cache", "v_scale_cache"} & set(arrays):
        arrays[name] = of_rank(arrays[name], world, rank, interleave)
    given: dict[str, Any] = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    return PagedCall(**given, spec=case.spec, max_query_len=case.limits["max_query_len"])


def assert_merged(case: AttentionCase, world: int, interleave: int) -> None:
    """Fails unless the ranks' parts are together what the reference finds."""
    parts = []
    for rank in range(world):
        place: dict[str, Any] = {"dcp_world_size": world, "dcp_rank": rank, "interleave_size": interleave}
        call, lse_more = local_call(call_of(case, world, rank, interleave), **place, library=torch)
        found = torch_core.ops.run(call)
        parts.append((found["out"], found["lse"] if lse_more is None else found["lse"] + lse_more))
    sinks = case.options.get("sinks")
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    out, lse = merge_parts(outs, lses, None if sinks is None else to_torch(sinks), library=torch)

    assert_matches_reference(case, out, lse)


@pytest.mark.parametrize(("name", "world", "interleave"), EACH)
def test_the_ranks_parts_merge_to_the_whole(name: str, world: int, interleave: int, seed: int) -> None:
    case = paged_case(seed, seq_lens=LENS, block_size=8 * world, **(CASES | ALIBI)[name])
    assert_merged(case, world, interleave)


@pytest.mark.parametrize("draw", range(12))
def test_drawn_problems_merge_to_the_whole(draw: int, seed: int) -> None:
    case = next(
        case
        for case in (random_paged_case(seed + step, rare=False) for step in range(100))
        if case.operands["kv_cache"].shape[2] % 4 == 0
        and case.limits["max_query_len"]
        and not case.spec.use_alibi_sqrt
        and (case.spec.causal or case.limits["max_query_len"] == 1)
    )
    interleave = 1 if "alibi_slopes" in case.options else 2
    assert_merged(case, 2, interleave)


def test_a_window_reads_its_own_blocks_alone(seed: int) -> None:
    case = paged_case(seed, seq_lens=[4000], query_lens=[1], block_size=16, spec=mask(window_left=63))

    call, _ = local_call(call_of(case, 2, 0, 1), dcp_world_size=2, dcp_rank=0, library=torch)

    assert call.block_tables.shape == (1, 6)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "qq_bias": ({"qq_bias": torch.zeros(5, 5)}, "qq_bias"),
    "ranges": ({"mm_prefix_range": torch.zeros(6, 1, 2, dtype=torch.int32)}, "mm_prefix_range"),
    "square root": (
        {"alibi_slopes": torch.ones(6), "spec": mask(use_alibi_sqrt=True)},
        "square-root ALiBi and ALiBi with runs of more than one token (interleave_size)",
    ),
    "runs": ({"alibi_slopes": torch.ones(6)}, "ALiBi with runs of more than one token (interleave_size)"),
    "window to the right": (
        {"spec": mask(causal=False, window_right=3)},
        "a window or chunk without the causal mask",
    ),
    "fp8 output": ({"out_dtype": "float8_e4m3fn"}, "an fp8 output"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_one_rank_cannot_tell_is_refused(name: str, seed: int) -> None:
    changes, reason = REFUSALS[name]
    case = paged_case(seed, seq_lens=LENS, query_lens=SEVERAL, block_size=16)
    call = replace(call_of(case, 2, 0, 1), **changes)
    text = (
        f"paged_attention: keys are spread over ranks, and {reason} cannot be told from one rank's share. Keep such "
        "sequences on one rank."
    )
    with pytest.raises(Unsupported, match=f"^{re.escape(text)}$"):
        local_call(call, dcp_world_size=2, dcp_rank=0, interleave_size=2, library=torch)


def test_a_context_has_no_window(seed: int) -> None:
    case = paged_case(seed, seq_lens=LENS, query_lens=SEVERAL, block_size=16, spec=mask(window_left=3))
    with pytest.raises(Unsupported, match=r"5 tokens is spread over ranks, and a sliding window differs"):
        context_call(call_of(case, 2, 0, 1), dcp_world_size=2, dcp_rank=0, library=torch)
