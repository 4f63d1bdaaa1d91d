"""The public operations choose their implementation by device, and the CPU needs no Triton."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.attention_cases import dense_case, paged_case
from torch_core import ops
from torch_core.errors import Unsupported
from torch_core.ops import public


def test_cpu_tensors_never_import_triton():
    program = """
import sys, torch
before = set(sys.modules)
from torch_core import ops
from torch_core.specs import AttentionSpec
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
        lambda: ops.write_kv_cache(*[torch.ones(1, 1, 8, device=META)] * 2, torch.ones(1), torch.ones(1)),
        lambda: ops.copy_blocks(torch.ones(1), torch.ones(1, 2, device=META)),
        lambda: ops.merge_states(*[torch.ones(1, 1, 8, device=META)] * 4),
    ],
)
def test_a_device_without_an_implementation_is_named(call):
    with pytest.raises(Unsupported, match="the tensors are on meta; there are implementations for cpu and cuda only"):
        call()


def test_cuda_tensors_go_to_the_cuda_modules_with_every_argument(monkeypatch):
    calls: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = []

    def module_of(tensor: Any, module: str = "cuda") -> Any:
        def function(name: str) -> Any:
            return lambda *args, **kwargs: calls.append((module, name, args, kwargs))

        return SimpleNamespace(**{name: function(name) for name in ops.__all__})

    monkeypatch.setattr(public, "_accelerated", module_of)
    x: Any = SimpleNamespace(device=torch.device("cuda"))
    ops.paged_attention(x, 1, 2, 3, 4, spec=5, max_query_len=6, out=7, k_scale=8, qq_bias=9)  # pyright: ignore
    ops.attention_with_lse(x, 1, 2, 3, 4, spec=5, max_query_len=6, max_key_len=7, sinks=8)  # pyright: ignore
    ops.write_kv_cache(x, 1, 2, 3, v_scale=4)  # pyright: ignore
    ops.copy_blocks(1, x)  # pyright: ignore
    ops.merge_states(x, 1, 2, 3)  # pyright: ignore
    assert [(module, name) for module, name, _, _ in calls] == [
        ("cuda", "paged_attention"),
        ("cuda", "attention_with_lse"),
        ("cuda_cache", "write_kv_cache"),
        ("cuda_cache", "copy_blocks"),
        ("cuda_cache", "merge_states"),
    ]
    options = {"k_scale": 8, "v_scale": None, "alibi_slopes": None, "sinks": None, "qq_bias": 9}
    assert calls[0][2:] == ((x, 1, 2, 3, 4), {"spec": 5, "max_query_len": 6, "out": 7, **options})
    dense = {"spec": 5, "max_query_len": 6, "max_key_len": 7, "out": None, "alibi_slopes": None, "sinks": 8}
    assert calls[1][2:] == ((x, 1, 2, 3, 4), dense)
    assert calls[2][2] == (x, 1, 2, 3)


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
