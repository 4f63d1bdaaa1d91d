"""The Hopper prefill kernel on a CUDA device: the float64 reference, poison, windows, empty rows, bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import AttentionCase, assert_matches_reference, dense_case, paged_case
from tests.support.triton_ops import attention_with_lse, paged_attention, paged_attention_with_lse
from torch_core.base.specs import AttentionSpec
from torch_core.launch.launcher import device_limits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

pytestmark = pytest.mark.gpu


def _check(case: AttentionCase) -> None:
    plan = plan_call(case.call("cuda").map(array_spec), device_limits(torch.device("cuda", 0)))
    assert plan.launches[0].name == "hopper_prefill_kernel"
    out, lse = case.run(paged_attention_with_lse if case.paged else attention_with_lse, device="cuda")
    assert_matches_reference(case, out, lse)


def _random_case(seed: int) -> AttentionCase:
    rng = np.random.default_rng([seed, 11])
    head_size = int(rng.choice([64, 128, 256]))
    group = int(rng.choice([1, 4, 8]))
    num_seqs = int(rng.choice([1, 3, 40]))
    longest = 700 if num_seqs < 9 else 200
    seq_lens = [int(rng.integers(0, longest)) for _ in range(num_seqs - 1)] + [int(rng.integers(260, 900))]
    query_lens = [min(n, int(rng.choice([0, 1, 3, 100, n]))) for n in seq_lens[:-1]] + [int(rng.integers(130, 260))]
    causal = bool(rng.random() < 0.8)
    spec = AttentionSpec(
        scale=head_size**-0.5,
        causal=causal,
        window_left=int(rng.choice([0, 63, 64, 127, 300])) if rng.random() < 0.35 else None,
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
    if rng.random() < 0.3:
        options["sinks"] = rng.standard_normal(2 * group).astype(np.float32)
    if seed % 3 == 2:
        return dense_case(seed, key_lens=seq_lens, query_lens=query_lens, **sizes, **options)
    block_size = int(rng.choice([8, 16, 16, 24, 32, 48, 64, 128, 192, 256]))
    return paged_case(seed, seq_lens=seq_lens, query_lens=query_lens, block_size=block_size, **sizes, **options)


@pytest.mark.parametrize("seed", range(24))
def test_a_random_problem_is_as_exact_as_torch_in_its_dtype(seed):
    _check(_random_case(seed))


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_lengths_around_multiples_of_the_tile(tiles, edge, seed):
    n = 128 * tiles + edge
    _check(paged_case(seed, seq_lens=[n, n + 64, 300], query_lens=[n, 128 + edge, 130], num_heads=4, num_kv_heads=1,
                      head_size=128, dtype="bfloat16"))  # fmt: skip


def test_queries_longer_than_their_sequence_see_what_there_is(seed):
    """A dummy batch may state so: rows before position 0 are empty."""
    case = dense_case(seed, key_lens=[100, 0, 200], query_lens=[300, 140, 150], num_heads=4, num_kv_heads=1,
                      head_size=128, dtype="bfloat16")  # fmt: skip
    _check(case)


def test_more_sequences_than_are_looked_at_together(seed):
    lens = [130, 1, 0, 64, 200] * 14
    _check(paged_case(seed, seq_lens=lens, query_lens=lens, num_heads=4, num_kv_heads=1, head_size=128,
                      dtype="bfloat16"))  # fmt: skip


def test_cross_attention_without_a_mask(seed):
    spec = AttentionSpec(scale=0.1, causal=False)
    _check(dense_case(seed, key_lens=[77, 500, 1], query_lens=[300, 129, 200], num_heads=4, num_kv_heads=4,
                      head_size=64, dtype="float16", spec=spec, padding_tokens=5))  # fmt: skip


def test_a_query_inside_a_wider_array_and_an_output_with_strides(seed):
    case = paged_case(seed, seq_lens=[300], query_lens=[200], num_heads=4, num_kv_heads=1, head_size=128,
                      dtype="bfloat16")  # fmt: skip
    query = case.tensors("cuda")["query"]
    wide = torch.full((*query.shape[:2], 256), float("nan"), dtype=query.dtype, device="cuda")
    wide[..., :128] = query
    out = torch.full((200, 4, 256), 7.0, dtype=query.dtype, device="cuda")
    case.run(paged_attention, device="cuda", query=wide[..., :128], out=out[..., 128:])
    assert_matches_reference(case, out[..., 128:].contiguous())
    assert (out[..., :128] == 7).all()


def test_a_captured_graph_follows_new_lengths_and_tables(seed):
    sizes = {"num_heads": 4, "num_kv_heads": 1, "head_size": 128, "dtype": "bfloat16"}
    case = paged_case(seed, seq_lens=[700, 3, 264, 0], query_lens=[500, 1, 140, 0], **sizes)
    live = case.tensors("cuda")
    static = {name: tensor.clone() for name, tensor in live.items()}
    for name in ("block_tables", "seq_lens", "query_start_loc"):
        static[name].zero_()
    out = torch.empty_like(static["query"])
    arguments = {**static, "spec": case.spec, "max_query_len": 500, "out": out}
    paged_attention(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(**arguments)
    for name, tensor in live.items():
        static[name].copy_(tensor)
    graph.replay()
    torch.cuda.synchronize()
    assert_matches_reference(case, out)
