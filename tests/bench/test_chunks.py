"""The benchmark of chunks: the kernels that it forces, without a device, and its report."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch

from jattn.bench import batch as batches
from jattn.bench import measure, prefill
from jattn.bench.runner import main, sizes
from torch_core.attention.call import PagedCall
from torch_core.base.errors import Unsupported
from torch_core.base.specs import ArraySpec, AttentionSpec
from torch_core.launch.plan import OperationPlan


def _plans(seqs: int, new: int, before: int, dtype: str = "bfloat16") -> dict[str, OperationPlan]:
    blocks = math.ceil((before + new) / 16)
    return prefill.chunk_plans(
        PagedCall(
            query=ArraySpec((seqs * new, 32, 128), dtype),
            kv_cache=ArraySpec((seqs * blocks + 1, 2, 16, 8, 128), dtype),
            block_tables=ArraySpec((seqs, blocks), "int32"),
            seq_lens=ArraySpec((seqs,), "int32"),
            query_start_loc=ArraySpec((seqs + 1,), "int32"),
            spec=AttentionSpec(scale=128**-0.5),
            max_query_len=new,
        )
    )


def _kernel(plan: OperationPlan) -> tuple[str, Any]:
    launch = plan.launches[0]
    return launch.name.removesuffix("_kernel"), dict(launch.constexprs)["PACK"]


@pytest.mark.parametrize(("dtype", "kernel"), [("bfloat16", "hopper"), ("float8_e4m3fn", "hopper_fp8")])
@pytest.mark.parametrize("before", prefill.CONTEXTS)
@pytest.mark.parametrize(("seqs", "new"), [sizes(shape) for shape in prefill.SHAPES])
def test_each_column_forces_its_kernel_for_every_sequence(seqs, new, before, dtype, kernel):
    plans = _plans(seqs, new, before, dtype)
    forced = {name.removeprefix("jattn "): plan for name, plan in plans.items() if name != "jattn"}
    assert {name: _kernel(plan) for name, plan in forced.items()} == {
        "portable": ("attention_rows", 4),
        "Hopper packed": (f"{kernel}_prefill", 4),
        "Hopper unpacked": (f"{kernel}_prefill", 1),
    }
    assert all(len(plan.launches) == 1 and not plan.scratch for plan in forced.values())
    assert {dict(plan.launches[0].constexprs)["MIN_QUERY"] for plan in forced.values()} == {1}


def test_the_first_column_is_the_plan_of_the_operation():
    assert _kernel(_plans(64, 8, 2048)["jattn"]) == ("attention_split", 4)
    assert _kernel(_plans(64, 16, 8192)["jattn"]) == ("attention_rows", 4)
    assert _kernel(_plans(32, 32, 2048)["jattn"]) == ("hopper_prefill", 4)
    assert _kernel(_plans(8, 512, 2048)["jattn"]) == ("hopper_prefill", 1)


def test_a_row_times_every_kernel_and_notes_the_one_that_fails(monkeypatch):
    def run_operation(plan: OperationPlan, arrays: dict, out: dict) -> None:
        if _kernel(plan) == ("attention_rows", 4):
            raise Unsupported("no\nroom")

    batch = SimpleNamespace(
        query=torch.zeros(64, 32, 128, dtype=torch.bfloat16),
        kv_cache=torch.zeros(9, 2, 16, 8, 128, dtype=torch.bfloat16),
        block_tables=torch.zeros(2, 64, dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32),
        starts=torch.zeros(3, dtype=torch.int32),
        out=None,
        max_query_len=32,
    )
    monkeypatch.setattr(prefill, "run_operation", run_operation)
    monkeypatch.setattr(batches, "random_batch", lambda parts, **_: batch)
    monkeypatch.setattr(measure, "graph_us", lambda calls: [call() for call in calls] and 50.0)
    for name, result in (("require_cuda", None), ("matmul_flops", 1e15), ("copy_bytes_per_second", 1e12)):
        monkeypatch.setattr(measure, name, lambda *_, result=result: result)
    monkeypatch.setattr(measure, "device_name", lambda: "a device")
    report = prefill.run_chunks(shapes=["2x32"], contexts=[2048])
    assert report.columns == ("jattn", "jattn portable", "jattn Hopper packed", "jattn Hopper unpacked")
    assert report.rows[0].us["jattn Hopper packed"] == 50.0
    assert report.notes == ("jattn portable at 2 x 32 on 2048: no",)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it would run")
def test_chunks_need_cuda():
    with pytest.raises(Unsupported, match="jattn bench prefill measures CUDA kernels"):
        main(prefill.BENCHMARK, ["--chunks"])
