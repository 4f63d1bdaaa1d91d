"""The public operations choose their implementation by device, and the CPU needs no Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.attention_cases import dense_case, paged_case
from torch_core import ops
from torch_core.base.errors import Unsupported


def test_cpu_tensors_never_import_triton():
    program = """
import sys, torch
before = set(sys.modules)
from torch_core import ops
from torch_core.base.specs import AttentionSpec
x, cache = torch.ones(1, 1, 16), torch.ones(2, 2, 4, 1, 16)
row = torch.tensor([0, 1], dtype=torch.int32)
one = torch.ones(1, dtype=torch.int32)
ops.write_kv_cache(x, x, cache, one)
ops.paged_attention(x, cache, one[None], one, row, spec=AttentionSpec(scale=1.0), max_query_len=1)
ops.attention(x, x, x, row, row, spec=AttentionSpec(scale=1.0), max_query_len=1, max_key_len=1)
ops.copy_blocks(cache, row[None])
ops.merge_states(x, x[..., 0], x, x[..., 0])
print(sorted(m for m in set(sys.modules) - before if m.split(".")[0] == "triton"))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


META = torch.device("meta")


@pytest.mark.parametrize(
    "call",
    [
        lambda: paged_case(1, seq_lens=[3], query_lens=[1]).run(ops.paged_attention, device="meta"),
        lambda: paged_case(1, seq_lens=[3], query_lens=[1]).run(ops.paged_attention_with_lse, device="meta"),
        lambda: dense_case(1, key_lens=[3], query_lens=[1]).run(ops.attention, device="meta"),
        lambda: dense_case(1, key_lens=[3], query_lens=[1]).run(ops.attention_with_lse, device="meta"),
        lambda: ops.write_kv_cache(*[torch.ones(1, 1, 8, device=META)] * 2, *[torch.ones(1, device=META)] * 2),
        lambda: ops.copy_blocks(torch.ones(1, device=META), torch.ones(1, 2, device=META)),
        lambda: ops.merge_states(*[torch.ones(1, 1, 8, device=META)] * 4),
    ],
)
def test_a_device_without_an_implementation_is_named(call):
    with pytest.raises(Unsupported, match="device is 'meta'; there are implementations for cpu and cuda only"):
        call()


def test_the_number_of_torch_threads_is_left_alone():
    before = torch.get_num_threads()
    paged_case(1, seq_lens=[3], query_lens=[1]).run(ops.paged_attention)
    assert torch.get_num_threads() == before


def test_an_exception_of_the_checks_leaves_the_output_untouched():
    case = paged_case(1, seq_lens=[3], query_lens=[1])
    out = torch.full((1, 6, 32), 7.0)
    with pytest.raises(ValueError, match="block_tables"):
        case.run(ops.paged_attention, out=out, block_tables=torch.tensor([[99]], dtype=torch.int32))
    assert torch.equal(out, torch.full((1, 6, 32), 7.0))


@pytest.mark.parametrize("name", ["attention", "paged_attention", "mla_attention", "sparse_mla_attention"])
def test_a_missing_argument_is_missed_under_the_name_that_was_called(name):
    for called in (name, f"{name}_with_lse"):
        with pytest.raises(TypeError, match=rf"^{called}\(\) missing .* required "):
            getattr(ops, called)(torch.ones(3, 4, 8))
