"""`jattn bench serve`: what it counts, at its smallest."""

from __future__ import annotations

import json
import math
import sys

import pytest

from jattn.bench.runner import main
from jattn.bench.serve import BENCHMARK, run
from jattn.cli import main as cli
from jattn.llm.engine import Engine
from tests.serve.conftest import KEY
from tests.support.tiny_models import write_tiny_model
from torch_core.base.errors import InvalidInput


def test_every_request_is_counted_and_timed(capsys, tmp_path, monkeypatch) -> None:
    # All programs that any traffic could need take longer than the traffic.
    monkeypatch.setattr(Engine, "warmup", lambda *_: None)
    sizes = ["--num-requests", "3", "--prompt-tokens", "4", "--new-tokens", "5", "--max-num-seqs", "1"]
    sizes += ["--max-num-batched-tokens", "64", "--model", str(write_tiny_model(tmp_path, 0))]

    assert main(BENCHMARK, [*sizes, "--rates", "50", "inf", "--ttft-goal-ms", "1e9", "--json"]) == 0

    slow, burst = json.loads(capsys.readouterr().out)["rows"]
    assert (slow["rate"], burst["rate"]) == (50, "inf")
    for row in (slow, burst):
        assert (row["completed"], row["failed"]) == (3, 0)
        assert row["output_tokens_per_second"] == pytest.approx(15 / row["duration_s"])
        assert row["goodput"] == pytest.approx(row["requests_per_second"])
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["e2e_ms"]["p99"]


def test_requests_that_fail_are_counted_and_the_exit_says_so(server, capsys) -> None:
    sizes = ["--num-requests", "2", "--prompt-tokens", "4", "--new-tokens", "5", "--rates", "inf"]

    assert cli(["bench", "serve", "--url", server.url, "--api-key", "wrong", *sizes]) == 1
    assert main(BENCHMARK, ["--url", server.url, "--api-key", KEY, *sizes]) == 0

    printed = capsys.readouterr()
    assert [line.split()[:3] for line in printed.out.splitlines() if line.startswith("inf")] == [
        ["inf", "0", "2"],
        ["inf", "2", "0"],
    ]

    assert "wrong" not in printed.out, "the title has the command without the key"
    assert printed.err.startswith("jattn: at inf requests a second 2 failed; the first: status 401: ")


def test_what_json_has_no_numbers_for_is_spelled_otherwise(server, capsys) -> None:
    sizes = ["--num-requests", "1", "--prompt-tokens", "4", "--new-tokens", "5", "--rates", "inf", "--json"]

    assert main(BENCHMARK, ["--url", server.url, "--api-key", "wrong", *sizes]) == 1

    (row,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["rows"]
    assert (row["rate"], row["ttft_ms"]["p50"]) == ("inf", None)


@pytest.mark.nightly
def test_a_picture_shows_latencies_and_the_pool(server, capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    sizes = ["--num-requests", "3", "--prompt-tokens", "4", "--new-tokens", "30", "--rates", "20", "inf", "--json"]

    assert main(BENCHMARK, ["--url", server.url, "--api-key", KEY, *sizes, "--png", str(tmp_path / "serve.png")]) == 0

    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")
    watched = [row["pool_usage"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert all(0 <= share <= 1 for row in watched for _, share in row)
    assert all(row for row in watched)


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    assert cli(["bench", "serve", "--url", "http://127.0.0.1:1", "--png", "x.png"]) == 2

    assert capsys.readouterr().err == (
        "jattn: a picture needs matplotlib: pip install 'jattn[plot]', or leave --png out.\n"
    )


@pytest.mark.parametrize("rate", [0.0, math.nan])
def test_sizes_out_of_range_are_refused(rate) -> None:
    with pytest.raises(InvalidInput, match=r"must be at least 1, and rates above 0\."):
        run(rates=[rate])
