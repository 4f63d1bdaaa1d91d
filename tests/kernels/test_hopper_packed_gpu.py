"""The Hopper prefill kernel with the heads of a group side by side, on a CUDA device: the reference, and its bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import AttentionCase, assert_matches_reference, dense_case, paged_case
from tests.support.triton_ops import paged_attention, paged_attention_with_lse
from torch_core.attention import hopper_prefill
from torch_core.base.specs import AttentionSpec
from torch_core.launch.launcher import device_limits, run_operation
from torch_core.launch.plan import OperationPlan
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

pytestmark = pytest.mark.gpu

# One sequence of every paged case is longer than the narrowest table that is packed.
_LONG = 700


@pytest.fixture(autouse=True)
def _whole_rows(monkeypatch):
    monkeypatch.setattr(hopper_prefill, "hopper_chunk", lambda **_: 0)


def _plan(case: AttentionCase, **changes: Any) -> OperationPlan:
    call = replace(case.call("cuda", **changes), with_lse=True)
    # Not from the cache of plans: tests change what the plan chooses.
    return plan_call.__wrapped__(call.map(array_spec), device_limits(torch.device("cuda", 0)))


def _packed(plan: OperationPlan) -> int:
    assert plan.launches[0].name == "hopper_prefill_kernel"
    return dict(plan.launches[0].constexprs)["PACK"]


def _run(case: AttentionCase, pack: int) -> tuple[torch.Tensor, torch.Tensor]:
    plan = _plan(case)
    assert _packed(plan) == pack
    return _results(case, plan)


def _results(case: AttentionCase, plan: OperationPlan) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = case.tensors("cuda")
    results = run_operation(plan, {name: tensors[name] for name, _ in plan.inputs})
    return results["out"], results["lse"]


def _check(case: AttentionCase, pack: int = 4) -> None:
    assert_matches_reference(case, *_run(case, pack))


def _assert_same(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> None:
    assert torch.equal(first[0].view(torch.int16), second[0].view(torch.int16))
    assert torch.equal(first[1].view(torch.int32), second[1].view(torch.int32))


def _random_case(seed: int) -> tuple[AttentionCase, int]:
    rng = np.random.default_rng([seed, 13])
    head_size = int(rng.choice([64, 128, 256]))
    group = (2, 4, 8, 16)[seed % 4]
    num_seqs = int(rng.choice([1, 3, 40]))
    longest = int(rng.integers(65 // group + 1, 128))
    seq_lens = [int(rng.integers(0, 400)) for _ in range(num_seqs - 1)] + [int(rng.integers(_LONG, 1000))]
    query_lens = [min(n, int(rng.choice([0, 1, 3, longest // 2 + 1, longest]))) for n in seq_lens[:-1]] + [longest]
    causal = bool(rng.random() < 0.8)
    spec = AttentionSpec(
        scale=head_size**-0.5,
        causal=causal,
        window_left=int(rng.choice([0, 15, 63, 64, 127, 300])) if rng.random() < 0.4 else None,
        window_right=int(rng.choice([0, 70])) if not causal and rng.random() < 0.5 else None,
    )
    sizes: dict[str, Any] = {
        "num_heads": 2 * group,
        "num_kv_heads": 2,
        "head_size": head_size,
        "dtype": str(rng.choice(["bfloat16", "float16"])),
        "spec": spec,
        "padding_tokens": int(rng.choice([0, 1, 40])),
        "values": str(rng.choice(["gaussian", "sparse", "large"], p=[0.7, 0.2, 0.1])),
    }
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options["sinks"] = rng.standard_normal(2 * group).astype(np.float32)
    if seed % 5 == 4 and num_seqs < 40:
        return dense_case(seed, key_lens=[n + 600 for n in seq_lens], query_lens=query_lens, **sizes, **options), group
    block_size = int(rng.choice([8, 16, 16, 32, 64, 128, 256]))
    return paged_case(
        seed, seq_lens=seq_lens, query_lens=query_lens, block_size=block_size, **sizes, **options
    ), group  # fmt: skip


@pytest.mark.parametrize("seed", range(32))
def test_a_random_problem_is_as_exact_as_torch_in_its_dtype(seed):
    _check(*_random_case(seed))


@pytest.mark.parametrize("seed", range(8))
def test_a_packed_row_has_the_bits_of_a_row_in_a_tile_of_one_head(seed, monkeypatch):
    """A row meets the same tiles of keys in the same order, whatever rows share its tile."""
    case, group = _random_case(100 + seed)
    found = _run(case, group)
    monkeypatch.setattr(hopper_prefill, "hopper_pack", lambda **_: 1)
    plan = _plan(case)
    assert _packed(plan) == 1
    _assert_same(found, _results(case, plan))


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("rows", [64, 128, 192, 256])
@pytest.mark.parametrize("group", [2, 8])
def test_lengths_around_the_tokens_of_a_warpgroup_and_of_a_tile(group, rows, edge, seed):
    """The last tile has rows for both warpgroups or for one of them; the other lets the keys pass."""
    n = min(127, rows // group + edge)
    longest = 100 if group == 2 else 90
    _check(paged_case(seed, seq_lens=[_LONG, n, n + 64], query_lens=[longest, n, n], num_heads=2 * group,
                      num_kv_heads=2, head_size=128, dtype="bfloat16"), group)  # fmt: skip


@pytest.mark.parametrize("window", [0, 3, 100, 129])
def test_a_window_that_ends_inside_a_tile_of_keys(window, seed):
    spec = AttentionSpec(scale=0.09, window_left=window)
    _check(paged_case(seed, seq_lens=[900, 401, 127], query_lens=[127, 70, 20], num_heads=8, num_kv_heads=2,
                      head_size=128, dtype="bfloat16", spec=spec, padding_tokens=7))  # fmt: skip


def test_queries_longer_than_their_sequence_see_what_there_is(seed):
    """A dummy batch may state so: rows before position 0 are empty."""
    _check(dense_case(seed, key_lens=[50, 0, 2000], query_lens=[120, 70, 127], num_heads=8, num_kv_heads=2,
                      head_size=128, dtype="bfloat16"))  # fmt: skip
    _check(paged_case(seed, seq_lens=[20, 0, _LONG], query_lens=[120, 70, 127], num_heads=8, num_kv_heads=2,
                      head_size=64, dtype="float16"))  # fmt: skip


def test_more_sequences_than_are_looked_at_together(seed):
    seq_lens = [130, 1, 0, 64, 200, _LONG] * 12
    query_lens = [40, 1, 0, 64, 127, 17] * 12
    _check(paged_case(seed, seq_lens=seq_lens, query_lens=query_lens, num_heads=4, num_kv_heads=1, head_size=128,
                      dtype="bfloat16"))  # fmt: skip


def test_a_group_of_two_packs_finds_its_keys_and_its_sinks(seed):
    sinks = np.linspace(-3, 3, 64, dtype=np.float32)
    case = paged_case(seed, seq_lens=[_LONG, 90, 1], query_lens=[40, 9, 1], num_heads=64, num_kv_heads=2,
                      head_size=128, dtype="bfloat16", sinks=sinks)  # fmt: skip
    _check(case, 16)


def test_cross_attention_without_a_mask(seed):
    spec = AttentionSpec(scale=0.1, causal=False)
    _check(dense_case(seed, key_lens=[77, 1500, 1], query_lens=[100, 127, 5], num_heads=8, num_kv_heads=2,
                      head_size=64, dtype="float16", spec=spec, padding_tokens=5))  # fmt: skip


def test_a_query_inside_a_wider_array_and_an_output_with_strides(seed):
    case = paged_case(seed, seq_lens=[_LONG], query_lens=[100], num_heads=8, num_kv_heads=2, head_size=128,
                      dtype="bfloat16")  # fmt: skip
    query = case.tensors("cuda")["query"]
    wide = torch.full((100, 24, 256), float("nan"), dtype=query.dtype, device="cuda")
    wide[:, 8:16, :128] = query
    out = torch.full((100, 8, 256), 7.0, dtype=query.dtype, device="cuda")
    inside = wide[:, 8:16, :128]
    assert _packed(_plan(case, query=inside)) == 4
    case.run(paged_attention, device="cuda", query=inside, out=out[..., 128:])
    assert_matches_reference(case, out[..., 128:].contiguous())
    assert (out[..., :128] == 7).all()


@pytest.mark.parametrize("group", [2, 4, 16])
def test_a_second_run_gives_the_same_bits(group, seed):
    case = paged_case(seed, seq_lens=[_LONG, 300, 90], query_lens=[100, 64, 40], num_heads=2 * group, num_kv_heads=2,
                      head_size=128, dtype="bfloat16")  # fmt: skip
    _assert_same(_run(case, group), _run(case, group))


def test_neighbours_change_no_bit(seed):
    sizes: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16"}
    seq_lens, query_lens = [_LONG, 90, 400, 64, 1], [100, 40, 127, 9, 1]
    full = paged_case(seed, seq_lens=seq_lens, query_lens=query_lens, **sizes)
    tensors = full.tensors("cuda")
    everything = _run(full, 4)
    starts = np.cumsum([0, *query_lens])
    for seq in range(3):
        rows = slice(starts[seq], starts[seq + 1])
        alone = paged_attention_with_lse(
            tensors["query"][rows],
            tensors["kv_cache"],
            tensors["block_tables"][seq : seq + 1],
            tensors["seq_lens"][seq : seq + 1],
            torch.tensor([0, query_lens[seq]], dtype=torch.int32, device="cuda"),
            spec=full.spec,
            max_query_len=127,
        )
        _assert_same(alone, (everything[0][rows], everything[1][rows]))


def test_a_captured_graph_follows_new_lengths_and_tables(seed):
    sizes: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16"}
    case = paged_case(seed, seq_lens=[_LONG, 3, 264, 0], query_lens=[127, 1, 90, 0], **sizes)
    assert _packed(_plan(case)) == 4
    live = case.tensors("cuda")
    static = {name: tensor.clone() for name, tensor in live.items()}
    for name in ("block_tables", "seq_lens", "query_start_loc"):
        static[name].zero_()
    arguments = {**static, "spec": case.spec, "max_query_len": 127, "out": torch.empty_like(static["query"])}
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


def test_one_token_padded_to_a_loose_bound(seed):
    """A query of one row: its array is smaller than the box that the copy engine moves."""
    case = paged_case(seed, seq_lens=[_LONG], query_lens=[1], num_heads=8, num_kv_heads=2, head_size=128,
                      dtype="bfloat16")  # fmt: skip
    loose = replace(case, limits={"max_query_len": 100})
    _check(loose)
