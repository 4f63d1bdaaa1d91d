"""`jattn bench engine` on a model that is nothing but its shape."""

from __future__ import annotations

import pytest

from jattn.bench.engine import main

SIZES = ["--new-tokens", "6", "--batched-tokens", "64", "--rounds", "1", "--settings", "num_scheduler_steps=1"]
NOTHING = ["--decode", "--prompt", "--hits", "--throughput"]


def rows_of(capsys, *loads: str) -> list[str]:
    """Returns what is printed behind the title."""
    main(["--shape", "tiny", *NOTHING, *loads, *SIZES])
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.endswith("tiny, random weights")
    assert all(row.endswith("num_scheduler_steps=1") for row in rows)
    return rows


def test_a_decode_row_compiles_nothing_while_it_is_measured(capsys) -> None:
    (row,) = rows_of(capsys, "--decode", "1x16")

    assert row.startswith("decode 1x16  ")
    assert "late" not in row


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
