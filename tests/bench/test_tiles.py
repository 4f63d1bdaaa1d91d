"""The search of the Hopper kernel's tiles: its candidates, their plans without a device, and the results file."""

from __future__ import annotations

import json
from concurrent.futures import Future

import jax
import pytest

from jattn.bench import measure, tune
from jattn.bench.report import BenchReport, Row
from jattn.bench.runner import main
from torch_core.attention.kernels.hopper.plan import hopper_tile
from torch_core.base.errors import Unsupported
from torch_core.launch.plan import DeviceLimits


@pytest.mark.parametrize("head_size", tune.CANDIDATES)
def test_the_frozen_tiles_are_candidates(head_size):
    frozen = {hopper_tile(head_size=head_size, max_query_len=length) for length in tune.LENGTHS}
    assert frozen <= set(tune.CANDIDATES[head_size])


@pytest.mark.parametrize("head_size", tune.CANDIDATES)
def test_candidates_fit_the_registers_and_the_shared_memory_and_have_names_of_their_own(head_size):
    candidates = tune.CANDIDATES[head_size]
    for tile in candidates:
        assert (tile.warpgroups * tile.consumer_registers + tile.producer_registers) * 128 <= 65536
        rows = tile.query_stages * tile.rows + 2 * tile.stages * tile.block_n
        assert rows * head_size * 2 <= DeviceLimits().shared_memory
    assert len({tune.tile_name(tile) for tile in candidates}) == len(candidates)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("head_size", tune.CANDIDATES)
def test_every_candidate_has_a_plan_with_its_tile(head_size, paged):
    plans = tune.plans(head_size, 2048, paged=paged)
    assert set(plans) == set(tune.CANDIDATES[head_size])
    for tile, plan in plans.items():
        constexprs = dict(plan.launches[0].constexprs)
        assert plan.launches[0].name == "hopper_prefill_kernel"
        assert (constexprs["WARPGROUPS"], constexprs["BLOCK_N"]) == (tile.warpgroups, tile.block_n)
        assert constexprs["STAGES"] == tile.stages


def test_the_plan_of_the_frozen_tile_is_the_plan_of_the_operation(monkeypatch):
    frozen = hopper_tile(head_size=64, max_query_len=4096)
    assert frozen is not None
    plan = tune.plans(64, 4096, paged=True)[frozen]
    base = {}
    monkeypatch.setattr(tune, "replace", lambda plan, **_: base.setdefault("plan", plan))
    tune.plans(64, 4096, paged=True)
    assert plan == base["plan"]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it would run")
def test_the_search_says_that_it_needs_cuda():
    with pytest.raises(Unsupported, match="jattn bench tune measures CUDA kernels"):
        main(tune.BENCHMARK, ["--hopper-tiles"])


@pytest.mark.nightly
def test_a_search_times_every_candidate_and_notes_the_one_that_fails(monkeypatch):
    def call(plan, length):
        return dict(plan.launches[0].constexprs)["WARPGROUPS"]

    def graph_us(calls):
        if calls[0] == 3:
            raise Unsupported("too many\nwarpgroups")
        return 100.0

    monkeypatch.setattr(tune, "_call", call)
    monkeypatch.setattr(tune, "_compile_together", lambda *_: None)
    monkeypatch.setattr(measure, "graph_us", graph_us)
    for name, result in (("require_cuda", None), ("matmul_flops", 1e15), ("copy_bytes_per_second", 1e12)):
        monkeypatch.setattr(measure, name, lambda *_, result=result: result)
    monkeypatch.setattr(measure, "device_name", lambda: "a device")
    report = tune.search(64, lengths=[2048])
    assert [row.label for row in report.rows] == ["2048 dense", "2048 paged"]
    assert report.rows[0].us["2x128x4x2 r232 p h2"] == 100.0
    assert report.rows[0].shown("2x128x4x2 r232 p h2") == pytest.approx(2 * 16384 * 2048 * 32 * 64 / 1e8)
    assert "3x64x4x2 r160 po h2 at 2048: too many" in report.notes


def test_tiles_are_compiled_once_for_each_variant(monkeypatch):
    compiled = []

    class Pool:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, *arguments):
            compiled.append(arguments)
            return Future()

    monkeypatch.setattr(tune, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(Future, "exception", lambda self: None)
    tune._compile_together(128, (512, 1024))
    tiles_and_layouts = {(paged, tile) for _, _, paged, tile in compiled}
    assert len(compiled) == len(tiles_and_layouts) == 2 * len(tune.CANDIDATES[128])


def test_the_results_name_the_tiles_of_their_columns(monkeypatch, tmp_path, capsys):
    row = Row("2048 dense", 1.0, {"2x128x2x2 r232 po h2": 2.0}, "TFLOP/s", 1e9)
    report = BenchReport("tiles", "a device", {"triton": "3"}, 1e12, 1e15, (row,))
    monkeypatch.setattr(tune, "search", lambda size: report)
    path = tmp_path / "tiles.json"
    assert main(tune.BENCHMARK, ["--hopper-tiles", "--head-size", "128", "--json", str(path)]) == 0
    stored = json.loads(path.read_text())["128"]
    assert stored["tiles"]["2x128x2x2 r232 po h2"]["block_n"] == 128
    assert stored["rows"][0]["us"] == {"2x128x2x2 r232 po h2": 2.0}
    assert "2048 dense" in capsys.readouterr().out
