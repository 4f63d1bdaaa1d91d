"""The attention kernels on a CUDA device, against the float64 reference on 500 random problems."""

from __future__ import annotations

import pytest
import torch

from tests.support.attention_cases import (
    AttentionCase,
    assert_matches_reference,
    random_dense_case,
    random_paged_case,
)
from tests.support.kernel_cases import wide_case
from tests.support.triton_ops import attention_with_lse, paged_attention, paged_attention_with_lse

pytestmark = pytest.mark.gpu


def _check(case: AttentionCase) -> None:
    out, lse = case.run(paged_attention_with_lse if case.paged else attention_with_lse, device="cuda")
    assert_matches_reference(case, out, lse)


@pytest.mark.parametrize("seed", range(300))
def test_a_wide_random_problem_is_as_exact_as_torch_in_its_dtype(seed):
    _check(wide_case(seed))


@pytest.mark.parametrize("seed", range(140))
def test_a_random_paged_problem_is_as_exact_as_torch_in_its_dtype(seed):
    _check(random_paged_case(seed))


@pytest.mark.parametrize("seed", range(60))
def test_a_random_dense_problem_is_as_exact_as_torch_in_its_dtype(seed):
    _check(random_dense_case(seed))


def test_a_captured_graph_follows_new_lengths_and_tables(seed):
    """One graph, captured over padding, serves a batch that it had not seen."""
    from tests.support.attention_cases import paged_case

    case = paged_case(
        seed, seq_lens=[700, 3, 64, 0], query_lens=[1, 1, 1, 0], num_heads=8, head_size=64, dtype="bfloat16"
    )
    live = case.tensors("cuda")
    static = {name: tensor.clone() for name, tensor in live.items()}
    for name in ("block_tables", "seq_lens", "query_start_loc"):
        static[name].zero_()
    out = torch.empty_like(static["query"])
    arguments = {**static, "spec": case.spec, "max_query_len": 1, "out": out}
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
