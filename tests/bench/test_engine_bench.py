"""`jattn bench engine` on a model that is nothing but its shape."""

from __future__ import annotations

from jattn.bench.engine import main


def test_it_prints_a_row_for_each_load(capsys) -> None:
    loads = ["--decode", "2x20", "--groups", "1x2x20", "--prompt", "32", "--throughput", "2x20x5"]

    main(["--shape", "tiny", *loads, "--new-tokens", "6", "--batched-tokens", "64", "--settings", "steps_in_flight=1"])

    title, *rows = capsys.readouterr().out.splitlines()
    assert title.endswith("tiny, random weights")
    assert [row.split("  ")[0] for row in rows] == [
        "decode 2x20",
        "groups 1x2x20",
        "prompt 32",
        "throughput 2x20x5",
    ]
    assert all(row.endswith("steps_in_flight=1") for row in rows)
