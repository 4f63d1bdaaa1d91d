"""`jattn bench engine` on a model that is nothing but its shape."""

from __future__ import annotations

import re
import subprocess
import sys
import time

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


def test_a_start_is_counted_from_where_the_process_began(capsys) -> None:
    loads = [*NOTHING, "--startup", "--settings", "max_num_seqs=1,max_num_batched_tokens=16,batch_invariant=true"]
    code = f"from jattn.bench.engine import main; main({['--shape', 'tiny', *loads]})"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    outside = time.monotonic() - started

    found = re.fullmatch(r"start-up  ([\d.]+) s  compiled (\d+) s  .*", done.stdout.splitlines()[1])
    assert found is not None, done.stdout
    seconds, compiled = map(float, found.groups())
    # Ticks of the kernel are hundredths, and what compiled is rounded.
    assert compiled - 1 < seconds < outside + 0.02
