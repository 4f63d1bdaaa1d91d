"""`jattn bench serve`: what it counts, at its smallest."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jattn.bench.arrivals import Load, Timeline, row_of
from jattn.bench.clients import Direct, send
from jattn.bench.runner import main
from jattn.bench.serve import BENCHMARK, run
from jattn.cli import main as cli
from jattn.llm.engine import LLM, Engine, EngineConfig
from jattn.llm.serve import AsyncLLM
from tests.serve.conftest import KEY
from tests.support.tiny_models import write_tiny_model
from torch_core.base.errors import InvalidInput


# The clients of a server of its own are a process of theirs, which takes seconds to start.
@pytest.mark.parametrize("direct", [pytest.param([], marks=pytest.mark.nightly), ["--direct"]])
def test_every_request_is_counted_and_timed(capsys, tmp_path, monkeypatch, direct) -> None:
    # All programs that any traffic could need take longer than the traffic.
    monkeypatch.setattr(Engine, "warmup", lambda *_, **__: None)
    sizes = ["--settings", "max_num_seqs=1,max_num_batched_tokens=64", "--model", str(write_tiny_model(tmp_path, 0))]
    loads = ["4x5:50/s:3", "4x5:inf/s:3", "4x5:2users:3"]

    assert main(BENCHMARK, [*sizes, "--loads", *loads, "--ttft-goal-ms", "1e9", "--json", *direct]) == 0

    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["load"] for row in rows] == loads
    for row in rows:
        assert (row["completed"], row["failed"]) == (3, 0)
        assert row["output_tokens_per_second"] == pytest.approx(15 / row["duration_s"])
        assert row["goodput"] == pytest.approx(row["requests_per_second"])
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["e2e_ms"]["p99"]


def test_requests_that_fail_are_counted_and_the_exit_says_so(server, capsys) -> None:
    sizes = ["--loads", "4x5:inf/s:2"]

    assert cli(["bench", "serve", "--url", server.url, "--api-key", "wrong", *sizes]) == 1
    assert main(BENCHMARK, ["--url", server.url, "--api-key", KEY, *sizes]) == 0

    printed = capsys.readouterr()
    assert [line.split()[:3] for line in printed.out.splitlines() if line.startswith("4x5")] == [
        ["4x5:inf/s:2", "0", "2"],
        ["4x5:inf/s:2", "2", "0"],
    ]

    assert "wrong" not in printed.out, "the title has the command without the key"
    assert "\njattn: at 4x5:inf/s:2 2 requests failed; the first: status 401: " in printed.err


def test_users_of_a_load_that_is_refused_send_all_of_it() -> None:
    class Refuses:
        def add(self, *_: object, **__: object) -> None:
            raise InvalidInput("too long")

    with ThreadPoolExecutor(2) as adders:
        timelines, _ = send(Direct(Refuses(), adders), Load.of("4x4:1users:2000"), 0, 100, False)  # type: ignore[arg-type]
    assert [timeline.error for timeline in timelines] == ["too long"] * 2000


def test_no_request_is_added_before_it_arrives() -> None:
    added = []

    class Refuses:
        def add(self, *_: object, **__: object) -> None:
            added.append(time.perf_counter())
            raise InvalidInput("too long")

    with ThreadPoolExecutor(8) as adders:
        timelines, _ = send(Direct(Refuses(), adders), Load.of("4x4:100/s:20"), 0, 100, False)  # type: ignore[arg-type]
    arrivals = sorted(timeline.arrival for timeline in timelines)
    assert len(added) == 20
    assert all(at >= arrival for at, arrival in zip(sorted(added), arrivals, strict=True))


def test_the_engine_adds_the_requests_of_users_between_two_steps(tmp_path) -> None:
    adding = []

    class Watched(AsyncLLM):
        def add(self, *arguments: Any, **options: Any) -> str:
            adding.append(threading.current_thread().name)
            return super().add(*arguments, **options)

    llm = LLM(str(write_tiny_model(tmp_path, 0)), config=EngineConfig(max_num_seqs=2, max_num_batched_tokens=64))
    with Watched(llm) as watched, ThreadPoolExecutor(1) as adders:
        timelines, _ = send(Direct(watched, adders), Load.of("4x3:2users:5"), 0, 100, False)

    assert [each.num_tokens for each in timelines] == [3] * 5
    # Behind a request that no row counts.
    assert adding[1:] == ["jattn-engine"] * 5


def test_what_json_has_no_numbers_for_is_spelled_otherwise(server, capsys) -> None:
    sizes = ["--loads", "4x5:inf/s:1", "--json"]

    assert main(BENCHMARK, ["--url", server.url, "--api-key", "wrong", *sizes]) == 1

    (row,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["rows"]
    assert (row["load"], row["ttft_ms"]["p50"]) == ("4x5:inf/s:1", None)


@pytest.mark.nightly
def test_a_picture_shows_latencies_and_the_pool(server, capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    sizes = ["--loads", "4x30:20/s:3", "4x30:inf/s:3", "--json"]

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


@pytest.mark.parametrize("load", ["4x5:0/s:3", "4x5:3users:0", "0x5:inf/s:3", "chat:nan/s:3", "4x5", "5:2users:3"])
def test_a_load_out_of_range_is_refused(load) -> None:
    with pytest.raises(InvalidInput, match=r"loads.*it must be LENGTHS:ARRIVALS:REQUESTS"):
        list(run(loads=[load]))


def test_a_loads_requests_follow_from_the_seed(seed) -> None:
    load = Load.of("chat:8/s:400")

    sizes, arrivals = load.sizes(seed), load.arrivals(seed)

    assert (sizes, arrivals) == (load.sizes(seed), load.arrivals(seed))
    assert sizes != load.sizes(seed + 1)
    assert [len(prompt) for prompt in load.prompts(seed, 50)] == [prompt for prompt, _ in sizes]
    assert all(4 <= prompt <= 2048 and 4 <= answer <= 1024 for prompt, answer in sizes)
    assert arrivals == sorted(arrivals)


def test_users_wait_for_their_answers() -> None:
    load = Load.of("4x5:2users:3")
    timelines = [Timeline(0.0, [1.0, 2.0], 5), Timeline(0.0, [1.0, 3.0], 5), Timeline(2.0, [2.5, 4.5], 5)]

    row = row_of(load, timelines)

    assert (load.users, load.arrivals(0), row.duration_s, row.output_tokens_per_second) == (2, [0.0] * 3, 4.5, 15 / 4.5)
    assert row.tpot_ms["p50"] == pytest.approx(500)
