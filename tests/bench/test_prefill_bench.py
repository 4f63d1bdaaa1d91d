"""The benchmark of prefill without a device: which columns each table has, and what they are compared with."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from jattn import cli
from jattn.bench import measure, prefill
from jattn.bench.runner import main


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = SimpleNamespace(
        query=torch.zeros(64, 32, 128),
        kv_cache=torch.zeros(9, 2, 16, 8, 128),
        block_tables=torch.zeros(1, 4, dtype=torch.int32),
        seq_lens=torch.tensor([64], dtype=torch.int32),
        starts=torch.tensor([0, 64], dtype=torch.int32),
        out=None,
        max_query_len=64,
        max_key_len=64,
    )
    monkeypatch.setattr(prefill, "random_batch", lambda parts, **_: batch)
    monkeypatch.setattr(measure, "graph_us", lambda calls: 50.0)
    monkeypatch.setattr(measure, "chained_us", lambda *_, **__: 100.0)
    for name, result in (("require_cuda", None), ("matmul_flops", 1e15), ("copy_bytes_per_second", 1e12)):
        monkeypatch.setattr(measure, name, lambda *_, result=result: result)
    monkeypatch.setattr(measure, "device_name", lambda: "a device")


@pytest.mark.usefixtures("measured")
@pytest.mark.nightly
def test_e4m3_is_compared_with_e4m3_alone(capsys: pytest.CaptureFixture[str]) -> None:
    report = prefill.run(lengths=[512], fp8=True)
    assert report.columns == ("jattn paged", "cuDNN e4m3 in JAX dense")
    assert main(prefill.BENCHMARK, ["--fp8"]) == 0
    assert "cuDNN e4m3 in JAX dense takes 2.00 x the time of jattn paged" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.usefixtures("measured")
def test_16_bits_are_compared_with_16_bits_alone() -> None:
    columns = prefill.run(lengths=[512]).columns
    assert "cuDNN in JAX dense" in columns
    assert not [name for name in columns if "e4m3" in name]


@pytest.mark.usefixtures("measured")
def test_flash_attention_4_is_compared_with_the_same_kind_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill.peers, "load_peers", lambda _: object())
    monkeypatch.setattr(prefill.peers, "load_fa4", object)
    for name in ("fa4", "dense_fa4", "fa3", "dense_fa3", "vllm_triton"):
        monkeypatch.setattr(prefill.batches if name != "fa3" else prefill, name, lambda *_, **__: None)
    monkeypatch.setattr(prefill, "_vllm_dense", lambda *_: None)
    summary = prefill.run(lengths=[512], no_jax=True).summary
    assert "FA4 dense takes 1.00 x the time of jattn dense (geometric mean)" in summary
    assert "FA4 block 16 takes 1.00 x the time of jattn paged (geometric mean)" in summary


@pytest.mark.usefixtures("measured")
def test_a_jax_without_the_private_name_of_fp8_attention_leaves_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax._src.cudnn.fused_attention_stablehlo", None)
    monkeypatch.setattr(measure, "chained_us", lambda attend, query, tensors, **_: attend(query, *tensors[0]))
    (note,) = prefill.run(lengths=[512], fp8=True).notes
    assert note.startswith("cuDNN e4m3 in JAX dense at 512: ")


@pytest.mark.nightly
@pytest.mark.usefixtures("measured")
def test_rows_are_those_of_the_lengths_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(prefill.BENCHMARK, ["--lengths", "8192", "512", "--head-size", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "heads of 64" in lines[0]
    assert [line.split()[0] for line in lines[2:4]] == ["8192", "512"]


def test_a_length_that_leaves_tokens_over_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "prefill", "--lengths", "100"]) == 2
    error = "jattn: --lengths has 100; each must divide 16384, the tokens of a row.\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("instead", ["--mixed", "--chunks"])
@pytest.mark.parametrize("option", [("--head-size", "64"), ("--lengths", "512")])
def test_an_option_of_other_rows_is_refused_beside_them(
    instead: str, option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(prefill.BENCHMARK, [instead, *option])
    assert "have lengths of their own and heads of 128" in capsys.readouterr().err
