"""`jattn bench engine` on a model that is nothing but its shape."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from flax import nnx

from jattn.bench import engine
from jattn.bench.engine import BENCHMARK
from jattn.bench.runner import main
from jattn.bench.shapes import SHAPES, random_decoder, shape_config, step_bytes
from jattn.llm.models import Decoder
from jattn.llm.models.shapes import num_parameters
from tests.support.devices import on_four_devices
from torch_core.base.errors import InvalidInput

SIZES = ["--new-tokens", "6", "--batched-tokens", "64", "--rounds", "1", "--settings", "num_scheduler_steps=1"]
NOTHING = ["--decode", "--prompt", "--hits", "--throughput"]


def rows_of(capsys, *loads: str) -> list[str]:
    """Returns the lines of the rows."""
    main(BENCHMARK, ["--shape", "tiny", *NOTHING, *loads, *SIZES])
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("jattn bench engine --shape tiny ")
    assert all(row.endswith("num_scheduler_steps=1") for row in rows)
    return rows


def test_a_decode_row_compiles_nothing_while_it_is_measured(capsys) -> None:
    (row,) = rows_of(capsys, "--decode", "1x16")

    assert row.startswith("decode 1x16  ")
    assert float(row.split()[-2]) == 0, "late seconds"


@on_four_devices
def test_a_model_that_one_device_would_not_hold_is_made_cut() -> None:
    mesh = jax.make_mesh((2,), ("tp",))
    model = random_decoder(SHAPES["tiny"], mesh)
    kernel: Any = model.layers[0].mlp.down_proj.kernel
    assert {shard.data.shape for shard in kernel[...].addressable_shards} == {(16, 16)}


@on_four_devices
def test_a_model_that_was_made_cut_has_rows_like_others() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(BENCHMARK, ["--shape", "tiny", "--cut", "2", *NOTHING, "--decode", "1x16", *SIZES[:-2]])
    assert out.getvalue().splitlines()[2].startswith("decode 1x16  ")


@pytest.mark.parametrize("name", ["nemotron-h-8b", "qwen3.5-9b", "falcon-h1-7b"])
def test_a_shape_whose_layers_keep_a_state_is_one_of_8b(name: str) -> None:
    assert 7.5e9 < num_parameters(shape_config(name)) < 9.1e9


def test_a_step_reads_weights_and_caches_once_and_replaces_states() -> None:
    config = shape_config("tiny-hybrid")
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    weights = 4 * (num_parameters(config) - config.vocab_size * config.hidden_size)
    # Two rows of keys and values in a block of 16 tokens; a convolution's state and four heads'.
    cache, states = 4 * 16 * 2 * 8, 4 * (3 * 64 + 4 * 8 * 8)
    assert step_bytes(model, model.paged_spec, 3, 2, block_size=16) == weights + 3 * (2 * cache + 2 * states)


@pytest.mark.nightly
def test_it_prints_a_row_for_each_load(capsys) -> None:
    loads = ["--groups", "1x2x16", "--prompt", "32", "--hits", "16x16", "--throughput", "1x20x5"]

    assert [row.split("  ")[0] for row in rows_of(capsys, *loads)] == [
        "hit 16x16",
        "prompt 32",
        "groups 1x2x16",
        "groups 1x2x16, each alone",
        "throughput 1x20x5",
    ]


@pytest.mark.nightly
def test_a_start_has_a_row_and_no_other_is_needed(capsys) -> None:
    settings = "max_num_seqs=1,max_num_batched_tokens=16"
    main(BENCHMARK, ["--shape", "tiny", *NOTHING, "--startup", "--settings", settings, "--json"])

    report = json.loads(capsys.readouterr().out)
    (row,) = report["rows"]
    assert (row["load"], row["unit"], row["settings"]) == ("start-up", "s", settings)
    stages = [float(seconds) for seconds in re.findall(r"after (\d+\.\d) s", report["summary"][0])]
    assert stages == sorted(stages)
    assert len(stages) == 3
    assert 0 < stages[0] <= stages[-1] <= round(row["median"], 1)
    assert row["median"] == row["rounds"][0] > 0
    assert row["compile_seconds"] > 0
    assert report["command"].startswith("jattn bench engine --shape tiny ")
    assert {"jax", "torch"} <= report["versions"].keys()
    assert report["machine"].keys() == {"platform", "processors", "python", "jattn"}


def test_a_load_that_is_refused_has_a_row_with_the_reason_and_later_ones_are_measured(capsys) -> None:
    settings = ["--settings", "num_scheduler_steps=1", "--json"]
    code = main(BENCHMARK, ["--shape", "tiny", *NOTHING, "--decode", "1x4096", "1x16", *SIZES[:-2], *settings])

    printed = capsys.readouterr()
    refused, measured = json.loads(printed.out)["rows"]
    assert code == 1
    assert (refused["median"], refused["rounds"]) == (None, [])
    assert refused["error"].startswith("decode 1x4096 with num_scheduler_steps=1: max_model_len is 4103; ")
    assert printed.err.splitlines()[-1] == f"jattn: {refused['error']}"
    assert measured["median"] > 0
    assert measured["error"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'speculative_config={"num_speculative_tokens": 2, "method": "ngram"},max_num_sequences=1',
            r"^--settings has 'max_num_sequences'; it may have batch_invariant, ",
        ),
        ("max_num_seqs=one", r"^--settings is not valid JSON: "),
        ("mesh=1", r"^--settings has 'mesh'; "),
    ],
)
def test_a_setting_that_engines_do_not_have_is_refused_before_a_model_is_made(text, message, monkeypatch) -> None:
    monkeypatch.setattr(engine, "random_decoder", lambda *_: pytest.fail("a model was made"))
    with pytest.raises(InvalidInput, match=message):
        main(BENCHMARK, ["--settings", "max_num_seqs=1", text])


def test_requests_that_do_not_all_fit_into_the_pool_are_measured_with_its_size_below(capsys) -> None:
    fields = "kv_cache_bytes=4096,num_scheduler_steps=1"
    main(BENCHMARK, ["--shape", "tiny", *NOTHING, "--throughput", "2x20x5", *SIZES[:-2], "--settings", fields])

    _, _, row, below = capsys.readouterr().out.splitlines()
    assert row.startswith("throughput 2x20x5  ")
    assert below.startswith(
        "throughput 2x20x5: all requests together need 5 blocks; the pool has 4 blocks of 16 tokens"
    )


def test_a_start_is_counted_from_where_the_process_began(monkeypatch) -> None:
    # In the file of a process that began 1,234.5 s after the machine, whose name has what ends a name in it.
    stat = "7 (a) b (c) S " + " ".join(map(str, range(4, 22))) + " 123450 23 24"
    monkeypatch.setattr(
        engine, "Path", lambda place: SimpleNamespace(read_text=lambda: {"/proc/self/stat": stat}[place])
    )
    monkeypatch.setattr(engine.os, "sysconf", {"SC_CLK_TCK": 100}.__getitem__)
    monkeypatch.setattr(engine.time, "clock_gettime", {time.CLOCK_BOOTTIME: 1240.75}.__getitem__)

    assert engine._process_seconds() == 6.25
