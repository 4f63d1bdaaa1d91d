"""`jattn bench engine` on a model that is nothing but its shape."""

from __future__ import annotations

from jattn.bench.engine import main


def test_it_prints_a_row_for_each_load(capsys) -> None:
    loads = ["--decode", "1x16", "--groups", "1x2x16", "--prompt", "32", "--hits", "16x16", "--throughput", "1x20x5"]
    sizes = ["--new-tokens", "6", "--batched-tokens", "64", "--rounds", "1"]

    main(["--shape", "tiny", *loads, *sizes, "--settings", "num_scheduler_steps=1"])

    title, *rows = capsys.readouterr().out.splitlines()
    assert title.endswith("tiny, random weights")
    assert [row.split("  ")[0] for row in rows] == [
        "decode 1x16",
        "hit 16x16",
        "prompt 32",
        "groups 1x2x16",
        "groups 1x2x16, each alone",
        "throughput 1x20x5",
    ]
    assert all(row.endswith("num_scheduler_steps=1") for row in rows)
