"""The benchmark of decode, on a CPU: its floor, and the steps and verdicts of a shared prefix."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch

from jattn.bench import decode, measure
from jattn.bench.batch import HEADS, KV_HEADS, Batch
from jattn.bench.report import Row
from jattn.bench.runner import main
from torch_core.base.errors import Unsupported


def test_both_steps_compute_the_same():
    seqs, prefix, length = 3, 32, 45
    tables = torch.arange(1, 3 * seqs + 1, dtype=torch.int32).view(seqs, 3)
    tables[:, :2] = tables[0, :2]
    batch: Any = Batch(
        query=torch.randn(seqs, HEADS, 128),
        kv_cache=torch.randn(10, 2, 16, KV_HEADS, 128),
        block_tables=tables,
        seq_lens=torch.full((seqs,), length, dtype=torch.int32),
        starts=torch.arange(seqs + 1, dtype=torch.int32),
        out=torch.empty(seqs, HEADS, 128),
        max_query_len=1,
        max_key_len=length,
    )
    plain = decode.cascade_step(batch, 0)().clone()

    assert (decode.cascade_step(batch, prefix)() - plain).abs().max() < 1e-5
    assert torch.equal(batch.kv_cache[9, 0, (length - 1) % 16], batch.query[2, :KV_HEADS])


def test_a_wrong_choice_is_counted():
    rows = [Row("", 1.0, {"jattn plain": plain, "jattn cascade": 10.0}) for plain in (9.0, 9.0, 12.0, 12.5, 20.0)]

    assert decode.verdicts(rows, [True, False, False, False, True]) == {
        "cascade chosen where it lost": 1,
        "left out where it won a fifth": 1,
    }


def test_the_floor_of_a_row_is_the_time_of_reading_heads_of_the_given_size(monkeypatch):
    sizes = []
    monkeypatch.setattr(decode, "cold_batches", lambda parts, **options: sizes.append(options["head_size"]) or [None])
    monkeypatch.setattr(decode, "ours", lambda *_: None)
    monkeypatch.setattr(measure, "graph_us", lambda calls: 50.0)
    for name, result in (("require_cuda", None), ("matmul_flops", 1e15), ("copy_bytes_per_second", 1e12)):
        monkeypatch.setattr(measure, name, lambda *_, result=result: result)
    monkeypatch.setattr(measure, "device_name", lambda: "a device")
    monkeypatch.setattr(decode, "_OURS_IN_JAX", decode.OURS)

    (row,) = decode.run(shapes=["4x100"], head_size=512, no_jax=True).rows

    assert sizes == [512]
    assert row.bound_us == pytest.approx(400 * 2 * KV_HEADS * 512 * 2 / 1e6)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it would run")
def test_a_shared_prefix_needs_cuda():
    with pytest.raises(Unsupported, match="jattn bench decode measures CUDA kernels"):
        main(decode.BENCHMARK, ["--cascade"])
