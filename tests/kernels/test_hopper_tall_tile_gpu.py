"""The Hopper prefill kernel with three warpgroups, on a CUDA device: the reference, and the bits of two warpgroups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import AttentionCase, assert_matches_reference, dense_case, paged_case
from tests.support.triton_ops import attention_with_lse, paged_attention_with_lse
from torch_core.base.specs import AttentionSpec
from torch_core.launch.launcher import device_limits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

pytestmark = pytest.mark.gpu

# Bounds on the query length choose the tile: rows of a tile by bound.
_TALL_BOUND = 4096
_SHORT_BOUND = 1000


def _run(case: AttentionCase, *, max_query_len: int, warpgroups: int) -> tuple[torch.Tensor, torch.Tensor]:
    case = case.with_longest_query(max_query_len)
    # Taken whole: where tiles are few, their size says how keys are cut.
    changes: dict[str, Any] = {"kv_chunk_size": _TALL_BOUND} if case.paged else {}
    call = case.call("cuda", **changes)
    plan = plan_call(call.map(array_spec), device_limits(torch.device("cuda", 0)))
    assert dict(plan.launches[0].constexprs)["WARPGROUPS"] == warpgroups
    function = paged_attention_with_lse if case.paged else attention_with_lse
    return case.run(function, device="cuda", **changes)


def _check(case: AttentionCase) -> None:
    tall = _run(case, max_query_len=_TALL_BOUND, warpgroups=3)
    assert_matches_reference(case, *tall)
    short = _run(case, max_query_len=_SHORT_BOUND, warpgroups=2)
    assert torch.equal(tall[0].view(torch.int16), short[0].view(torch.int16))
    assert torch.equal(tall[1].view(torch.int32), short[1].view(torch.int32))


def _random_case(seed: int) -> AttentionCase:
    rng = np.random.default_rng([seed, 12])
    group = int(rng.choice([1, 4, 8]))
    num_seqs = int(rng.choice([1, 3, 40]))
    longest = 900 if num_seqs < 9 else 250
    seq_lens = [int(rng.integers(0, longest)) for _ in range(num_seqs - 1)] + [int(rng.integers(260, 980))]
    query_lens = [min(n, int(rng.choice([0, 1, 3, 100, n]))) for n in seq_lens[:-1]] + [int(rng.integers(130, 260))]
    causal = bool(rng.random() < 0.8)
    spec = AttentionSpec(
        scale=0.125,
        causal=causal,
        window_left=int(rng.choice([0, 63, 64, 127, 300])) if rng.random() < 0.4 else None,
        window_right=int(rng.choice([0, 70])) if not causal and rng.random() < 0.5 else None,
    )
    sizes: dict[str, Any] = {
        "num_heads": 2 * group,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": str(rng.choice(["bfloat16", "float16"])),
        "spec": spec,
        "padding_tokens": int(rng.choice([0, 1, 40])),
        "values": str(rng.choice(["gaussian", "sparse", "large"], p=[0.6, 0.2, 0.2])),
    }
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["sinks"] = rng.standard_normal(2 * group).astype(np.float32)
    if seed % 3 == 2:
        return dense_case(seed, key_lens=seq_lens, query_lens=query_lens, **sizes, **options)
    block_size = int(rng.choice([8, 16, 16, 32, 64, 128, 256]))
    return paged_case(seed, seq_lens=seq_lens, query_lens=query_lens, block_size=block_size, **sizes, **options)


@pytest.mark.parametrize("seed", range(16))
def test_a_random_problem_is_as_exact_as_torch_and_has_the_bits_of_the_other_tile(seed):
    _check(_random_case(seed))


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("rows", [64, 128, 192, 384])
def test_lengths_around_the_rows_of_one_warpgroup_and_of_the_tile(rows, edge, seed):
    """The last tile has rows for one warpgroup, two, or three; the others let the keys pass."""
    n = 192 + rows + edge
    _check(paged_case(seed, seq_lens=[n, n + 64, 300], query_lens=[n, 192 + edge, 130], num_heads=4, num_kv_heads=1,
                      head_size=64, dtype="bfloat16"))  # fmt: skip


@pytest.mark.parametrize("window", [0, 3, 100, 129])
def test_a_window_that_hides_tiles_from_some_of_the_warpgroups(window, seed):
    spec = AttentionSpec(scale=0.125, window_left=window)
    _check(paged_case(seed, seq_lens=[900, 401], query_lens=[500, 200], num_heads=4, num_kv_heads=2, head_size=64,
                      dtype="bfloat16", spec=spec, padding_tokens=7))  # fmt: skip


def test_queries_longer_than_their_sequence_see_what_there_is(seed):
    """A dummy batch may state so: rows before position 0 are empty."""
    _check(dense_case(seed, key_lens=[100, 0, 200], query_lens=[400, 140, 193], num_heads=4, num_kv_heads=1,
                      head_size=64, dtype="float16", padding_tokens=3))  # fmt: skip


def test_more_sequences_than_are_looked_at_together(seed):
    lens = [130, 1, 0, 64, 200, 193] * 12
    _check(paged_case(seed, seq_lens=lens, query_lens=lens, num_heads=4, num_kv_heads=1, head_size=64,
                      dtype="bfloat16"))  # fmt: skip


def test_maxima_that_rise_in_every_tile_and_maxima_that_stay(seed):
    """Warps leave their sums as they are while no maximum rises: the first keys raise them here, or the last ones."""
    for rising in (False, True):
        case = dense_case(seed, key_lens=[800], query_lens=[800], num_heads=2, num_kv_heads=1, head_size=64,
                          dtype="bfloat16", spec=AttentionSpec(scale=0.125, causal=False))  # fmt: skip
        order = np.arange(800)[:: -1 if rising else 1]
        case.operands["query"][..., 0] = 8
        case.operands["key"][..., 0] = (order / 64)[:, None]
        _check(case)


def test_a_captured_graph_follows_new_lengths_and_tables(seed):
    case = paged_case(seed, seq_lens=[700, 3, 264, 0], query_lens=[500, 1, 140, 0], num_heads=4, num_kv_heads=1,
                      head_size=64, dtype="bfloat16").with_longest_query(_TALL_BOUND)  # fmt: skip
    live = case.tensors("cuda")
    static = {name: tensor.clone() for name, tensor in live.items()}
    for name in ("block_tables", "seq_lens", "query_start_loc"):
        static[name].zero_()
    arguments = {**static, "spec": case.spec, **case.limits, "out": torch.empty_like(static["query"])}
    paged_attention_with_lse(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = paged_attention_with_lse(**arguments)
    for name, tensor in live.items():
        static[name].copy_(tensor)
    graph.replay()
    torch.cuda.synchronize()
    assert_matches_reference(case, out, lse)
