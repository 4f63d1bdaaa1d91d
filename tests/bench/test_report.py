"""Benchmark reports: ratios, tables, JSON, pictures; and a clear word where there is no CUDA device."""

from __future__ import annotations

import json
import math
import sys

import jax
import pytest

from jattn.bench import backward, decode, measure, mla, overhead, peers, prefill
from jattn.bench.pictures import draw_fractions
from jattn.bench.report import BenchReport, Row
from jattn.bench.runner import Benchmark, main
from torch_core.base.errors import InvalidInput, Unsupported


@pytest.fixture
def report():
    rows = (
        Row("1 x 8", 10.0, {"jattn": 20.0, "FA3": 40.0, "XLA": math.nan}),
        Row("8 x 8", 10.0, {"jattn": 10.0, "FA3": 5.0}),
    )
    return BenchReport(
        "decode", "H200", {"torch": "2.11"}, 4e12, 7e14, rows, ("XLA at 1 x 8: no memory",), {"calls": 3.0}
    )


def test_a_ratio_is_the_geometric_mean_over_the_rows_that_have_both(report):
    assert report.ratio("FA3") == pytest.approx(1.0)
    assert math.isnan(report.ratio("XLA"))
    assert report.columns == ("jattn", "FA3", "XLA")


def test_comparisons_are_a_sentence_for_each_peer_that_a_row_has_beside_ours(report):
    told = "takes 1.00 x the time of"
    assert report.comparisons(("FA3", "XLA", "nobody")) == [f"FA3 {told} jattn (geometric mean)"]
    assert report.comparisons(("jattn",), ours=lambda _: "FA3") == [f"jattn {told} FA3 (geometric mean)"]


def test_a_table_shows_times_fractions_values_and_notes(report):
    lines = report.table().splitlines()
    assert lines[0] == "decode on H200: copy 4.00 TB/s, bf16 matmul 700 TFLOP/s; torch 2.11"
    assert lines[2].split() == ["1", "x", "8", "10.0", "20.0", "(0.50)", "40.0", "(0.25)", "-"]
    assert lines[-2:] == ["calls: 3", "note: XLA at 1 x 8: no memory"]


def test_a_row_of_rates_shows_operations_over_time():
    row = Row("8192", 100.0, {"jattn": 200.0}, "TFLOP/s", 1e14)
    assert row.shown("jattn") == pytest.approx(5e5)
    assert math.isnan(row.shown("nobody"))


def test_a_report_is_written_as_json(report, tmp_path):
    benchmark = Benchmark("decode", None, lambda: report)
    assert main(benchmark, ["--json", str(tmp_path / "r.json")]) == 0
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored["rows"][0]["us"]["jattn"] == 20.0
    assert stored["values"] == {"calls": 3.0}


def test_a_report_is_drawn(report, tmp_path):
    pytest.importorskip("matplotlib")
    draw_fractions(report, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"


def test_a_picture_without_matplotlib_says_what_to_install(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=r"pip install 'jattn\[plot\]'"):
        draw_fractions(report, tmp_path / "r.png")


@pytest.mark.parametrize("module", [backward, decode, mla, prefill])
@pytest.mark.parametrize("option", ["--json", "--png"])
def test_a_place_that_no_report_can_have_is_refused_before_anything_is_measured(module, option, tmp_path):
    with pytest.raises(InvalidInput, match=r"there is no folder .*/none; make it"):
        main(module.BENCHMARK, [option, str(tmp_path / "none" / "report")])
    with pytest.raises(InvalidInput, match="this is a folder; name a file in it"):
        main(module.BENCHMARK, [option, str(tmp_path)])


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (decode, ["--cascade", "--fp8"], "--cascade measures a bfloat16 cache and no peers"),
        (mla, ["--prefill", "--heads", "16"], "--prefill has 16 heads and no cache"),
        (mla, ["--prefill", "--cache", "fp8"], "--prefill has 16 heads and no cache"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(module, options, message, capsys):
    with pytest.raises(SystemExit):
        main(module.BENCHMARK, options)
    assert message in capsys.readouterr().err


def test_latent_attention_without_heads_is_refused():
    with pytest.raises(InvalidInput, match="--heads has 0; each must be at least 1"):
        main(mla.BENCHMARK, ["--heads", "16", "0"])


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=r"pip install 'jattn\[plot\]'"):
        main(prefill.BENCHMARK, ["--png", str(tmp_path / "r.png")])


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it would run")
def test_the_mixed_batch_needs_cuda_too():
    with pytest.raises(Unsupported, match="jattn bench prefill measures CUDA kernels"):
        main(prefill.BENCHMARK, ["--mixed"])


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it would run")
@pytest.mark.parametrize(
    ("module", "name"), [(decode, "decode"), (prefill, "prefill"), (backward, "backward"), (overhead, "overhead")]
)
def test_a_cuda_benchmark_says_that_it_needs_cuda(module, name):
    message = f"jattn bench {name} measures CUDA kernels and needs a CUDA device in torch and in JAX"
    with pytest.raises(Unsupported, match=message):
        main(module.BENCHMARK, [])


def test_pools_are_many_when_small_and_two_when_large():
    assert measure.num_pools(1 << 20) == 64
    assert measure.num_pools(100 << 20) == 6
    assert measure.num_pools(4 << 30) == 2


def test_a_folder_without_the_peers_module_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"there is no bench_peers\.py in it"):
        peers.load_peers(tmp_path)
    assert peers.load_peers(None) is None


def test_the_peers_module_is_loaded_from_its_folder(tmp_path, monkeypatch):
    (tmp_path / "bench_peers.py").write_text("fa3 = 'a function'\n")
    monkeypatch.delitem(sys.modules, "bench_peers", raising=False)
    before = list(sys.path)
    assert peers.load_peers(tmp_path).fa3 == "a function"
    assert sys.path == before
    del sys.modules["bench_peers"]
